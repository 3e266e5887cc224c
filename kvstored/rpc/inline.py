"""Blocks inside messages: gRPC's PutInline and GetInline, in chunks of at most 1 MiB."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Final

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored import keys
from kvstored.catalog.catalog import Space
from kvstored.catalog.leases import Lease, Session
from kvstored.errors import InvalidArgument
from kvstored.rpc.context import Context
from kvstored.rpc.fair_share import FairShare
from kvstored.rpc.hinting import wish_of
from kvstored.rpc.terms import lifetime_of, wants_durable
from kvstored.rpc.uncancelled import to_its_end
from kvstored.store.answers import Held
from kvstored.store.durability import BATCH_BLOCKS_MAX, BATCH_BYTES_MAX
from kvstored.store.hints import Wish
from kvstored.store.outcomes import HIT, NOT_DURABLE, THROTTLED

CHUNK_BYTES_MAX: Final = 1 << 20
PUT_WAIT_S: Final = 1.0
MEMORY_BYTES_MAX: Final = 512 << 20  # of blocks that are being received, in all streams


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


class _Hinted:
    """Blocks of a stream of which it says something, noted many together: it is said of what they hang on too."""

    def __init__(self, context: Context, session: Session) -> None:
        self._hints = context.store.hints
        self._session = session
        self._blocks: defaultdict[tuple[Space, Wish], list[bytes]] = defaultdict(list)
        self._count = 0

    async def add(self, space: Space, header: pb.PutInlineHeader) -> None:
        """Note a block that is stored."""
        wish = wish_of(header)
        if wish is not None:
            self._blocks[space, wish].append(header.hash)
            self._count += 1
            if self._count >= BATCH_BLOCKS_MAX:
                await self.settle()

    async def settle(self) -> None:
        """Give the hints."""
        blocks, self._blocks, self._count = self._blocks, defaultdict(list), 0
        for (space, wish), hashes in blocks.items():
            await self._hints.hint(self._session, space, hashes, wish)


class _Incoming:
    """A block that is being received. Its bytes are kept where there is memory for it (`share`), else passed over."""

    def __init__(self, header: pb.PutInlineHeader, tenant: str, share: FairShare, *, alone: bool) -> None:
        self.header = header
        self.data = bytearray()
        self._tenant, self._share = tenant, share
        self._received = 0
        self.kept = share.take(tenant, header.size_bytes, alone=alone)

    def append(self, chunk: bytes) -> bool:
        """Take a chunk; whether the block is whole. Raises InvalidArgument."""
        size = self.header.size_bytes
        if not 0 < len(chunk) <= CHUNK_BYTES_MAX or self._received + len(chunk) > size:
            raise InvalidArgument(f"a chunk has 1 to {CHUNK_BYTES_MAX} bytes, and all chunks of a block its size_bytes")
        self._received += len(chunk)
        if self.kept:
            self.data += chunk
        return self._received == size

    def end(self) -> None:
        """Give its memory back; raises InvalidArgument where it is not whole."""
        self.close()
        if self._received != self.header.size_bytes:
            raise InvalidArgument(f"a block of {self.header.size_bytes} bytes ended after {self._received}")

    def close(self) -> None:
        """Give its memory back; harmless when repeated."""
        if self.kept:
            self.kept = False
            self.data = bytearray()
            self._share.leave(self._tenant, self.header.size_bytes)


async def put(
    context: Context, session: Session, requests: AsyncIterator[pb.PutInlineRequest], share: FairShare
) -> pb.PutInlineReply:
    """Store the blocks of a stream, one after the other; one is in memory at a time.

    `share`: bytes of memory for all streams. A block for which there is none at its header is THROTTLED.
    """
    outcomes = bytearray()
    unsynced, hinted = _Unsynced(context, outcomes), _Hinted(context, session)
    incoming: _Incoming | None = None
    alone = len(context.store.parts.tenants) <= 1
    try:
        async for request in requests:
            if request.WhichOneof("part") == "header":
                if incoming is not None:
                    incoming.end()
                header = _checked(context, session, request.header)
                incoming = _Incoming(header, session.caller.tenant, share, alone=alone)
            elif incoming is None:
                raise InvalidArgument("a chunk before any header")
            elif incoming.append(request.chunk):
                outcomes.append(await _put_block(context, session, incoming))
                incoming.close()
                if outcomes[-1] == HIT:
                    space = session.space_of(incoming.header.namespace_id)
                    await hinted.add(space, incoming.header)
                    if wants_durable(session, incoming.header):
                        await unsynced.add(space, incoming.header.hash, incoming.header.size_bytes)
        if incoming is not None:
            incoming.end()
    finally:
        if incoming is not None:
            incoming.close()
    await hinted.settle()
    await unsynced.settle()
    return pb.PutInlineReply(boot_id=context.boot_id, outcomes=bytes(outcomes))


def _checked(context: Context, session: Session, header: pb.PutInlineHeader) -> pb.PutInlineHeader:
    keys.split_hashes(header.hash, len(header.hash))
    if not 0 < header.size_bytes <= keys.BLOCK_BYTES_MAX:
        raise InvalidArgument(f"size_bytes is {header.size_bytes}: 1 to {keys.BLOCK_BYTES_MAX} are allowed")
    if wants_durable(session, header):
        context.store.writes.durability.check()
    wish_of(header)
    return header


async def _put_block(context: Context, session: Session, incoming: _Incoming) -> int:
    header = incoming.header
    space = session.space_of(header.namespace_id)
    if not incoming.kept:
        context.store.parts.counters["throttled_puts"] += 1
        return THROTTLED
    if context.recorder.on:
        context.recorder.put(session, space, [header.hash], header.parent, header.size_bytes)
    lifetime = lifetime_of(session, header, header.namespace_id)
    putting = context.store.commits.put_inline(
        session, space, header.hash, header.parent, incoming.data, PUT_WAIT_S, lifetime
    )
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
    if context.recorder.on:
        context.recorder.got(session, spaces, hashes, held.blocks)
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
