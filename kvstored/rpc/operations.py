"""The data operations, once for both transports: message in, store call, message out.

A handler returns its reply, or an awaitable of it where the store has to wait. The table at
the end is the whole interface: the session socket finds operations by number, gRPC by name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import msgspec
from google.protobuf.message import Message
from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored import keys
from kvstored.catalog.catalog import Space
from kvstored.catalog.leases import Lease, Reservation, Session
from kvstored.errors import InvalidArgument
from kvstored.rpc import acts, admin, hinting, looking_up, roles, status, transferring
from kvstored.rpc.context import Context
from kvstored.rpc.terms import lifetime_of, wants_durable
from kvstored.store.answers import FoundRun, Held
from kvstored.store.outcomes import HIT
from kvstored.store.writes import Reserved

BLOCKS_MAX: Final = 2 * keys.BLOCKS_PER_CALL_MAX  # over all namespaces: 40 bytes each in a get's reply, one frame
Reply = Message | Awaitable[Message]
Handler = Callable[[Context, Session, Any], Reply]


class Operation(msgspec.Struct, frozen=True):
    """One operation: its method name, its request's type and who serves it."""

    name: str
    request: type[Message]
    serve: Handler


# ---- sessions ----


def _keep_alive(context: Context, session: Session, request: pb.KeepAliveRequest) -> Reply:
    return pb.KeepAliveReply(boot_id=context.boot_id)


def _close_session(context: Context, session: Session, request: pb.CloseSessionRequest) -> Reply:
    context.store.end_session(session)
    return pb.CloseSessionReply(boot_id=context.boot_id)


async def _open_namespace(context: Context, session: Session, request: pb.OpenNamespaceRequest) -> Message:
    durable, lifetime = request.durability == pb.DURABILITY_NVME, lifetime_of(session, request)
    opening = context.store.open_namespace(session, request.spec, durable=durable, lifetime=lifetime)
    handle, space, seed = await opening
    return pb.OpenNamespaceReply(
        boot_id=context.boot_id, namespace_id=handle, digest=space.namespace.digest, chain_seed=seed
    )


# ---- reading ----


def _asked(session: Session, request: Any) -> tuple[list[Space], tuple[bytes, ...]]:
    """The spaces and hashes of a call over several namespaces. Raises NotFound or InvalidArgument."""
    spaces = session.spaces_of(request.namespace_ids)
    hashes = session.hashes_asked(request.hashes, request.hash_bytes)
    if len(spaces) * len(hashes) > BLOCKS_MAX:
        raise InvalidArgument(f"{len(hashes)} blocks in {len(spaces)} namespaces: {BLOCKS_MAX} in all are allowed")
    return spaces, hashes


def _lookup(context: Context, session: Session, request: pb.LookupRequest) -> Reply:
    spaces, hashes = _asked(session, request)
    if request.prefetch or request.prefill_tokens_per_s:
        return looking_up.looked(context, session, request, spaces, hashes)
    found = context.store.reads.lookup(spaces, hashes)
    if isinstance(found, FoundRun):
        return looking_up.looked_up(context, session, spaces, hashes, found)
    return _map(found, lambda run: looking_up.looked_up(context, session, spaces, hashes, run))


async def _contains(context: Context, session: Session, request: pb.ContainsRequest) -> Message:
    hashes = keys.split_hashes(request.hashes, request.hash_bytes)
    outcomes, tiers = await context.store.reads.contains(session.space_of(request.namespace_id), hashes)
    return pb.ContainsReply(boot_id=context.boot_id, outcomes=outcomes, tiers=tiers)


def _get(context: Context, session: Session, request: pb.GetRequest) -> Reply:
    spaces, hashes = _asked(session, request)
    held = context.store.reads.get(session, spaces, hashes, request.wait_ms / 1000, session.after_answer)
    if isinstance(held, Held):
        return _got(context, session, spaces, hashes, held)
    return _map(held, lambda later: _got(context, session, spaces, hashes, later))


def _got(context: Context, session: Session, spaces: list[Space], hashes: Sequence[bytes], held: Held) -> pb.GetReply:
    if context.recorder.on:
        context.recorder.got(session, spaces, hashes, held.blocks)
    return get_reply(context, session, held)


def _attach(context: Context, session: Session, request: pb.AttachRequest) -> Reply:
    return get_reply(context, session, context.store.reads.attach(session, request.lease_id))


def get_reply(context: Context, session: Session, held: Held) -> pb.GetReply:
    """The reply for what is held; the session socket first sends the descriptors that it names."""
    handles = {space.digest: handle for handle, space in session.spaces.items()}
    return pb.GetReply(
        boot_id=context.boot_id,
        blocks=held.blocks,
        next=_outcome(held.next),
        leases=[_lease(context, lease, handles.get(lease.space.digest, 0)) for lease in held.leases],
    )


def _lease(context: Context, lease: Lease, handle: int) -> pb.Lease:
    return pb.Lease(
        lease_id=lease.lease_id,
        namespace_id=handle,
        slots=frames.pack_slots(lease.slots),
        heads=context.store.parts.dram.records.heads(lease.runs),
    )


def _release(context: Context, session: Session, request: pb.ReleaseRequest) -> Reply:
    if len(request.lease_ids) > keys.BLOCKS_PER_CALL_MAX:
        raise InvalidArgument(f"{len(request.lease_ids)} leases in one call: {keys.BLOCKS_PER_CALL_MAX} are allowed")
    return pb.ReleaseReply(boot_id=context.boot_id, released=context.store.reads.release(session, request.lease_ids))


def _touch(context: Context, session: Session, request: pb.TouchRequest) -> Reply:
    hashes = keys.split_hashes(request.hashes, request.hash_bytes)
    touched = context.store.reads.touch(session.space_of(request.namespace_id), hashes)
    return pb.TouchReply(boot_id=context.boot_id, touched=touched)


async def _prefetch(context: Context, session: Session, request: pb.PrefetchRequest) -> Message:
    started = await context.store.prefetches.start(
        session,
        *_asked(session, request),
        request.priority,
        request.deadline_ms / 1000,
    )
    return pb.PrefetchReply(
        boot_id=context.boot_id,
        prefetch_id=started.prefetch_id,
        outcome=_outcome(started.outcome),
        resident_blocks=started.resident_blocks,
        queued_blocks=started.queued_blocks,
    )


async def _poll_prefetch(context: Context, session: Session, request: pb.PollPrefetchRequest) -> Message:
    job = await context.store.prefetches.poll(session, request.prefetch_id, request.wait_ms / 1000)
    return _job_reply(context, job)


async def _cancel_prefetch(context: Context, session: Session, request: pb.CancelPrefetchRequest) -> Message:
    return _job_reply(context, await context.store.prefetches.cancel(session, request.prefetch_id))


def _job_reply(context: Context, job: Any) -> Message:
    return pb.PollPrefetchReply(
        boot_id=context.boot_id,
        done=job.done.done(),
        ready_blocks=job.ready_blocks,
        failed_blocks=job.failed_blocks,
        total_blocks=job.total_blocks,
    )


# ---- writing ----


def _reserve(context: Context, session: Session, request: pb.ReserveRequest) -> Reply:
    hashes = keys.split_hashes(request.hashes, request.hash_bytes)
    sizes = _sizes(request, len(hashes))
    space = session.space_of(request.namespace_id)
    durable, wish = wants_durable(session, request), hinting.wish_of(request)
    if context.recorder.on:
        context.recorder.put(session, space, hashes, request.parent, sum(sizes))
    reserved = context.store.writes.reserve(
        session,
        space,
        hashes,
        sizes,
        request.parent,
        request.wait_ms / 1000,
        durable=durable,
        lifetime=lifetime_of(session, request, request.namespace_id),
    )
    if wish is not None:
        return _reserve_hinted(
            context, session, reserved, partial(context.store.hints.hint, session, space, hashes, wish)
        )
    if isinstance(reserved, Reserved):
        return _reserve_reply(context, session, reserved)
    return _map(reserved, lambda later: _reserve_reply(context, session, later))


async def _reserve_hinted(
    context: Context, session: Session, reserving: Reserved | Awaitable[Reserved], hint: Callable[[], Awaitable[object]]
) -> Message:
    """The hint counts when all is committed, or at once where nothing is to be."""
    reserved = reserving if isinstance(reserving, Reserved) else await reserving
    reservation = session.reservations.get(reserved.reservation_id)
    if reservation is not None:
        reservation.at_end = hint
    elif HIT in reserved.outcomes:
        await hint()
    return _reserve_reply(context, session, reserved)


def _sizes(request: pb.ReserveRequest, count: int) -> Sequence[int]:
    if request.block_bytes and request.sizes_bytes:
        raise InvalidArgument("block_bytes and sizes_bytes exclude each other")
    return list(request.sizes_bytes) if request.sizes_bytes else [request.block_bytes] * count


def _reserve_reply(context: Context, session: Session, reserved: Reserved) -> Message:
    return pb.ReserveReply(
        boot_id=context.boot_id,
        reservation_id=reserved.reservation_id,
        outcomes=bytes(reserved.outcomes),
        retry_after_ms=reserved.retry_after_ms,
        staging_wipes=session.wipes,
    )


def _commit(context: Context, session: Session, request: pb.CommitRequest) -> Reply:
    reservation = session.reservations.get(request.reservation_id)
    progress_offset = request.progress_offset if request.streamed else None
    outcomes = context.store.commits.commit(
        session, request.reservation_id, list(request.indices), list(request.staging_offsets), progress_offset
    )
    if reservation is not None and reservation.at_end is not None:
        return _commit_hinted(context, reservation, outcomes)
    if isinstance(outcomes, bytes):
        return pb.CommitReply(boot_id=context.boot_id, outcomes=outcomes)
    return _map(outcomes, lambda later: pb.CommitReply(boot_id=context.boot_id, outcomes=later))


async def _commit_hinted(context: Context, reservation: Reservation, committing: bytes | Awaitable[bytes]) -> Message:
    outcomes = committing if isinstance(committing, bytes) else await committing
    if reservation.finished and reservation.at_end is not None:
        at_end, reservation.at_end = reservation.at_end, None
        await at_end()
    return pb.CommitReply(boot_id=context.boot_id, outcomes=outcomes)


def _abort(context: Context, session: Session, request: pb.AbortRequest) -> Reply:
    context.store.writes.abort(session, request.reservation_id, list(request.indices))
    return pb.AbortReply(boot_id=context.boot_id)


async def _delete(context: Context, session: Session, request: pb.DeleteRequest) -> Message:
    hashes = keys.split_hashes(request.hashes, request.hash_bytes)
    deleted = await context.store.writes.delete(session, session.space_of(request.namespace_id), hashes)
    return pb.DeleteReply(boot_id=context.boot_id, deleted=deleted)


def _status(context: Context, session: Session, request: pb.StatusRequest) -> Reply:
    return status.report(context, session)


def _outcome(number: int) -> pb.Outcome:
    return cast(pb.Outcome, number)


async def _map(later: Awaitable[Any], reply: Callable[[Any], Message]) -> Message:
    return reply(await later)


def _table() -> dict[int, Operation]:
    served: dict[str, tuple[type[Message], Handler]] = {
        "KeepAlive": (pb.KeepAliveRequest, _keep_alive),
        "CloseSession": (pb.CloseSessionRequest, _close_session),
        "OpenNamespace": (pb.OpenNamespaceRequest, _open_namespace),
        "Lookup": (pb.LookupRequest, _lookup),
        "Contains": (pb.ContainsRequest, _contains),
        "Reserve": (pb.ReserveRequest, _reserve),
        "Commit": (pb.CommitRequest, _commit),
        "Abort": (pb.AbortRequest, _abort),
        "Get": (pb.GetRequest, _get),
        "Attach": (pb.AttachRequest, _attach),
        "Release": (pb.ReleaseRequest, _release),
        "Prefetch": (pb.PrefetchRequest, _prefetch),
        "PollPrefetch": (pb.PollPrefetchRequest, _poll_prefetch),
        "CancelPrefetch": (pb.CancelPrefetchRequest, _cancel_prefetch),
        "Touch": (pb.TouchRequest, _touch),
        "Delete": (pb.DeleteRequest, _delete),
        "Status": (pb.StatusRequest, _status),
        **transferring.SERVED,
        **admin.SERVED,
        **hinting.SERVED,
    }
    return {
        number_of(name): Operation(name, request, roles.guarded(name, acts.recorded(name, serve)))
        for name, (request, serve) in served.items()
    }


def number_of(method: str) -> int:
    """The operation's number for a gRPC method name: `OpenNamespace` is OPERATION_OPEN_NAMESPACE."""
    words = "".join(f"_{c}" if c.isupper() else c.upper() for c in method)
    return pb.Operation.Value(f"OPERATION{words}")


OPERATIONS: Final = _table()
