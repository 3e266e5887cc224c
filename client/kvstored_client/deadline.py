"""Until when a transfer is of use to its engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

TOO_LATE: Final = "its deadline has passed"  # as the daemon says it, too
_MOST_S: Final = 4_000_000.0  # the field holds no more milliseconds


class Deadline:
    """A moment after which nothing more of a transfer is begun."""

    def __init__(self, seconds: float = 0.0, missed: Callable[[], None] | None = None) -> None:
        """So many seconds from now; 0: there is none. `missed` is called once, where something is given up for it."""
        self._until_s = time.monotonic() + seconds if seconds else math.inf
        self._missed = missed

    @property
    def limited(self) -> bool:
        """Whether there is one."""
        return self._until_s < math.inf

    def left_s(self, most: float = math.inf) -> float:
        """How much time there is, but no more than `most`."""
        return max(0.0, min(most, self._until_s - time.monotonic()))

    @property
    def milliseconds_left(self) -> int:
        """For the protocol: one at least, 0 where there is none."""
        return max(1, round(self.left_s(_MOST_S) * 1000.0)) if self.limited else 0

    def passed(self) -> bool:
        """Asked before something is begun: whether it is to be given up."""
        if time.monotonic() < self._until_s:
            return False
        missed, self._missed = self._missed, None
        if missed is not None:
            missed()
        return True


NEVER: Final = Deadline()
