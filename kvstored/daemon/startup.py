"""Where the time of a start goes: said in the log line with which the daemon begins to serve."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/self/stat")
_START_TICKS_FIELD: Final = 22  # proc(5) counts from 1


class StartTimes:
    """Seconds of each step of a start. The first, `process`, is exec, imports and configuration."""

    def __init__(self) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._last_s = now
        self.seconds = {"process": now - _process_start_s()}

    def ended(self, step: str) -> None:
        """The step that began where the last one ended is done."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.seconds[step] = now - self._last_s
        self._last_s = now

    def rounded(self) -> dict[str, float]:
        """To the millisecond; the process's own start is known to 10 ms."""
        return {step: round(seconds, 3) for step, seconds in self.seconds.items()}


def _process_start_s() -> float:
    """When this process began, in seconds since boot (it kept its start when it called exec)."""
    from_third = _STAT.read_text().rpartition(")")[2].split()  # the second, the name, may hold anything
    return int(from_third[_START_TICKS_FIELD - 3]) / os.sysconf("SC_CLK_TCK")
