"""Purges and the ends of sessions, as the schema has them. A tenant does both to what is its own, an admin to all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from google.protobuf.message import Message
from kvstored_proto.namespace import DIGEST_BYTES
from kvstored_proto.v1 import admin_pb2 as pb

from kvstored.catalog.leases import Session
from kvstored.errors import InvalidArgument, NotFound, PermissionDenied
from kvstored.purge.receipts import Receipt, Selection
from kvstored.rpc.context import Context
from kvstored.rpc.paging import fitting
from kvstored.store.release_times import Cause

SECONDS_MAX: Final = 100 * 365 * 86_400.0
DEADLINE_MAX_S: Final = 86_400.0
NAME_BYTES_MAX: Final = 4096  # receipts are kept, and their names with them


def _selection(session: Session, request: pb.PurgeRequest) -> Selection:
    """What a request names, within what the caller may purge. Raises InvalidArgument or PermissionDenied."""
    admin = session.caller.role == "admin"
    tenant = request.tenant or ("" if admin else session.caller.tenant)
    if not admin and tenant != session.caller.tenant:
        raise PermissionDenied("another tenant's blocks are purged by the role admin only")
    if request.namespace_digest and len(request.namespace_digest) != DIGEST_BYTES:
        raise InvalidArgument(f"a namespace has a digest of {DIGEST_BYTES} bytes: see ListNamespaces")
    if request.model_version and not request.model:
        raise InvalidArgument("model_version needs a model")
    older_than_s = request.older_than_ms / 1000
    if len((request.tenant + request.model + request.model_version).encode()) > NAME_BYTES_MAX:
        raise InvalidArgument(f"tenant, model and model_version have at most {NAME_BYTES_MAX} bytes together")
    if request.deadline_ms > DEADLINE_MAX_S * 1000:
        raise InvalidArgument("deadline_ms is more than a day")
    if older_than_s > SECONDS_MAX:
        raise InvalidArgument("older_than_ms is more than a hundred years")
    if not (request.tenant or request.namespace_digest or request.model or older_than_s):
        raise InvalidArgument("name what to purge: a tenant, a namespace, a model, an age, or several of them")
    return Selection(tenant, request.namespace_digest, request.model, request.model_version, older_than_s)


async def _purge(context: Context, session: Session, request: pb.PurgeRequest) -> pb.PurgeReply:
    selection = _selection(session, request)
    spaces = context.store.parts.catalog.spaces.values()
    if selection.digest and not any(selection.takes(space.namespace) for space in spaces):
        raise NotFound("no such namespace: `kvstorectl namespaces` lists what there is")
    by = session.caller.tenant
    if request.dry_run:
        receipt = await context.purges.dry_run(selection, by)
    else:
        receipt = await context.purges.start(selection, by, request.deadline_ms / 1000)
    return pb.PurgeReply(boot_id=context.boot_id, receipt=_message(context, receipt))


def _purge_status(context: Context, session: Session, request: pb.PurgeStatusRequest) -> pb.PurgeStatusReply:
    visible = [r for r in context.purges.receipts.all() if _sees(session, r) and request.purge_id in ("", r.purge_id)]
    if request.purge_id and not visible:
        raise NotFound("no such purge: `kvstorectl purge status` lists those that are on record")
    return pb.PurgeStatusReply(boot_id=context.boot_id, receipts=fitting(_message(context, one) for one in visible))


def _sees(session: Session, receipt: Receipt) -> bool:
    """A tenant sees what it purged itself: of what an admin did the receipt may name others."""
    return session.caller.role == "admin" or receipt.by == session.caller.tenant == receipt.selection.tenant


def _message(context: Context, receipt: Receipt) -> pb.PurgeReceipt:
    selection = receipt.selection
    return pb.PurgeReceipt(
        purge_id=receipt.purge_id,
        state=context.purges.state_of(receipt),
        selection=pb.PurgeRequest(
            tenant=selection.tenant,
            namespace_digest=selection.digest,
            model=selection.model,
            model_version=selection.model_version,
            older_than_ms=round(selection.older_than_s * 1000),
            deadline_ms=round(receipt.deadline_s * 1000),
        ),
        by=receipt.by,
        begun_s=receipt.begun_s,
        duration_s=receipt.duration_s,
        phase=receipt.phase,
        steps_done=receipt.steps_done,
        steps=receipt.steps,
        dram_blocks=receipt.dram_blocks,
        dram_bytes=receipt.dram_bytes,
        nvme_blocks=receipt.nvme_blocks,
        nvme_bytes=receipt.nvme_bytes,
        dram_zeroed_bytes=receipt.dram_zeroed_bytes,
        nvme_zeroed_bytes=receipt.nvme_zeroed_bytes,
        staging_zeroed_bytes=receipt.staging_zeroed_bytes,
        leases=receipt.leases,
        leases_ended=receipt.leases_ended,
        sessions_ended=receipt.sessions_ended,
        sessions_ended_count=receipt.sessions_ended_count,
        remains=receipt.remains,
        notes=receipt.notes,
    )


def _kill_session(context: Context, session: Session, request: pb.KillSessionRequest) -> pb.KillSessionReply:
    caller = session.caller
    seen = [s for s in context.store.parts.sessions if caller.role == "admin" or s.caller.tenant == caller.tenant]
    found = [s for s in seen if request.session_id and s.session_id.hex().startswith(request.session_id.lower())]
    if not found:
        raise NotFound("no such session: `kvstorectl session ls` lists those that there are")
    if len(found) > 1:
        raise InvalidArgument(f"{len(found)} sessions have an id that begins so: give more of it")
    (victim,) = found
    context.store.releases.finish(victim)
    held = pb.KillSessionReply(
        boot_id=context.boot_id,
        leases=len(victim.group.leases),
        reservations=len(victim.reservations),
        staging_bytes=victim.staging_bytes,
    )
    context.store.part_with(victim, "it was killed", Cause.PREEMPTED)
    return held


SERVED: Final[dict[str, tuple[type[Message], Callable[[Context, Session, Any], Message | Awaitable[Message]]]]] = {
    "Purge": (pb.PurgeRequest, _purge),
    "PurgeStatus": (pb.PurgeStatusRequest, _purge_status),
    "KillSession": (pb.KillSessionRequest, _kill_session),
}
