"""Whether room will run out before demotion has helped: what comes in, against how long a batch takes to go."""

from __future__ import annotations

from math import exp2, log
from typing import Final

HALF_LIFE_S: Final = 5.0
SPEED_LEARNING: Final = 0.25  # weight of one step in the mean time to demote


class Forecast:
    """The decayed rate at which room is taken, and the decayed time that demoting a byte takes.

    Bytes taken count half as much after every half-life: a burst is forgotten in seconds, and a put now and
    then never starts anything. Time is passed in, in seconds of any clock that does not go back; one that
    does is taken for standing still. Raises ValueError for a half-life that is not over 0.
    """

    __slots__ = ("_at_s", "_decayed_bytes", "_half_life_s", "_s_per_byte", "_seen_bytes")

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        if not half_life_s > 0:
            raise ValueError(f"the forecast's half-life is {half_life_s} s: it must be over 0")
        self._half_life_s = half_life_s
        self._decayed_bytes = 0.0
        self._seen_bytes = 0
        self._at_s: float | None = None
        self._s_per_byte = 0.0

    def taken(self, total_bytes: int, now_s: float) -> None:
        """So many bytes of room were taken ever, up to now."""
        if self._at_s is not None:
            self._decayed_bytes *= self._decay(now_s) if now_s > self._at_s else 1.0
            self._decayed_bytes += max(0, total_bytes - self._seen_bytes)
        self._at_s = now_s if self._at_s is None else max(now_s, self._at_s)
        self._seen_bytes = total_bytes

    def demoted(self, size_bytes: int, seconds: float) -> None:
        """A step of demotion wrote so many bytes and took so long."""
        if size_bytes > 0 and seconds >= 0:
            found = seconds / size_bytes
            weight = SPEED_LEARNING if self._s_per_byte else 1.0
            self._s_per_byte += weight * (found - self._s_per_byte)

    def rate_bytes_per_s(self, now_s: float) -> float:
        """Room taken a second, decayed until now."""
        if self._at_s is None:
            return 0.0
        decay = self._decay(now_s) if now_s > self._at_s else 1.0
        return self._decayed_bytes * decay * log(2) / self._half_life_s

    def coming_bytes(self, batch_bytes: int, now_s: float) -> int:
        """What will have come in by the time that a batch of this size is demoted."""
        return int(self.rate_bytes_per_s(now_s) * self._s_per_byte * batch_bytes)

    def _decay(self, now_s: float) -> float:
        assert self._at_s is not None, "asked after the first note"
        return exp2((self._at_s - now_s) / self._half_life_s)
