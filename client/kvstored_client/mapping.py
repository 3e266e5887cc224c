"""Memory of the daemon in this process: tier segments read-only, the staging ring writable.

The memory map calls are libc's own. Python's `mmap` would keep a duplicate of every descriptor,
and would unmap in a forked child an address range that is long somebody else's there.

A mapping lives as long as anything refers to it: the table, a lease in use, or a numpy array
that outlived its lease. It is unmapped when the last reference goes, never under a reader.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

from kvstored_client.errors import Unavailable

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_HUGE_PAGE_BYTES: Final = 2 << 20
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


_live: Final[dict[int, weakref.ref[Mapping]]] = {}  # by address


class Mapping:
    """One memfd, mapped. `array` is a ctypes array over it: whoever refers to it keeps it mapped."""

    __slots__ = ("__weakref__", "_ends", "address", "array", "pinned", "size_bytes", "writable")

    def __init__(
        self, fd: int, size_bytes: int, *, writable: bool, when_gone: Callable[[], None] | None = None
    ) -> None:
        """Map `fd` and close it. Page tables are filled at once, so that no copy pays for faults.

        Raises Unavailable where the kernel refuses (no address space, not that large), and MemoryError. `fd` is open
        then, and nothing is mapped: there may be room another time.
        """
        self.address = _map(fd, size_bytes, writable)
        self.size_bytes = size_bytes
        self.writable = writable
        self.pinned: bool | None = None  # registered with the CUDA driver; None: nobody tried (see `device_copies`)
        self._ends: list[Callable[[], None]] = []
        try:
            self.array: Any = (ctypes.c_ubyte * size_bytes).from_address(self.address)
            gone = weakref.finalize(self.array, _unmap, self.address, size_bytes, os.getpid(), self._ends, when_gone)
        except MemoryError:  # nobody else would; after another exception the finalizer may
            _LIBC.munmap(self.address, size_bytes)
            raise
        gone.atexit = False
        _live[self.address] = weakref.ref(self)
        os.close(fd)  # last: where anything is raised it is still the caller's, who closes it

    def before_unmap(self, action: Callable[[], None]) -> None:
        """Do this before the memory goes; perhaps in the garbage collector, in any thread."""
        self._ends.append(action)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """The bytes of one block; read-only unless the mapping is writable. Raises ValueError past the end."""
        if offset < 0 or offset + size_bytes > self.size_bytes:
            raise ValueError(f"bytes {offset} to {offset + size_bytes} of a mapping of {self.size_bytes}")
        whole = memoryview(self.array).cast("B")
        part = whole[offset : offset + size_bytes]
        return part if self.writable else part.toreadonly()


def containing(first: int, end: int) -> Mapping | None:
    """The mapping that has these addresses, or None."""
    for each in tuple(_live.values()):
        found = each()
        if found is not None and found.address <= first and end <= found.address + found.size_bytes:
            return found
    return None


def _map(fd: int, size_bytes: int, writable: bool) -> int:
    if os.fstat(fd).st_size < size_bytes:
        raise Unavailable(f"the daemon announced a segment of {size_bytes} bytes, and sent a smaller one")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    aligned, fixed = _reserve(size_bytes)
    address = _LIBC.mmap(aligned, size_bytes, protection, mmap.MAP_SHARED | mmap.MAP_POPULATE | fixed, fd, 0)
    if address is None or address == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        if aligned is not None:
            _LIBC.munmap(aligned, size_bytes)
        raise Unavailable(f"mapping a segment of {size_bytes} bytes: {reason}")
    # A fork would hold the tier's memory on without a session; it has no use for it.
    _LIBC.madvise(address, size_bytes, mmap.MADV_DONTFORK)
    return int(address)


def _reserve(size_bytes: int) -> tuple[int | None, int]:
    """Address space at a multiple of 2 MiB, and the flag that puts a mapping there.

    Only there can huge pages of the memfd be mapped as such, which the kernel does not arrange
    by itself: mapping 256 MiB then takes 0.2 ms instead of 15.
    """
    if size_bytes < _HUGE_PAGE_BYTES:
        return None, 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start = _LIBC.mmap(None, size_bytes + _HUGE_PAGE_BYTES, _PROT_NONE, flags, -1, 0)
    if start is None or start == _MAP_FAILED:
        return None, 0
    head = -start % _HUGE_PAGE_BYTES
    tail = _HUGE_PAGE_BYTES - head
    if head:
        _LIBC.munmap(start, head)
    if tail:
        _LIBC.munmap(start + head + size_bytes, tail)
    return start + head, _MAP_FIXED


def _unmap(
    address: int,
    size_bytes: int,
    owner_pid: int,
    before: list[Callable[[], None]],
    when_gone: Callable[[], None] | None,
) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child never had the mapping; this range may be another's by now
    _live.pop(address, None)  # first: the address may be another mapping's as soon as it is free
    for action in before:
        action()
    _LIBC.munmap(address, size_bytes)
    if when_gone is not None:
        when_gone()


class Segments:
    """The tier segments of one session, by id. Descriptors come early, mappings at first use."""

    def __init__(self, dropped: Callable[[int], None]) -> None:
        """`dropped` is called with the id of a retired segment when nothing here refers to it any more.

        It may be called by the garbage collector, in any thread, so it must not wait for a lock.
        """
        self._dropped = dropped
        self._lock = threading.Lock()  # never taken by a finalizer
        self._waiting: dict[int, tuple[int, int]] = {}  # id -> descriptor, size
        self._mapped: dict[int, Mapping] = {}
        self._retired: set[int] = set()
        self._closed = False

    def add(self, segment_id: int, fd: int, size_bytes: int) -> None:
        """Take the descriptor of a segment; each comes once, but who counts on that may leak some."""
        before = self._waiting.pop(segment_id, None)
        if before is not None:
            os.close(before[0])
        self._waiting[segment_id] = (fd, size_bytes)

    def unmapped_bytes(self, segment_ids: Iterable[int]) -> int:
        """How much `get` of these would have to map first."""
        waiting = self._waiting
        return sum(waiting[i][1] for i in segment_ids if i in waiting) if waiting else 0

    def get(self, segment_id: int) -> Mapping:
        """The mapping of a segment. Raises Unavailable for one that the daemon never sent."""
        found = self._mapped.get(segment_id)
        if found is not None:
            return found
        with self._lock:
            found = self._mapped.get(segment_id)
            if found is None:
                found = self._mapped[segment_id] = self._map(segment_id)
        return found

    def _map(self, segment_id: int) -> Mapping:
        taken = self._waiting.pop(segment_id, None)
        if taken is None:
            raise Unavailable(f"segment {segment_id} is not known here")
        fd, size_bytes = taken
        try:
            return Mapping(fd, size_bytes, writable=False, when_gone=self._report(segment_id))
        except BaseException:
            self._waiting[segment_id] = taken
            if self._closed:  # by another thread meanwhile, which did not see it
                self.close()
            raise

    def retire(self, segment_ids: Iterable[int]) -> None:
        """Let go of segments: at once, or when the last view of them goes."""
        for segment_id in segment_ids:
            self._retired.add(segment_id)
            taken = self._waiting.pop(segment_id, None)
            if taken is not None:
                os.close(taken[0])
            if taken is not None or self._mapped.pop(segment_id, None) is None:
                self._when_unmapped(segment_id)

    def close(self) -> None:
        """Let go of all of them, without a word to the daemon: its session has ended."""
        self._closed = True
        self._retired.clear()
        self._mapped.clear()
        while self._waiting:
            os.close(self._waiting.popitem()[1][0])

    def _report(self, segment_id: int) -> Callable[[], None]:
        table = weakref.ref(self)  # the finalizer must not keep the whole session alive

        def when_gone() -> None:
            alive = table()
            if alive is not None:
                alive._when_unmapped(segment_id)

        return when_gone

    def _when_unmapped(self, segment_id: int) -> None:
        if segment_id in self._retired:
            self._retired.discard(segment_id)
            self._dropped(segment_id)
