"""A file device that fails on demand: what a tier must live through, in the reach of a test.

Survivable faults, each of which must end in a result or a degraded tier and never in wrong bytes:
short reads and writes, failed reads (EIO), flipped bits, failed writes and syncs, a full file
system, a file that cannot be opened. Which call fails is drawn from the seed; where several
threads make calls, the order in which they draw is theirs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvstored.device.file import Buffers, File, FileDevice

EVENTS_MAX: Final = 10_000


class Faults(msgspec.Struct, kw_only=True):
    """What goes wrong, as probabilities of a call; `space_bytes` is all that may ever be written."""

    open_error: float = 0.0
    read_error: float = 0.0
    read_flip: float = 0.0
    write_error: float = 0.0
    sync_error: float = 0.0
    short: float = 0.0
    space_bytes: int | None = None


class Event(NamedTuple):
    """A call that a tier made, in the order of their beginning."""

    call: str
    name: str
    offset: int
    size_bytes: int


class FakeDevice(FileDevice):
    """Real files without direct I/O, with the faults asked for; `events` are the latest calls.

    `gate` holds reads back while it is cleared; `held` is set once one is.
    """

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.gate = threading.Event()
        self.gate.set()
        self.held = threading.Event()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._written_bytes = 0

    def allows_direct_io(self, path: Path) -> bool:
        """Never: faults fall between any two bytes."""
        return False

    def _open(self, path: Path, flags: int) -> int:
        self._maybe_fail(self.faults.open_error, errno.EROFS)
        return super()._open(path, flags)

    def _preadv(self, file: File, buffers: Buffers, offset: int) -> int:
        self._note("read", file, offset, buffers)
        if not self.gate.is_set():
            self.held.set()
            self.gate.wait()
        self._maybe_fail(self.faults.read_error, errno.EIO)
        buffers = self._shorten(buffers)
        moved = super()._preadv(file, buffers, offset)
        if moved and self._happens(self.faults.read_flip):
            address = ctypes.addressof(buffers[0])
            ctypes.c_ubyte.from_address(address).value ^= 1
        return moved

    def _pwritev(self, file: File, buffers: Buffers, offset: int) -> int:
        self._note("write", file, offset, buffers)
        self._maybe_fail(self.faults.write_error, errno.EIO)
        buffers = self._shorten(buffers)
        self._fill(sum(map(len, buffers)))
        return super()._pwritev(file, buffers, offset)

    def _fdatasync(self, file: File) -> None:
        self._note("sync", file, 0, ())
        self._maybe_fail(self.faults.sync_error, errno.EIO)

    def _fill(self, size_bytes: int) -> None:
        with self._lock:
            self._written_bytes += size_bytes
            space = self.faults.space_bytes
            if space is not None and self._written_bytes > space:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _shorten(self, buffers: Buffers) -> Buffers:
        if not self._happens(self.faults.short):
            return buffers
        half = max(1, len(buffers[0]) // 2)
        return [(ctypes.c_char * half).from_address(ctypes.addressof(buffers[0]))]

    def _maybe_fail(self, probability: float, number: int) -> None:
        if self._happens(probability):
            raise OSError(number, os.strerror(number))

    def _happens(self, probability: float) -> bool:
        with self._lock:
            return self._random.random() < probability

    def _note(self, call: str, file: File, offset: int, buffers: Buffers) -> None:
        self.events.append(Event(call, file.path.name, offset, sum(map(len, buffers))))
