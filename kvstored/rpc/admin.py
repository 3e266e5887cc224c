"""The admin operations: listings, verify, flush, drain; see `explaining` for the rest. Same rules as `operations`.

Listings show the caller's own tenant; an admin sees all. Who may call what: `roles`.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from google.protobuf.message import Message
from kvstored_proto.v1 import admin_pb2 as pb

from kvstored.catalog.catalog import Space
from kvstored.catalog.leases import Session
from kvstored.errors import FailedPrecondition, InvalidArgument
from kvstored.rpc import admin_epochs, admin_policy, admin_tenants, explaining, purging, tracing
from kvstored.rpc.context import Context
from kvstored.rpc.described import of_entry, of_record, space_of, spaces_of
from kvstored.rpc.explaining import count_below
from kvstored.rpc.paging import Page, after
from kvstored.store import audit
from kvstored.store.drains import Drained
from kvstored.tiers.base import Record

BLOCKS_PER_PAGE_MAX: Final = 1000
FLUSH_WAIT_DEFAULT_S: Final = 60.0
PLACE_BYTES: Final = 8
NVME_PLACE_BYTES_MAX: Final = 256
_DRAM, _NVME = b"d", b"n"


# ---- listings ----


async def _list_namespaces(context: Context, session: Session, request: pb.ListNamespacesRequest) -> Message:
    below = context.store.parts.below
    page: Page[pb.NamespaceInfo] = Page(request.limit)
    for key, space in after(spaces_of(context, session), _space_key, request.cursor):
        on_nvme = await count_below(below, space) if below is not None else 0
        info = pb.NamespaceInfo(
            digest=space.namespace.digest,
            tenant=space.tenant,
            fields=space.namespace.fields,
            dram_blocks=len(space.entries),
            dram_bytes=space.used_bytes,
            nvme_blocks=on_nvme,
        )
        if not page.add(key, info):
            break
    return pb.ListNamespacesReply(boot_id=context.boot_id, namespaces=page.items, cursor=page.cursor)


def _space_key(space: Space) -> bytes:
    return space.tenant.encode() + b"\0" + space.namespace.digest


async def _list_blocks(context: Context, session: Session, request: pb.ListBlocksRequest) -> Message:
    """DRAM first, then what is only on NVMe. The cursor is a tier's letter, a namespace's number and a place in it."""
    limit = min(request.limit or 1000, BLOCKS_PER_PAGE_MAX)
    digest = request.namespace_digest
    spaces = [space_of(context, session, digest)] if digest else spaces_of(context, session)
    tier, number, place = _parse_cursor(request.cursor)
    blocks: list[pb.BlockInfo] = []
    while number < len(spaces) and len(blocks) < limit:
        space = spaces[number]
        if tier == _DRAM:
            start = int.from_bytes(place, "big")
            page = list(itertools.islice(space.entries.values(), start, start + limit - len(blocks)))
            blocks += [of_entry(context, entry) for entry in page]
            place = (start + len(page)).to_bytes(PLACE_BYTES, "big")
            ended = start + len(page) >= len(space.entries)
            tier, place = (_NVME, b"") if ended else (tier, place)
        else:
            records, place = await _below_page(context, space, place, limit - len(blocks))
            blocks += [of_record(space, hash_, record) for hash_, record in records]
            if not place:
                tier, number = _DRAM, number + 1
    cursor = tier + number.to_bytes(4, "big") + place if number < len(spaces) else b""
    return pb.ListBlocksReply(boot_id=context.boot_id, blocks=blocks, cursor=cursor)


def _parse_cursor(cursor: bytes) -> tuple[bytes, int, bytes]:
    if not cursor:
        return _DRAM, 0, b""
    tier, place = cursor[:1], cursor[5:]
    place_bytes_max = {_DRAM: PLACE_BYTES, _NVME: NVME_PLACE_BYTES_MAX}.get(tier, -1)
    if len(cursor) < 5 or len(place) > place_bytes_max or (tier == _DRAM and place[:1] > b"\0"):
        raise InvalidArgument("the cursor is not one that this daemon gave: start again without one")
    return tier, int.from_bytes(cursor[1:5], "big"), place


async def _below_page(
    context: Context, space: Space, cursor: bytes, limit: int
) -> tuple[list[tuple[bytes, Record]], bytes]:
    below = context.store.parts.below
    if below is None:
        return [], b""
    records, cursor = await below.tier.list_records(space.digest, cursor, limit)
    return [(hash_, record) for _, hash_, record in records if hash_ not in space.entries], cursor


# ---- for admins ----


async def _verify(context: Context, session: Session, request: pb.VerifyRequest) -> Message:
    result = await audit.verify(context.store.parts)
    return pb.VerifyReply(
        boot_id=context.boot_id,
        dram_blocks=result.dram_blocks,
        nvme_blocks=result.nvme_blocks,
        bytes=result.size_bytes,
        corrupt=result.corrupt,
        skipped=result.skipped,
        problems=context.store.quota_audit.check(),
    )


async def _flush(context: Context, session: Session, request: pb.FlushRequest) -> Message:
    below = context.store.parts.below
    if below is None:
        raise FailedPrecondition("there is no lower tier to flush to: set nvme.paths")
    written, left = await below.mover.flush(request.wait_ms / 1000 or FLUSH_WAIT_DEFAULT_S)
    return pb.FlushReply(boot_id=context.boot_id, written_blocks=written, left_blocks=left)


def _drain(context: Context, session: Session, request: pb.DrainRequest) -> Message | Awaitable[Message]:
    if context.state == "stopping":
        raise FailedPrecondition("the daemon is stopping: it drains by itself, and does not come back")
    drains = context.store.drains
    context.state = "serving" if request.resume else "draining"
    if request.resume:
        drains.end()
    elif request.deadline_ms:
        return _drained(context, drains.drain(request.deadline_ms / 1000))
    else:
        drains.begin()
    context.store.releases.take_all()
    held = context.store.held()
    return pb.DrainReply(
        boot_id=context.boot_id, state=context.state, leases=held["leases"], reservations=held["reservations"]
    )


async def _drained(context: Context, draining: Awaitable[Drained]) -> Message:
    drained = await draining
    return pb.DrainReply(
        boot_id=context.boot_id,
        state=context.state,
        leases=drained.leases,
        reservations=drained.reservations,
        written_blocks=drained.written_blocks,
        left_blocks=drained.left_blocks,
    )


def _wear(context: Context, session: Session, request: pb.WearRequest) -> Message:
    below = context.store.parts.below
    if below is None:
        raise FailedPrecondition("there is no NVMe tier that could wear: set nvme.paths")
    paths = [pb.PathWear(**msgspec.structs.asdict(path)) for path in below.tier.wear()]
    return pb.WearReply(boot_id=context.boot_id, paths=paths)


SERVED: Final[dict[str, tuple[type[Message], Callable[[Context, Session, Any], Message | Awaitable[Message]]]]] = {
    "ListNamespaces": (pb.ListNamespacesRequest, _list_namespaces),
    "ListBlocks": (pb.ListBlocksRequest, _list_blocks),
    **explaining.SERVED,
    **purging.SERVED,
    "Verify": (pb.VerifyRequest, _verify),
    "Flush": (pb.FlushRequest, _flush),
    "Drain": (pb.DrainRequest, _drain),
    **admin_tenants.SERVED,
    "Wear": (pb.WearRequest, _wear),
    **admin_epochs.SERVED,
    **tracing.SERVED,
    **admin_policy.SERVED,
}
