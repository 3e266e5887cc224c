"""The blocks of one space that end, by when: one bucket for each step of time that has any.

What is due is found without looking at what is not. A use of a sliding block only changes the block;
its bucket learns of it when its old end comes. Memory is bounded by the blocks: each is in one bucket.
"""

from __future__ import annotations

import heapq
from math import inf
from typing import TYPE_CHECKING, Final

from kvstored.lifetime import STEPS_PER_S

if TYPE_CHECKING:
    from kvstored.catalog.spaces import Entry

SLACK_STEPS: Final = 64  # emptied buckets that may stand in the heap beyond those that are there


class Timers:
    """The buckets of one space. `first_s`: before that nothing is due."""

    def __init__(self) -> None:
        self.first_s = inf
        self._buckets: dict[int, dict[Entry, None]] = {}  # no sets: what ends first is not left to addresses
        self._steps: list[int] = []

    def add(self, entry: Entry) -> None:
        """Note a block that ends."""
        step = entry.step = int(entry.expires_s * STEPS_PER_S)
        bucket = self._buckets.get(step)
        if bucket is None:
            bucket = self._buckets[step] = {}
            heapq.heappush(self._steps, step)
            self.first_s = self._steps[0] / STEPS_PER_S
        bucket[entry] = None

    def discard(self, entry: Entry) -> None:
        """The block is gone."""
        bucket = self._buckets.get(entry.step)
        if bucket is not None:
            bucket.pop(entry, None)
            if not bucket:
                self._drop(entry.step)

    def _drop(self, step: int) -> None:
        del self._buckets[step]
        if len(self._steps) > 2 * len(self._buckets) + SLACK_STEPS:
            self._steps = list(self._buckets)
            heapq.heapify(self._steps)
        self._look()

    def _look(self) -> None:
        while self._steps and self._steps[0] not in self._buckets:
            heapq.heappop(self._steps)
        self.first_s = self._steps[0] / STEPS_PER_S if self._steps else inf

    def due(self, now_s: float, limit: int) -> tuple[list[Entry], list[Entry]]:
        """Up to `limit` blocks whose bucket is due: those that have ended, and those that a use has moved since.

        The latter stand in the bucket of their new end now; the former are still to be forgotten.
        """
        ended: list[Entry] = []
        moved: list[Entry] = []
        while self.first_s <= now_s and len(ended) + len(moved) < limit:
            bucket = self._buckets[self._steps[0]]
            while bucket and len(ended) + len(moved) < limit:
                entry, _ = bucket.popitem()
                (moved if int(entry.expires_s * STEPS_PER_S) > entry.step else ended).append(entry)
            if not bucket:
                self._drop(self._steps[0])
        for entry in moved:
            self.add(entry)
        return ended, moved

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))
