"""Whether another process is still the one that it was."""

from __future__ import annotations

from pathlib import Path
from typing import Final

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
