"""Whether another process is still the one that it was, and to end it where it must not outlive us."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

END_WAIT_S: Final = 10.0

_START_FIELD: Final = 19  # of those after the name: field 22 of stat, in clock ticks since the machine's start
_STATE_FIELD: Final = 0


def start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since the machine's start; 0: it is gone, or not to be seen from here."""
    if pid <= 0:
        return 0
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    fields = stat.rpartition(b")")[2].split()  # the name before it may hold anything
    if fields[_STATE_FIELD] in (b"Z", b"X"):  # its memory is gone
        return 0
    return int(fields[_START_FIELD])


def has_own_process_ids(pid: int) -> bool:
    """Whether a process counts processes in another way than we do, as in most containers; False: not to be seen.

    0 is what the kernel says of a peer that has no number here.
    """
    if not pid:
        return True
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def noted(pids: Iterable[int]) -> bytes:
    """Our children as a text for `end_noted` of whoever comes after us."""
    return "".join(f"{pid} {start_ticks(pid)}\n" for pid in pids).encode()


def end_noted(text: bytes) -> bool:
    """End what an earlier process noted. True: nothing of it runs any more; False: one does not end. May wait."""
    deadline_s = time.monotonic() + END_WAIT_S
    lines = [line.split() for line in text.splitlines()]
    for pid, ticks in ((int(line[0]), int(line[1])) for line in lines if len(line) == 2 and b"".join(line).isdigit()):
        while ticks and start_ticks(pid) == ticks:
            if time.monotonic() > deadline_s:
                return False
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                break
            time.sleep(0.01)
    return True
