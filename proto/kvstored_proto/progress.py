"""How far a streamed commit is, told in memory that client and daemon share.

The client fills blocks in its staging ring, the daemon takes them one after the other, and neither sends a message
while it goes on: a block is still in the CPU's cache when it is taken, which halves the time of a put. They tell each
other in 128 bytes of the ring. When the commit is sent these are zeros, but for how many are filled by then:

    offset 0     u64 filled: so many leading blocks are; all ones: the client ends the stream
    offset 8     u64 1 while the client sleeps until more is taken
    offset 64    u64 taken: so many leading blocks are copied, and their places may be filled anew
    offset 72    u64 1 while the daemon sleeps until more is filled

Each half writes its own 64 bytes only. Who waits sleeps on the other's count (a futex), never for long: a wake-up that
gets lost costs a moment. The client may write anything here at any time, and the daemon believes nothing but how many
more blocks are filled: less than before, or more than there are, ends the stream.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from typing import Final

FEATURE: Final = "streamed_commits"
PROGRESS_BYTES: Final = 128
ALIGN_BYTES: Final = 64
ENDED: Final = (1 << 64) - 1

_FILLED, _CLIENT_SLEEPS, _TAKEN, _DAEMON_SLEEPS = 0, 1, 8, 9  # in words
_WORD_BYTES: Final = 8
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # between processes
_FUTEX_CALL: Final = 202  # of Linux on x86-64
_TIMESPEC: Final = struct.Struct("=qq")
# There stores are seen in the order in which they were made, elsewhere a count may be seen before its block; and a
# futex compares the lower half of a word, which lies first.
AVAILABLE: Final = sys.platform == "linux" and platform.machine() == "x86_64"
_libc: Final = ctypes.CDLL(None, use_errno=True)


class _Half:
    """What both sides do."""

    def __init__(self, address: int, own: tuple[int, int], other: tuple[int, int]) -> None:
        self._address = address
        self._words = (ctypes.c_uint64 * (PROGRESS_BYTES // _WORD_BYTES)).from_address(address)
        self._own, self._sleeping = own
        self._other, self._other_sleeps = other

    def _tell(self, count: int) -> None:
        self._words[self._own] = count
        if self._words[self._other_sleeps]:
            _futex(self._address + self._own * _WORD_BYTES, _FUTEX_WAKE, 1, None)

    def _seen(self) -> int:
        return self._words[self._other]

    def _wait(self, count: int, timeout_s: float) -> None:
        words = self._words
        words[self._sleeping] = 1
        if words[self._other] == count:
            _futex(self._address + self._other * _WORD_BYTES, _FUTEX_WAIT, count & 0xFFFFFFFF, timeout_s)
        words[self._sleeping] = 0


class Filler(_Half):
    """The client's half. `address` is that of the shared bytes, which must stay mapped as long as this is used."""

    def __init__(self, address: int) -> None:
        super().__init__(address, (_FILLED, _CLIENT_SLEEPS), (_TAKEN, _DAEMON_SLEEPS))
        self.reset()

    def reset(self) -> None:
        """Begin at zero, before the commit is sent."""
        ctypes.memset(self._address, 0, PROGRESS_BYTES)

    def fill(self, count: int) -> None:
        """So many leading blocks are filled."""
        self._tell(count)

    def end(self) -> None:
        """No more will be filled, and nothing more is to be taken."""
        self._tell(ENDED)

    def taken(self) -> int:
        """How many were."""
        return self._seen()

    def wait(self, taken: int, timeout_s: float) -> None:
        """Sleep until more than `taken` are, or the time is up; now and then for no reason."""
        self._wait(taken, timeout_s)


class Taker(_Half):
    """The daemon's half. The other side may be hostile."""

    def __init__(self, address: int) -> None:
        super().__init__(address, (_TAKEN, _DAEMON_SLEEPS), (_FILLED, _CLIENT_SLEEPS))

    def take(self, count: int) -> None:
        """So many leading blocks are taken."""
        self._tell(count)

    def filled(self) -> int:
        """How many are, as the client says: anything, ENDED among it."""
        return self._seen()

    def wait(self, filled: int, timeout_s: float) -> None:
        """Sleep until that is another number, or the time is up; now and then for no reason."""
        self._wait(filled, timeout_s)


def _futex(address: int, operation: int, value: int, timeout_s: float | None) -> None:
    """The system call, without the GIL. What it answers does not count: who waited looks again."""
    timeout = None if timeout_s is None else _TIMESPEC.pack(int(timeout_s), int(timeout_s % 1 * 1e9))
    call = ctypes.c_long(_FUTEX_CALL)
    _libc.syscall(call, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), timeout, None, 0)
