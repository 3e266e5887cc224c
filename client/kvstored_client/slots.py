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
_SIZE_AT: Final = 12  # in a head
_SIZE_BYTES: Final = 4
KNOWN_MAX: Final = 16  # at most 40 bytes a block each
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
    """The places, sizes and content hashes of a lease's blocks, in chain order.

    Taken apart as little as can be: most replies are read once, when nothing of them is in the CPU's cache.
    """

    __slots__ = ("_heads", "_packed", "_places", "_sizes", "runs", "segment_ids", "uniform_bytes")

    def __init__(self, slots: bytes, heads: bytes) -> None:
        """Unpack `slots` and `heads` of a lease. Raises Unavailable where it is not whole."""
        count, rest = divmod(len(slots), 8)
        if rest or len(heads) != count * frames.HEAD.size:
            raise Unavailable(f"a lease of {len(slots)} and {len(heads)} bytes is not whole")
        self._packed = slots
        self._heads = heads
        self._places = frames.unpack_slots(slots)
        self.uniform_bytes = _uniform_size(heads)  # of every block; 0: they differ
        self._sizes = () if self.uniform_bytes else _sizes(count).unpack(heads)
        self.runs = tuple(self._run(first, end) for first, end in self._bounds())
        self.segment_ids = frozenset(run.segment_id for run in self.runs)

    def are(self, slots: bytes, heads: bytes) -> bool:
        """Whether a lease with these is of the same blocks at the same places."""
        return self._packed == slots and self._heads == heads

    def __len__(self) -> int:
        return len(self._places)

    @property
    def sizes_bytes(self) -> tuple[int, ...]:
        """Size of each block."""
        return self._sizes or (self.uniform_bytes,) * len(self)

    @property
    def size_bytes(self) -> int:
        """All blocks together."""
        return self.uniform_bytes * len(self) or sum(self._sizes)

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
        sizes = self._sizes
        for first, end in frames.slot_runs(self._places):
            if sizes:
                for i in range(first + 1, end):
                    if sizes[i] != sizes[first]:
                        yield first, i
                        first = i
            yield first, end

    def _run(self, first: int, end: int) -> SlotRun:
        place, size = self._places[first], self.uniform_bytes or self._sizes[first]
        stride = -(-size // frames.SLOT_ALIGN_BYTES) * frames.SLOT_ALIGN_BYTES
        return SlotRun(
            first, end - first, place >> frames.SLOT_INDEX_BITS, (place & _INDEX_MASK) * stride, stride, size
        )


class KnownSlots:
    """The last few leases, taken apart: a prefix that is asked for again mostly lies where it lay."""

    def __init__(self) -> None:
        self._known: dict[bytes, Slots] = {}

    def of(self, lease: pb.Lease) -> Slots:
        """The slots of a lease. Raises Unavailable where it is not whole."""
        packed, heads = lease.slots, lease.heads  # each access copies
        first = packed[:8]
        known = self._known.get(first)
        if known is not None and known.are(packed, heads):
            return known
        slots = Slots(packed, heads)
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()  # at once: other threads may be at it
        self._known[first] = slots
        return slots


def _uniform_size(heads: bytes) -> int:
    """The size that all heads tell, or 0; each of its bytes is compared in all heads at once."""
    count = len(heads) // frames.HEAD.size
    if not count:
        return 0
    for at in range(_SIZE_AT, _SIZE_AT + _SIZE_BYTES):
        column = heads[at :: frames.HEAD.size]
        if column.count(column[0]) != count:
            return 0
    return int.from_bytes(heads[_SIZE_AT : _SIZE_AT + _SIZE_BYTES], "little")


@functools.lru_cache(maxsize=64)
def _sizes(count: int) -> struct.Struct:
    """Takes the sizes alone out of so many heads: a tenth of the time of taking heads apart."""
    return struct.Struct("<" + "12xI16x" * count)


def _check_layout() -> None:
    assert struct.calcsize("<12xI16x") == frames.HEAD.size, "the heads of the protocol changed"


_check_layout()
