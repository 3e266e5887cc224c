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
        if used_bytes <= low_bytes or not (active or self.reached(used_bytes, capacity_bytes)):
            return 0
        return min(self.batch_bytes(capacity_bytes), used_bytes - low_bytes)

    def reached(self, used_bytes: int, capacity_bytes: int) -> bool:
        """Whether the high mark is: what only makes room by being lost need not go before."""
        return used_bytes >= max(int(self.low * capacity_bytes) + 1, int(self.high * capacity_bytes))

    def spare_bytes(self, used_bytes: int, capacity_bytes: int) -> int:
        """What may be filled with blocks that nobody has asked for yet: up to one step below the high mark.

        So it never starts demotion, and leaves room for what is asked for.
        """
        return max(0, int(max(self.low, self.high - self.batch) * capacity_bytes) - used_bytes)

    def batch_bytes(self, capacity_bytes: int) -> int:
        """What one step moves."""
        return max(1, int(self.batch * capacity_bytes))

    def ahead_bytes(self, used_bytes: int, capacity_bytes: int, coming_bytes: int) -> int:
        """Bytes to move in the next step under the high mark, where `coming_bytes` would take the tier over it.

        Only as much as it would be over: what is moved too early is missed in the tier.
        """
        over_bytes = used_bytes + coming_bytes - int(self.high * capacity_bytes)
        left_bytes = used_bytes - int(self.low * capacity_bytes)
        return max(0, min(self.batch_bytes(capacity_bytes), over_bytes, left_bytes))
