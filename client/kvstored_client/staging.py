"""The staging ring: where a session's blocks lie between the caller's buffers and the tier.

The daemon reads it only between a commit and its reply. A region is therefore given back when
the reply has come, however late, and never because somebody stopped waiting for it.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections import deque
from typing import Final, NamedTuple

from kvstored_client.errors import Unavailable
from kvstored_client.mapping import Mapping

ALIGN_BYTES: Final = 4096


class Region(NamedTuple):
    """Part of the ring, in bytes."""

    offset: int
    size_bytes: int


def aligned(size_bytes: int) -> int:
    """The next multiple of 4 KiB: neighbours in the ring stay neighbours in a tier slot."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


class StagingRing:
    """Hands out regions of the ring, first fit, lowest first (the pages that are warm). Thread-safe."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fd = fd
        self._mapping: Mapping | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._free = [Region(0, size_bytes)]  # by offset, neighbours joined
        self._returned: deque[Region] = deque()

    @property
    def mapping(self) -> Mapping:
        """The ring, mapped at first use. Raises Unavailable where that fails."""
        found = self._mapping  # another thread may close the ring at any point
        if found is None:
            with self._lock:
                found = self._mapping or self._map()
        return found

    def _map(self) -> Mapping:
        fd, self._fd = self._fd, -1
        if fd < 0:
            raise Unavailable("the staging memory of a session that has ended")
        try:
            self._mapping = Mapping(fd, self.size_bytes, writable=True)
        except BaseException:
            self._fd = fd
            if self._closed:  # by another thread meanwhile, which did not see it
                self.close()
            raise
        return self._mapping

    def take(self, size_bytes: int, spare_bytes: int = 0) -> Region | None:
        """A region of this size, or None where there is no such hole now, or less than `spare_bytes` would be left."""
        wanted = aligned(size_bytes)
        with self._lock:
            self._merge()
            if spare_bytes and sum(hole.size_bytes for hole in self._free) < wanted + spare_bytes:
                return None
            for i, hole in enumerate(self._free):
                if hole.size_bytes >= wanted:
                    rest = Region(hole.offset + wanted, hole.size_bytes - wanted)
                    self._free[i : i + 1] = [rest] if rest.size_bytes else []
                    return Region(hole.offset, wanted)
        return None

    def give_back(self, region: Region) -> None:
        """Return a region. Takes no lock: the garbage collector may call it in the middle of `take`."""
        self._returned.append(region)

    @property
    def free_bytes(self) -> int:
        """What could be taken, holes of all sizes together."""
        with self._lock:
            self._merge()
            return sum(hole.size_bytes for hole in self._free)

    def close(self) -> None:
        """Let go of the memory."""
        self._closed = True
        fd, self._fd = self._fd, -1
        self._mapping = None
        if fd >= 0:
            os.close(fd)

    def _merge(self) -> None:
        while self._returned:
            bisect.insort(self._free, self._returned.popleft())
        joined: list[Region] = []
        for hole in self._free:
            if joined and joined[-1].offset + joined[-1].size_bytes == hole.offset:
                joined[-1] = Region(joined[-1].offset, joined[-1].size_bytes + hole.size_bytes)
            else:
                joined.append(hole)
        self._free = joined
