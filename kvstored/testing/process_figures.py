"""What a process costs, from /proc: CPU seconds, memory, bytes written, open descriptors."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds (user and system) used so far by a process and all its children. Raises OSError where it is gone."""
    seconds = _own_and_reaped_s(pid)
    for child in children(pid):
        with suppress(OSError):  # it has ended since it was listed
            seconds += cpu_s(child)
    return seconds


def _own_and_reaped_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


def written_bytes(pid: int) -> int:
    """Bytes that a process has caused to be written to storage so far."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        name, value = line.split(": ")
        if name == "write_bytes":
            return int(value)
    raise OSError(f"/proc/{pid}/io has no write_bytes")


def private_bytes(pid: int) -> int:
    """Resident memory of a process without what it shares (memfds: the tier, staging, session pages)."""
    return _memory_bytes(pid, "RssAnon") + _memory_bytes(pid, "RssFile")


def shared_bytes(pid: int) -> int:
    """Resident shared memory of a process: memfds that it has mapped, as far as they were touched."""
    return _memory_bytes(pid, "RssShmem")


def _memory_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/{pid}/status has no {name}")


def descriptors(pid: int) -> list[str]:
    """What each open descriptor of a process points to."""
    directory = Path(f"/proc/{pid}/fd")
    found = []
    for entry in directory.iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:  # closed since it was listed
            continue
    return found


def arguments(pid: int) -> list[str]:
    """The command line of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def ended(pid: int) -> bool:
    """Whether no process of this id runs any more (one that nobody has waited for has ended, too)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def children(pid: int) -> list[int]:
    """Process ids of the direct children of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:  # the thread has ended, or the kernel does not list children
            continue
    return found
