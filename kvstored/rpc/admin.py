"""The admin operations: listings, explain, verify, flush, drain. Same rules as `operations`.

Listings and explain show the caller's own tenant; an admin sees all. The rest is for admins.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Final

from google.protobuf.message import Message
from kvstored_proto.v1 import admin_pb2 as pb

from kvstored import audit, explain
from kvstored.catalog import STATE_NAMES, Entry, Space
from kvstored.errors import FailedPrecondition, InvalidArgument, NotFound
from kvstored.keys import HASH_BYTES_MAX, HASH_BYTES_MIN
from kvstored.leases import Session
from kvstored.parts import Below
from kvstored.rpc.context import Context
from kvstored.tiers.base import Record

BLOCKS_PER_PAGE_MAX: Final = 1000
FLUSH_WAIT_DEFAULT_S: Final = 60.0
PLACE_BYTES: Final = 8
NVME_PLACE_BYTES_MAX: Final = 256
_DRAM, _NVME = b"d", b"n"


def _spaces(context: Context, session: Session) -> list[Space]:
    spaces = context.store.parts.catalog.spaces.values()
    sees_all = session.caller.role == "admin"
    return [space for space in spaces if sees_all or space.tenant == session.caller.tenant]


def _space(context: Context, session: Session, digest: bytes) -> Space:
    for space in _spaces(context, session):
        if space.digest == digest:
            return space
    raise NotFound("no such namespace: `kvstorectl namespaces` lists what there is")


# ---- listings ----


async def _list_namespaces(context: Context, session: Session, request: pb.ListNamespacesRequest) -> Message:
    below = context.store.parts.below
    infos = []
    for space in _spaces(context, session):
        on_nvme = await _count_below(below, space) if below is not None else 0
        infos.append(
            pb.NamespaceInfo(
                digest=space.digest,
                tenant=space.tenant,
                fields=space.namespace.fields,
                dram_blocks=len(space.entries),
                dram_bytes=space.used_bytes,
                nvme_blocks=on_nvme,
            )
        )
    return pb.ListNamespacesReply(boot_id=context.boot_id, namespaces=infos)


async def _count_below(below: Below, space: Space) -> int:
    count, cursor = 0, b""
    while True:
        page, cursor = await below.tier.list_records(space.digest, cursor, BLOCKS_PER_PAGE_MAX)
        count += len(page)
        if not cursor:
            return count


async def _list_blocks(context: Context, session: Session, request: pb.ListBlocksRequest) -> Message:
    """DRAM first, then what is only on NVMe. The cursor is a tier's letter, a namespace's number and a place in it."""
    limit = min(request.limit or 1000, BLOCKS_PER_PAGE_MAX)
    digest = request.namespace_digest
    spaces = [_space(context, session, digest)] if digest else _spaces(context, session)
    tier, number, place = _parse_cursor(request.cursor)
    blocks: list[pb.BlockInfo] = []
    while number < len(spaces) and len(blocks) < limit:
        space = spaces[number]
        if tier == _DRAM:
            start = int.from_bytes(place, "big")
            page = list(itertools.islice(space.entries.values(), start, start + limit - len(blocks)))
            blocks += [_of_entry(context, entry) for entry in page]
            place = (start + len(page)).to_bytes(PLACE_BYTES, "big")
            ended = start + len(page) >= len(space.entries)
            tier, place = (_NVME, b"") if ended else (tier, place)
        else:
            records, place = await _below_page(context, space, place, limit - len(blocks))
            blocks += [_of_record(space, hash_, record) for hash_, record in records]
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


def _of_entry(context: Context, entry: Entry) -> pb.BlockInfo:
    return pb.BlockInfo(
        namespace_digest=entry.pool.space.digest,
        hash=entry.hash,
        parent=entry.parent,
        size_bytes=entry.size_bytes,
        state=STATE_NAMES[entry.state],
        tiers="dram+nvme" if entry.below else "dram",
        holds=entry.holds,
        content_hash=context.store.parts.dram.records.content_hash(entry.slot),
    )


def _of_record(space: Space, hash_: bytes, record: Record) -> pb.BlockInfo:
    return pb.BlockInfo(
        namespace_digest=space.digest,
        hash=hash_,
        parent=record.parent,
        size_bytes=record.size_bytes,
        state="ready",
        tiers="nvme",
        content_hash=record.content_hash,
    )


# ---- explain ----


async def _explain(context: Context, session: Session, request: pb.ExplainRequest) -> Message:
    if not HASH_BYTES_MIN <= len(request.hash) <= HASH_BYTES_MAX:
        raise InvalidArgument(f"a hash has {HASH_BYTES_MIN} to {HASH_BYTES_MAX} bytes, this one {len(request.hash)}")
    spaces = _spaces(context, session)
    wanted = _space(context, session, request.namespace_digest) if request.namespace_digest else None
    answer = await explain.explain(context.store.parts, spaces, wanted, request.hash)
    blocks = [_of_entry(context, entry) for entry in answer.entries]
    listed = {entry.pool.space for entry in answer.entries}
    blocks += [_of_record(space, request.hash, record) for space, record in answer.records if space not in listed]
    return pb.ExplainReply(boot_id=context.boot_id, verdict=answer.verdict, detail=answer.detail, blocks=blocks)


# ---- for admins ----


async def _verify(context: Context, session: Session, request: pb.VerifyRequest) -> Message:
    session.check_admin()
    result = await audit.verify(context.store.parts)
    return pb.VerifyReply(
        boot_id=context.boot_id,
        dram_blocks=result.dram_blocks,
        nvme_blocks=result.nvme_blocks,
        bytes=result.size_bytes,
        corrupt=result.corrupt,
        skipped=result.skipped,
    )


async def _flush(context: Context, session: Session, request: pb.FlushRequest) -> Message:
    session.check_admin()
    below = context.store.parts.below
    if below is None:
        raise FailedPrecondition("there is no lower tier to flush to: set nvme.paths")
    written, left = await below.mover.flush(request.wait_ms / 1000 or FLUSH_WAIT_DEFAULT_S)
    return pb.FlushReply(boot_id=context.boot_id, written_blocks=written, left_blocks=left)


def _drain(context: Context, session: Session, request: pb.DrainRequest) -> Message | Awaitable[Message]:
    session.check_admin()
    if context.state == "stopping":
        raise FailedPrecondition("the daemon is stopping: it drains by itself, and does not come back")
    drains = context.store.drains
    context.state = "serving" if request.resume else "draining"
    if request.resume:
        drains.end()
    elif request.deadline_ms:
        return _drained(context, request.deadline_ms / 1000)
    else:
        drains.begin()
    context.store.releases.take_all()
    held = context.store.held()
    return pb.DrainReply(
        boot_id=context.boot_id, state=context.state, leases=held["leases"], reservations=held["reservations"]
    )


async def _drained(context: Context, timeout_s: float) -> Message:
    drained = await context.store.drains.drain(timeout_s)
    return pb.DrainReply(
        boot_id=context.boot_id,
        state=context.state,
        leases=drained.leases,
        reservations=drained.reservations,
        written_blocks=drained.written_blocks,
        left_blocks=drained.left_blocks,
    )


SERVED: Final[dict[str, tuple[type[Message], Callable[[Context, Session, Any], Message | Awaitable[Message]]]]] = {
    "ListNamespaces": (pb.ListNamespacesRequest, _list_namespaces),
    "ListBlocks": (pb.ListBlocksRequest, _list_blocks),
    "Explain": (pb.ExplainRequest, _explain),
    "Verify": (pb.VerifyRequest, _verify),
    "Flush": (pb.FlushRequest, _flush),
    "Drain": (pb.DrainRequest, _drain),
}
