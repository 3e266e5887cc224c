"""Which thread the kernel runs first where there are more of them than CPUs.

The event loop has answers to give in microseconds, and so have the engines that wait for them. A thread that
copies, hashes or commits computes for long; if it is on the CPU of whoever wakes up, the kernel lets it finish its
slice, and looks again at the next tick, up to 4 ms later. What is done about it needs no privilege, and where the
kernel refuses or does not know it, threads run as they are.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

NICE: Final = 5
LONG_SLICE_NS: Final = 100_000_000  # the longest; the usual one is 0.7 to 3 ms, depending on the number of CPUs

# struct sched_attr: size, policy, flags, nice, priority, runtime (ns), deadline, period.
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQ")
_SET_ATTRIBUTES: Final = {"x86_64": 314, "aarch64": 274}.get(platform.machine())  # no name for it in older C libraries
_FAIR: Final = frozenset({os.SCHED_OTHER, os.SCHED_BATCH})

_libc: Final = ctypes.CDLL(None, use_errno=True)


def compute_in_long_slices() -> None:
    """Let whoever wakes up on this thread's CPU run at once; for threads that compute.

    Linux 6.12 has it: who asked for longer slices than another keeps its share of the CPU, but is interrupted by it.
    Older kernels ignore the wish. Not by a nice value: with a smaller share a thread that was interrupted while it
    held the GIL would keep the event loop waiting for longer.
    """
    with suppress(PermissionError):
        policy = os.sched_getscheduler(0)
        if _SET_ATTRIBUTES is None or policy not in _FAIR:  # who runs the daemon with another policy means it
            return
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        wish = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, nice, 0, LONG_SLICE_NS, 0, 0)
        _libc.syscall(_SET_ATTRIBUTES, 0, wish, 0)  # refused: it serves as it is


def give_way() -> None:
    """The same for a thread that mostly waits for a device, with a smaller share of the CPU.

    A daemon that was started nicer than that stays so: to take priority back is refused to all but root, and not
    meant. Where setting it is refused altogether (a seccomp filter) the thread serves as it is: an initializer that
    raises would break its whole pool.
    """
    thread = threading.get_native_id()
    with suppress(PermissionError):
        if os.getpriority(os.PRIO_PROCESS, thread) < NICE:
            os.setpriority(os.PRIO_PROCESS, thread, NICE)
    compute_in_long_slices()


@contextmanager
def apart(index: int, count: int) -> Iterator[None]:
    """Run number `index` of `count` things that compute at the same time, each on CPUs that the others stay away from.

    Where a loop wakes now and then beside two threads that copy, the kernel puts both of them on one CPU for
    milliseconds (on two CPUs a commit took a tenth longer so). Where there are too few CPUs, or it is refused, they
    run where they are put.
    """
    # What the main thread may use, which stays as it is: who once had CPUs of its own does not get others that come.
    allowed = os.sched_getaffinity(os.getpid())
    own = threading.get_native_id() != os.getpid() and len(allowed) >= count
    share = sorted(allowed)[index::count] if own else []
    if share:
        with suppress(OSError):  # a seccomp filter, or CPUs that were taken away this instant
            os.sched_setaffinity(0, share)
    try:
        yield
    finally:
        if share:
            with suppress(OSError):
                os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
