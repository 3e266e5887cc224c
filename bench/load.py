"""How busy others kept the machine while a bench ran: a figure taken under load says less."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """Share of all CPUs used by processes that are not this one's children."""

    def __init__(self) -> None:
        self._start = _reading()

    def share(self) -> float:
        """From construction until now; children count as ours once they have ended and been waited for."""
        busy_s, own_s, wall_s = (now - then for now, then in zip(_reading(), self._start, strict=True))
        return max(0.0, (busy_s - own_s) / (wall_s * (os.cpu_count() or 1)))


def _reading() -> tuple[float, float, float]:
    user, nice, system, _idle, _iowait, irq, softirq = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    busy_s = (user + nice + system + irq + softirq) / _TICKS_PER_S
    return busy_s, sum(os.times()[:4]), time.monotonic()
