"""A file device that fails on demand: what a tier must live through, in the reach of a test.

Survivable faults, each of which must end in a result or a degraded tier and never in wrong bytes,
and from each of which the tier must come back by itself when it is over:

* short reads and writes: completed
* failed reads, writes and syncs (EIO); flipped bits, in reads and at rest
* a file system that is full (ENOSPC), for a while or for good
* one that is read-only (EROFS)
* a file that cannot be opened; a directory that is gone
* a call that takes long, or never comes back: `hold` and `release`
* torn writes: only a prefix reached the file, and the write said that all did
* misdirected writes: they landed elsewhere in the same file, and said nothing

Which call fails is drawn from the seed; where several threads make calls, the order in which they
draw is theirs. The index is not written through this device.
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
    torn: float = 0.0
    misdirected: float = 0.0
    space_bytes: int | None = None
    read_only: bool = False
    gone: bool = False


class Event(NamedTuple):
    """A call that a tier made, in the order of their beginning."""

    call: str
    name: str
    offset: int
    size_bytes: int


class FakeDevice(FileDevice):
    """Real files without direct I/O, with the faults asked for; `events` are the latest calls.

    `gate` holds reads back while it is cleared, and every call that `hold` named; `held` is set once one is.
    """

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.gate = threading.Event()
        self.gate.set()
        self.held = threading.Event()
        self.held_calls = {"read"}
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._written_bytes = 0

    def allows_direct_io(self, path: Path) -> bool:
        """Never: faults fall between any two bytes."""
        return False

    # --- asked for by the test ---

    def hold(self, *calls: str) -> None:
        """From here on these calls (open, read, write, sync, place) do not come back before `release`."""
        self.held_calls = set(calls)
        self.held.clear()
        self.gate.clear()

    def release(self) -> None:
        """Let the calls that were held go on."""
        self.gate.set()

    def rot(self, path: Path) -> int:
        """Flip a bit of a file at rest, outside of its zeros; returns the offset of its byte."""
        data = bytearray(path.read_bytes())
        with self._lock:
            at = self._random.choice([i for i, byte in enumerate(data) if byte] or [0])
            data[at] ^= 1 << self._random.randrange(8)
        path.write_bytes(data)
        return at

    # --- calls ---

    def _open(self, path: Path, flags: int) -> int:
        self._maybe_hold("open")
        self._maybe_be_gone(path)
        self._maybe_fail(self.faults.open_error, errno.EROFS)
        if self.faults.read_only and flags & (os.O_CREAT | os.O_TRUNC):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return super()._open(path, flags)

    def _preadv(self, file: File, buffers: Buffers, offset: int) -> int:
        self._note("read", file, offset, buffers)
        self._maybe_hold("read")
        self._maybe_fail(self.faults.read_error, errno.EIO)
        buffers = self._shorten(buffers)
        moved = super()._preadv(file, buffers, offset)
        if moved and self._happens(self.faults.read_flip):
            address = ctypes.addressof(buffers[0])
            ctypes.c_ubyte.from_address(address).value ^= 1
        return moved

    def _pwritev(self, file: File, buffers: Buffers, offset: int) -> int:
        self._note("write", file, offset, buffers)
        self._maybe_hold("write")
        if self.faults.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        self._maybe_fail(self.faults.write_error, errno.EIO)
        buffers = self._shorten(buffers)
        size_bytes = sum(map(len, buffers))
        self._fill(size_bytes)
        if self._happens(self.faults.misdirected):
            offset = self._elsewhere(file, offset)
        if self._happens(self.faults.torn):
            super()._pwritev(file, self._prefix(buffers), offset)
            return size_bytes
        return super()._pwritev(file, buffers, offset)

    def _fdatasync(self, file: File) -> None:
        self._note("sync", file, 0, ())
        self._maybe_hold("sync")
        self._maybe_fail(self.faults.sync_error, errno.EIO)

    def _place(self, path: Path) -> tuple[int, int]:
        self._maybe_hold("place")
        self._maybe_be_gone(path)
        return super()._place(path)

    def _free_bytes(self, path: Path) -> int:
        space = self.faults.space_bytes
        return super()._free_bytes(path) if space is None else max(0, space - self._written_bytes)

    def _unlink(self, path: Path) -> None:
        self._maybe_be_gone(path)
        if self.faults.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        super()._unlink(path)

    # --- faults ---

    def _maybe_hold(self, call: str) -> None:
        if call in self.held_calls and not self.gate.is_set():
            self.held.set()
            self.gate.wait()

    def _maybe_be_gone(self, path: Path) -> None:
        if self.faults.gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def _elsewhere(self, file: File, offset: int) -> int:
        """Another place in what there is of the file, a multiple of 4 KiB away."""
        places = max(1, self._size(file) // 4096)
        with self._lock:
            return self._random.randrange(places) * 4096

    def _prefix(self, buffers: Buffers) -> Buffers:
        """Some of the bytes, from the start; at least one."""
        with self._lock:
            count = self._random.randrange(1, max(2, len(buffers)))
        return buffers[:count] if count < len(buffers) else self._half(buffers)

    @staticmethod
    def _half(buffers: Buffers) -> Buffers:
        half = max(1, len(buffers[0]) // 2)
        return [(ctypes.c_char * half).from_address(ctypes.addressof(buffers[0]))]

    def _fill(self, size_bytes: int) -> None:
        with self._lock:
            self._written_bytes += size_bytes
            space = self.faults.space_bytes
            if space is not None and self._written_bytes > space:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _shorten(self, buffers: Buffers) -> Buffers:
        return self._half(buffers) if self._happens(self.faults.short) else buffers

    def _maybe_fail(self, probability: float, number: int) -> None:
        if self._happens(probability):
            raise OSError(number, os.strerror(number))

    def _happens(self, probability: float) -> bool:
        with self._lock:
            return self._random.random() < probability

    def _note(self, call: str, file: File, offset: int, buffers: Buffers) -> None:
        self.events.append(Event(call, file.path.name, offset, sum(map(len, buffers))))
