"""How the copying thread of a device worker is woken: by a command, or by the driver when copies have ended.

A POSIX semaphore, because `sem_post` can be called by the driver itself (`cuLaunchHostFunc`), in a thread of its own
that must not wait for the GIL: a callback in Python there has deadlocked with the driver's locks.
"""

from __future__ import annotations

import ctypes
import math
import queue
import time
from typing import Final, Generic, TypeVar

T = TypeVar("T")
_SEMAPHORE_BYTES: Final = 64  # sem_t has 32 in glibc and in musl
_libc: Final = ctypes.CDLL(None, use_errno=True)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Doorbell:
    """Rung by anybody, any number of times; one thread waits."""

    def __init__(self) -> None:
        self._memory = (ctypes.c_ubyte * _SEMAPHORE_BYTES)()
        self._semaphore = ctypes.c_void_p(ctypes.addressof(self._memory))
        _libc.sem_init(self._semaphore, 0, 0)

    @property
    def function(self) -> int:
        """Address of the C function that rings, and `argument` is what to give it."""
        return ctypes.cast(_libc.sem_post, ctypes.c_void_p).value or 0

    @property
    def argument(self) -> int:
        """See `function`."""
        return ctypes.addressof(self._memory)

    def ring(self) -> None:
        """Wake who waits, or who waits next."""
        _libc.sem_post(self._semaphore)

    def wait(self, timeout_s: float | None) -> None:
        """Until it has rung since the last wait, or the time is up; now and then for no reason. Without the GIL."""
        if timeout_s is None:
            _libc.sem_wait(self._semaphore)
        else:
            part, whole = math.modf(time.time() + timeout_s)
            _libc.sem_timedwait(self._semaphore, ctypes.byref(_Time(int(whole), int(part * 1e9))))
        while not _libc.sem_trywait(self._semaphore):  # however often it rang: who waits looks at everything
            pass


class Inbox(Generic[T]):
    """A queue whose reader waits for the doorbell."""

    def __init__(self) -> None:
        self.bell = Doorbell()
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()

    def put(self, thing: T) -> None:
        """Add, and ring. Any thread."""
        self._queue.put(thing)
        self.bell.ring()

    def take(self) -> T | None:
        """The next one; None: there is none."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def wait(self, timeout_s: float | None) -> None:
        """See `Doorbell.wait`."""
        self.bell.wait(timeout_s)
