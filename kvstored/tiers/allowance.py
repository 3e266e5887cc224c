"""A day's budget of bytes to write, refilled through the day. State only; times are passed in."""

from __future__ import annotations

from typing import Final

DAY_S: Final = 86_400.0


class Allowance:
    """A token bucket that holds at most a day's bytes; it may be overdrawn, by a day's at most.

    `now_s` is in seconds of a clock that never goes back, so that setting the wall clock refills nothing.
    """

    def __init__(self, bytes_per_day: int, now_s: float, left_bytes: float | None = None) -> None:
        assert bytes_per_day > 0, "without a budget there is no allowance"
        self.bytes_per_day = bytes_per_day
        self._left_bytes = 0.0
        self._at_s = now_s
        self._set(bytes_per_day if left_bytes is None else left_bytes)

    def left_bytes(self, now_s: float) -> int:
        """What may still be written; negative where more was."""
        elapsed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(now_s, self._at_s)
        self._set(self._left_bytes + elapsed_s * self.bytes_per_day / DAY_S)
        return int(self._left_bytes)

    def spend(self, size_bytes: int, now_s: float) -> None:
        """So many bytes were written."""
        self.left_bytes(now_s)
        self._set(self._left_bytes - size_bytes)

    def _set(self, left_bytes: float) -> None:
        self._left_bytes = min(float(self.bytes_per_day), max(-float(self.bytes_per_day), left_bytes))
