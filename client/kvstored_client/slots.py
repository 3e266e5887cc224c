"""Where the blocks of a lease lie, as the daemon packs it (see `kvstored_proto.frames`)."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client.errors import Unavailable

BYTES_PER_BLOCK: Final = 8 + frames.HEAD.size  # in a reply
_INDEX_MASK: Final = (1 << frames.SLOT_INDEX_BITS) - 1


class SlotRun(NamedTuple):
    """Consecutive blocks of one size in consecutive slots. A prefix that was put at once is one run, or a few."""

    first: int  # index of the first block
    length: int
    segment_id: int
    offset: int  # of the first block in its segment
    stride: int  # from one block to the next, in bytes
    size_bytes: int  # of each block


class Slots:
    """The places, sizes and content hashes of a lease's blocks, in chain order."""

    __slots__ = ("_heads", "_places", "runs", "sizes_bytes")

    def __init__(self, lease: pb.Lease) -> None:
        """Unpack. Raises Unavailable for a lease that is not whole."""
        count, rest = divmod(len(lease.slots), 8)
        if rest or len(lease.heads) != count * frames.HEAD.size:
            raise Unavailable(f"a lease of {len(lease.slots)} and {len(lease.heads)} bytes is not whole")
        self._places: tuple[int, ...] = struct.unpack(f"<{count}Q", lease.slots)
        self._heads = lease.heads
        self.sizes_bytes: tuple[int, ...] = _sizes(count).unpack(lease.heads)
        self.runs = [self._run(first, end) for first, end in self._bounds()]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def segment_ids(self) -> set[int]:
        """The segments that they lie in."""
        return {run.segment_id for run in self.runs}

    @property
    def size_bytes(self) -> int:
        """All blocks together."""
        return sum(self.sizes_bytes)

    @property
    def content_hashes(self) -> list[bytes]:
        """xxh3-128 of each block."""
        return [content_hash for _, _, _, content_hash in frames.HEAD.iter_unpack(self._heads)]

    def place(self, index: int) -> tuple[int, int, int]:
        """Segment, offset in it and size of one block. Raises IndexError past either end."""
        run = self._run(index, index + 1)
        return run.segment_id, run.offset, run.size_bytes

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """First and end of each run."""
        sizes = self.sizes_bytes
        uniform = not sizes or sizes.count(sizes[0]) == len(sizes)
        for first, end in frames.slot_runs(self._places):
            if not uniform:
                for i in range(first + 1, end):
                    if sizes[i] != sizes[first]:
                        yield first, i
                        first = i
            yield first, end

    def _run(self, first: int, end: int) -> SlotRun:
        place, size = self._places[first], self.sizes_bytes[first]
        stride = -(-size // frames.SLOT_ALIGN_BYTES) * frames.SLOT_ALIGN_BYTES
        return SlotRun(
            first, end - first, place >> frames.SLOT_INDEX_BITS, (place & _INDEX_MASK) * stride, stride, size
        )


@functools.lru_cache(maxsize=64)
def _sizes(count: int) -> struct.Struct:
    """Takes the sizes alone out of so many heads: a tenth of the time of taking heads apart."""
    return struct.Struct("<" + "12xI16x" * count)


def _check_layout() -> None:
    assert struct.calcsize("<12xI16x") == frames.HEAD.size, "the heads of the protocol changed"


_check_layout()
