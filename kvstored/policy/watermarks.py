"""When background demotion runs and how much one step of it moves."""

from __future__ import annotations

import msgspec


class Watermarks(msgspec.Struct, frozen=True):
    """Fractions of a capacity: demotion starts at `high`, ends at `low`, in steps of `batch`.

    Two marks instead of one, so that a tier that stands at its limit is not disturbed by
    every single put. Raises ValueError where the marks are not in order.
    """

    high: float = 0.9
    low: float = 0.7
    batch: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"watermarks are low {self.low}, high {self.high}: they must be 0 <= low < high <= 1")
        if not 0 < self.batch <= 1:
            raise ValueError(f"watermark batch is {self.batch}: it must be over 0 and at most 1")

    def to_move_bytes(self, used_bytes: int, capacity_bytes: int, active: bool) -> int:
        """Bytes to move in the next step; 0 means that there is nothing to do.

        `active` says that the last step moved something. Then demotion goes on until the low
        mark; otherwise it waits for the high one.
        """
        low_bytes = int(self.low * capacity_bytes)
        start_bytes = low_bytes + 1 if active else max(low_bytes + 1, int(self.high * capacity_bytes))
        if used_bytes < start_bytes:
            return 0
        step_bytes = max(1, int(self.batch * capacity_bytes))
        return min(step_bytes, used_bytes - low_bytes)
