"""Frames of the session socket, without I/O.

A frame is a 16-byte header and a protobuf body:

    u32 body length | u16 operation | u8 flags | u8 descriptors | u64 request id     (little endian)

A reply repeats the operation and the request id of its request. Replies may come in any
order. Descriptors travel as SCM_RIGHTS beside the first byte of their frame; the header says
how many belong to it. Frames with request id 0 are sent unasked.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1

HEADER: Final = struct.Struct("<IHBBQ")
MAX_BODY_BYTES: Final = 1 << 20
MAX_FDS_PER_FRAME: Final = 250  # the kernel carries 253 in one message

REPLY: Final = 1
ERROR: Final = 2  # a reply whose body is an `Error`
ONE_WAY: Final = 4  # a request that wants no reply

# The blocks of a lease. `slots`: u64 each, segment id << SLOT_INDEX_BITS | index. A block starts at
# index x slot size in its segment, where the slot size is its own size rounded up to SLOT_ALIGN_BYTES.
# `heads`: the start of the daemon's own slot record, copied as it is: that keeps a get of 512 blocks
# free of per-block packing. Generation word, reserved, size in bytes, content hash (xxh3-128).
SLOT_INDEX_BITS: Final = 20
SLOT_ALIGN_BYTES: Final = 4096
HEAD: Final = struct.Struct("<QII16s")


def pack_slots(slots: array[int]) -> bytes:
    """Slots as a lease carries them: 8 bytes each, little-endian."""
    if sys.byteorder != "little":
        slots = array("Q", slots)
        slots.byteswap()
    return slots.tobytes()


def unpack_slots(packed: bytes) -> array[int]:
    """The slots of a lease; its length is a multiple of 8."""
    slots = array("Q", packed)
    if sys.byteorder != "little":
        slots.byteswap()
    return slots


def slot_runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First index and end of each stretch of slots that lie side by side, in order.

    A chain that was put at once is one, or one a segment: these are found without looking at every slot.
    """
    first = 0
    while first < len(slots):
        end = _end_of_run(slots, first)
        yield first, end
        first = end


def _end_of_run(slots: Sequence[int], first: int) -> int:
    """Where the run that begins at `first` ends: guessed by search, which is right where slots ascend, and checked."""
    base = slots[first] - first
    low, step = first, 1
    while (probe := low + step) < len(slots) and slots[probe] - probe == base:
        low, step = probe, 2 * step
    low, high = low + 1, min(probe, len(slots))
    while low < high:
        middle = (low + high) // 2
        if slots[middle] - middle == base:
            low = middle + 1
        else:
            high = middle
    expected = range(base + first, base + low)
    there = slots[first:low]
    if (there == array("Q", expected)) if isinstance(there, array) else (list(there) == list(expected)):
        return low
    return next(i for i in range(first + 1, low) if slots[i] - i != base)


class ProtocolError(Exception):
    """The peer broke the framing; the connection is of no further use."""


class Frame(NamedTuple):
    """One message: which operation, whose request, its body and its descriptors."""

    operation: int
    flags: int
    request_id: int
    body: bytes
    fds: tuple[int, ...] = ()


def encode(operation: int, request_id: int, body: bytes, flags: int = 0, fd_count: int = 0) -> bytes:
    """Header and body of one frame."""
    return HEADER.pack(len(body), operation, flags, fd_count, request_id) + body


class FrameReader:
    """Cuts a byte stream into frames; owns received descriptors until a frame takes them."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES, max_fds: int = 4 * MAX_FDS_PER_FRAME) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._max_body_bytes = max_body_bytes
        self._max_fds = max_fds

    def feed(self, data: bytes | memoryview, fds: Iterable[int] = ()) -> Iterator[Frame]:
        """Take what was received; yield every frame that is complete now.

        Raises ProtocolError for a body over the limit, for descriptors that were announced and
        did not come, and for descriptors that no frame announces.
        """
        self._fds.extend(fds)
        if len(self._fds) > self._max_fds:
            raise ProtocolError(f"more than {self._max_fds} descriptors sent ahead of their frames")
        if not self._buffer:  # frames that come whole, as nearly all do, are cut out of what was received
            return self._cut(data)
        self._buffer += data
        return self._cut(self._buffer)

    def _cut(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        start, size = 0, len(data)
        try:
            while size - start >= HEADER.size:
                length, operation, flags, fd_count, request_id = HEADER.unpack_from(data, start)
                if length > self._max_body_bytes:
                    raise ProtocolError(f"a frame of {length} bytes: the limit is {self._max_body_bytes}")
                end = start + HEADER.size + length
                if size < end:
                    break
                body = bytes(memoryview(data)[start + HEADER.size : end])
                start = end
                yield Frame(operation, flags, request_id, body, self._take(fd_count))
        finally:
            if data is self._buffer:
                del self._buffer[:start]
            else:
                self._buffer += data[start:]

    def _take(self, count: int) -> tuple[int, ...]:
        if count > len(self._fds):
            raise ProtocolError(f"a frame announces {count} descriptors, {len(self._fds)} came")
        return tuple(self._fds.popleft() for _ in range(count))

    def drop_stray(self) -> None:
        """Close descriptors that belong to no frame, nor to the one of which the rest is still to come."""
        if not self._buffer:
            self.close()

    def close(self) -> None:
        """Close the descriptors that no frame took."""
        fds = tuple(self._fds)
        self._fds.clear()
        close_all(fds)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that are nobody's any more."""
    for fd in fds:
        os.close(fd)
