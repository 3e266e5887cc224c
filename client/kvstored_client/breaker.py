"""A circuit breaker: a daemon that does not answer costs microseconds a call, not a timeout each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0


class Breaker:
    """Closed while all is well; after a failure it lets one caller try per back-off period.

    The period starts at 50 ms and doubles to 2 s; up to half of it is random, so that the clients
    of one daemon do not come back at once. Under threads two callers may probe at the same time,
    which harms nobody.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._retry_at_s = 0.0
        self.failures = 0

    @property
    def closed(self) -> bool:
        """Whether the last attempt succeeded."""
        return self.failures == 0

    @property
    def waiting(self) -> bool:
        """Whether nobody may try at this moment."""
        return self.failures > 0 and self._clock() < self._retry_at_s

    def allow(self) -> bool:
        """Whether this caller may try. While open, a yes moves the next attempt one period on."""
        if self.waiting:
            return False
        if self.failures:
            self._retry_at_s = self._clock() + self._period_s()
        return True

    def success(self) -> None:
        """The daemon answered."""
        self.failures = 0

    def failure(self) -> None:
        """It did not."""
        self.failures += 1
        self._retry_at_s = self._clock() + self._period_s()

    def _period_s(self) -> float:
        doubled = BACKOFF_MIN_S * 2.0 ** min(self.failures - 1, 16)
        return min(BACKOFF_MAX_S, doubled) * (0.5 + 0.5 * self._jitter())
