"""How fast a tenant may put: a token bucket, with the time passed in."""

from __future__ import annotations

from typing import Final

BURST_S: Final = 1.0  # so many seconds of the rate may come at once


class TokenBucket:
    """Bytes at a rate. A call is let through while anything is left, and may leave a debt that is paid first.

    So over any `t` seconds no more than `rate * (t + BURST_S)` and one call pass, and a call larger than the
    burst passes too, once in a while.
    """

    def __init__(self, bytes_per_s: float) -> None:
        if bytes_per_s < 1:
            raise ValueError(f"a rate of {bytes_per_s} bytes/s lets nothing through: it must be 1 or more")
        self.bytes_per_s = bytes_per_s
        self._left_bytes = bytes_per_s * BURST_S
        self._filled_s: float | None = None

    def wait_s(self, now_s: float) -> float:
        """For how long nothing may be taken; 0: a call may be made now."""
        self._fill(now_s)
        # At least one byte, or a caller that waits as long as it was told would find nothing left.
        return 0.0 if self._left_bytes >= 1 else (1 - self._left_bytes) / self.bytes_per_s

    def take(self, size_bytes: int, now_s: float) -> None:
        """Count what a call took."""
        self._fill(now_s)
        self._left_bytes -= size_bytes

    def _fill(self, now_s: float) -> None:
        passed_s = 0.0 if self._filled_s is None else max(0.0, now_s - self._filled_s)
        self._filled_s = now_s
        self._left_bytes = min(self._left_bytes + passed_s * self.bytes_per_s, self.bytes_per_s * BURST_S)
