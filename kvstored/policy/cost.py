"""Load or recompute: how long a stored prefix takes to load, and whether computing it anew is faster.

Times of the leading n blocks of a prefix, for one engine that begins now:

    load(n)      = copy(n) / C                                while all of them are in DRAM
    load(n)      = copy(n) / C + L + (ahead + read(n)) / R    where some of them are on NVMe
    recompute(n) = n * block_tokens / prefill_tokens_per_s

`copy(n)` are the bytes of all n blocks, `read(n)` those that come from NVMe, `ahead` what NVMe reads before
them. C, R and L are measured: bytes/s of copies, bytes/s and latency of reads. The two parts are added, though
they overlap in part: an estimate that is too long costs a recomputation, one that is too short a stall.

A transfer's time as latency + bytes / bandwidth is Hockney's model (R. Hockney, The communication challenge for
MPP: Intel Paragon and Meiko CS-2, Parallel Computing 20, 1994). Both parameters come from a line fitted through
(bytes, seconds) by least squares, older samples weighing less. What waits is added to a read's own bytes because
the device is served by one queue that is never idle while something is in it.

Recomputing is taken as linear in tokens, at the rate that the engine gives. Attention over a long context makes
its later tokens dearer: an engine that knows better gives the rate for such a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp2
from typing import Final

import msgspec

HALF_LIFE_SAMPLES: Final = 16.0  # after so many a sample weighs half
PERIOD_BYTES: Final = 256 << 20  # a device that is never idle gives a sample as often
# What is believed before anything was measured: slow hardware of the present.
ASSUMED_COPY_BYTES_PER_S: Final = 2e9
ASSUMED_READ_BYTES_PER_S: Final = 1e9
ASSUMED_READ_LATENCY_S: Final = 1e-3


class TransferTime:
    """The time of a transfer, latency + bytes / bandwidth, learnt from those that were made."""

    __slots__ = ("_assumed", "_decay", "_sum", "_sum_xx", "_sum_xy", "_weight", "_x", "samples")

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._assumed = (latency_s, 1.0 / bytes_per_s)
        self._decay = exp2(-1.0 / HALF_LIFE_SAMPLES)
        self._weight = self._x = self._sum = self._sum_xx = self._sum_xy = 0.0
        self.samples = 0

    def note(self, size_bytes: int, seconds: float) -> None:
        """A transfer of so many bytes took so long; one without either says nothing."""
        if size_bytes <= 0 or seconds <= 0:
            return
        self.samples += 1
        decay = self._decay
        self._weight = self._weight * decay + 1.0
        self._x = self._x * decay + size_bytes
        self._sum = self._sum * decay + seconds
        self._sum_xx = self._sum_xx * decay + float(size_bytes) * size_bytes
        self._sum_xy = self._sum_xy * decay + size_bytes * seconds

    def line(self) -> tuple[float, float]:
        """Latency in seconds, and seconds a byte (over 0)."""
        if not self.samples:
            return self._assumed
        spread = self._weight * self._sum_xx - self._x * self._x
        # Samples of one size, or nearly, tell nothing of the latency: it is in their seconds a byte.
        if spread > 1e-3 * self._x * self._x:
            slope = (self._weight * self._sum_xy - self._x * self._sum) / spread
            latency_s = (self._sum - slope * self._x) / self._weight
            if slope > 0 and latency_s >= 0:
                return latency_s, slope
        return 0.0, self._sum / self._x

    def seconds(self, size_bytes: int) -> float:
        """For so many bytes."""
        latency_s, slope = self.line()
        return latency_s + slope * size_bytes

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth."""
        return 1.0 / self.line()[1]

    @property
    def latency_s(self) -> float:
        """What a transfer takes beside its bytes."""
        return self.line()[0]


class SharedTime(TransferTime):
    """The same of what several transfers use at once: it learns from periods in which it was never idle.

    Time is passed in, in seconds of a clock that does not go back.
    """

    __slots__ = ("_period_bytes", "_running", "_since_s", "_spoilt")

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        super().__init__(bytes_per_s, latency_s)
        self._running = self._period_bytes = 0
        self._since_s = 0.0
        self._spoilt = False

    def began(self, now_s: float) -> None:
        """A transfer begins."""
        if not self._running:
            self._begin_period(now_s)
        self._running += 1

    def ended(self, size_bytes: int, now_s: float, *, failed: bool = False) -> None:
        """It is over. A failed one makes its period tell nothing."""
        assert self._running > 0, "ended more often than begun"
        self._running -= 1
        self._spoilt |= failed
        self._period_bytes += size_bytes
        if not self._running or self._period_bytes >= PERIOD_BYTES:
            if not self._spoilt:
                self.note(self._period_bytes, now_s - self._since_s)
            self._begin_period(now_s)

    def _begin_period(self, now_s: float) -> None:
        self._since_s, self._period_bytes, self._spoilt = now_s, 0, False


class Estimate(msgspec.Struct, frozen=True):
    """Load or recompute, for a prefix; see the module."""

    load_s: float
    recompute_s: float
    paying_blocks: int  # the longest leading run that is loaded no later than recomputed


def estimate(
    sizes: Sequence[int],
    below: Sequence[int],
    ahead_bytes: int,
    copies: TransferTime,
    reads: TransferTime,
    recompute_block_s: float,
) -> Estimate:
    """Of blocks of these sizes, of which so many bytes are on NVMe or on their way from there."""
    copy_latency_s, copy_slope = copies.line()
    read_latency_s, read_slope = reads.line()
    load_s, paying = 0.0, 0
    for blocks, (copied, read) in enumerate(zip(accumulate(sizes), accumulate(below), strict=True), 1):
        load_s = copy_latency_s + copied * copy_slope
        if read:
            load_s += read_latency_s + (ahead_bytes + read) * read_slope
        if load_s <= blocks * recompute_block_s:
            paying = blocks
    return Estimate(load_s, len(sizes) * recompute_block_s, paying)
