"""Blocks inside messages: gRPC's PutInline and GetInline, in chunks of at most 1 MiB."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Final

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored import keys
from kvstored.errors import InvalidArgument
from kvstored.leases import Lease, Session
from kvstored.reads import Held
from kvstored.rpc.context import Context
from kvstored.rpc.uncancelled import to_its_end

CHUNK_BYTES_MAX: Final = 1 << 20
PUT_WAIT_S: Final = 1.0


async def put(context: Context, session: Session, requests: AsyncIterator[pb.PutInlineRequest]) -> pb.PutInlineReply:
    """Store the blocks of a stream, one after the other; one is in memory at a time."""
    outcomes = bytearray()
    header: pb.PutInlineHeader | None = None
    data = bytearray()
    async for request in requests:
        if request.WhichOneof("part") == "header":
            _check_whole(header, data)
            header, data = _checked(request.header), bytearray()
        elif header is None:
            raise InvalidArgument("a chunk before any header")
        else:
            _append(header, data, request.chunk)
            if len(data) == header.size_bytes:
                outcomes.append(await _put_block(context, session, header, data))
    _check_whole(header, data)
    return pb.PutInlineReply(boot_id=context.boot_id, outcomes=bytes(outcomes))


def _checked(header: pb.PutInlineHeader) -> pb.PutInlineHeader:
    keys.split_hashes(header.hash, len(header.hash))
    if not 0 < header.size_bytes <= keys.BLOCK_BYTES_MAX:
        raise InvalidArgument(f"size_bytes is {header.size_bytes}: 1 to {keys.BLOCK_BYTES_MAX} are allowed")
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
