"""Blocks inside messages: gRPC's PutInline and GetInline, in chunks of at most 1 MiB."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Final

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored import keys
from kvstored.catalog import Space
from kvstored.durability import BATCH_BLOCKS_MAX, BATCH_BYTES_MAX
from kvstored.errors import InvalidArgument
from kvstored.leases import Lease, Session
from kvstored.outcomes import HIT, NOT_DURABLE
from kvstored.reads import Held
from kvstored.rpc.context import Context
from kvstored.rpc.operations import wants_durable
from kvstored.rpc.uncancelled import to_its_end

CHUNK_BYTES_MAX: Final = 1 << 20
PUT_WAIT_S: Final = 1.0


class _Unsynced:
    """Blocks of a stream that are in DRAM and still to be made durable, many together."""

    def __init__(self, context: Context, outcomes: bytearray) -> None:
        self._durability = context.store.writes.durability
        self._outcomes = outcomes
        self._blocks: defaultdict[Space, list[tuple[int, bytes]]] = defaultdict(list)
        self._count = self._bytes = 0

    async def add(self, space: Space, hash_: bytes, size_bytes: int) -> None:
        """Note the block that the last outcome is of."""
        self._blocks[space].append((len(self._outcomes) - 1, hash_))
        self._count += 1
        self._bytes += size_bytes
        if self._count >= BATCH_BLOCKS_MAX or self._bytes >= BATCH_BYTES_MAX:
            await self.settle()

    async def settle(self) -> None:
        """Wait until they are on NVMe; correct the outcomes of those that are not."""
        blocks, self._blocks = self._blocks, defaultdict(list)
        self._count = self._bytes = 0
        for space, listed in blocks.items():
            durable = await self._durability.persist_hashes(space, [hash_ for _, hash_ in listed])
            for (index, _), ok in zip(listed, durable, strict=True):
                if not ok:
                    self._outcomes[index] = NOT_DURABLE


async def put(context: Context, session: Session, requests: AsyncIterator[pb.PutInlineRequest]) -> pb.PutInlineReply:
    """Store the blocks of a stream, one after the other; one is in memory at a time."""
    outcomes = bytearray()
    unsynced = _Unsynced(context, outcomes)
    header: pb.PutInlineHeader | None = None
    data = bytearray()
    async for request in requests:
        if request.WhichOneof("part") == "header":
            _check_whole(header, data)
            header, data = _checked(context, session, request.header), bytearray()
        elif header is None:
            raise InvalidArgument("a chunk before any header")
        else:
            _append(header, data, request.chunk)
            if len(data) == header.size_bytes:
                outcomes.append(await _put_block(context, session, header, data))
                if outcomes[-1] == HIT and wants_durable(session, header):
                    await unsynced.add(session.space_of(header.namespace_id), header.hash, header.size_bytes)
    _check_whole(header, data)
    await unsynced.settle()
    return pb.PutInlineReply(boot_id=context.boot_id, outcomes=bytes(outcomes))


def _checked(context: Context, session: Session, header: pb.PutInlineHeader) -> pb.PutInlineHeader:
    keys.split_hashes(header.hash, len(header.hash))
    if not 0 < header.size_bytes <= keys.BLOCK_BYTES_MAX:
        raise InvalidArgument(f"size_bytes is {header.size_bytes}: 1 to {keys.BLOCK_BYTES_MAX} are allowed")
    if wants_durable(session, header):
        context.store.writes.durability.check()
    return header


def _append(header: pb.PutInlineHeader, data: bytearray, chunk: bytes) -> None:
    if not 0 < len(chunk) <= CHUNK_BYTES_MAX or len(data) + len(chunk) > header.size_bytes:
        raise InvalidArgument(f"a chunk has 1 to {CHUNK_BYTES_MAX} bytes, and all chunks of a block its size_bytes")
    data += chunk


def _check_whole(header: pb.PutInlineHeader | None, data: bytearray) -> None:
    if header is not None and len(data) != header.size_bytes:
        raise InvalidArgument(f"a block of {header.size_bytes} bytes ended after {len(data)}")


async def _put_block(context: Context, session: Session, header: pb.PutInlineHeader, data: bytearray) -> int:
    space = session.space_of(header.namespace_id)
    putting = context.store.commits.put_inline(session, space, header.hash, header.parent, data, PUT_WAIT_S)
    return await to_its_end(putting)


async def get(
    context: Context, session: Session, request: pb.GetInlineRequest
) -> AsyncGenerator[pb.GetInlineReply, None]:
    """The leading blocks of a chain; they are leased while they are sent."""
    hashes = keys.split_hashes(request.hashes, request.hash_bytes)
    spaces = [session.space_of(request.namespace_id)]
    getting = context.store.reads.get(session, spaces, hashes, request.wait_ms / 1000)

    def release(held: Held) -> None:
        context.store.reads.release(session, [lease.lease_id for lease in held.leases])

    held = getting if isinstance(getting, Held) else await to_its_end(getting, release)
    try:
        for index in range(held.blocks):
            for reply in _chunks(context, session, held.leases[0], index):
                yield reply
    finally:
        release(held)


def _chunks(context: Context, session: Session, lease: Lease, index: int) -> Iterator[pb.GetInlineReply]:
    dram, entry = context.store.parts.dram, lease.entries[index]
    for start in range(0, entry.size_bytes, CHUNK_BYTES_MAX):
        # While the last chunk was sent the session may have ended, and the slot may be another's by now.
        session.lease(lease.lease_id)
        end = min(entry.size_bytes, start + CHUNK_BYTES_MAX)
        yield pb.GetInlineReply(
            boot_id=context.boot_id,
            index=index,
            size_bytes=entry.size_bytes,
            chunk=bytes(dram.view(entry.slot, entry.size_bytes)[start:end]),
            content_hash=dram.records.content_hash(entry.slot) if end == entry.size_bytes else b"",
        )
