"""The reads that wait for the device: which is next, and how much may be under way.

Whoever waits for a read goes before all who do not. What is read for nobody who waits (a prefetch) has a limit
of bytes under way of its own, so that a read that is asked for finds no more than that before it at the device.
Plain state: no I/O, no clock.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Final

from kvstored.catalog.catalog import Entry
from kvstored.mover.jobs import DEMAND, Batch, Job

HEAP_MIN: Final = 64  # below this it is not tidied


class ReadQueue:
    """Batches by priority, those of one priority in the order in which they came."""

    def __init__(self, inflight_limit_bytes: int, speculative_limit_bytes: int) -> None:
        self.inflight_limit_bytes = inflight_limit_bytes
        self.speculative_limit_bytes = speculative_limit_bytes
        self.blocks = 0  # that wait
        self.inflight_bytes = 0
        self.speculative_bytes = 0  # of those in flight
        self.demand_bytes = 0  # that wait and are waited for
        self._heap: list[tuple[int, int, Batch]] = []
        self._heap_max = HEAP_MIN
        self._order = itertools.count()
        self._batches: dict[int, Batch] = {}  # by the identity of each entry that waits

    @property
    def ahead_bytes(self) -> int:
        """What is read before a read that somebody begins to wait for now."""
        return self.inflight_bytes + self.demand_bytes

    def add(self, batch: Batch) -> None:
        """Have it read when its turn comes."""
        batch.job.batches[batch] = None
        self._batches.update(dict.fromkeys(map(id, batch.entries), batch))
        self.blocks += len(batch.entries)
        self._push(batch)

    def join(self, entries: list[Entry], job: Job) -> None:
        """Another wants these as well: what of it waits is as urgent as the more urgent of the two."""
        batches = {batch: None for entry in entries if (batch := self._batches.get(id(entry))) is not None}
        for batch in batches:
            if batch.deadline_s:
                batch.deadline_s = max(batch.deadline_s, job.deadline_s) if job.deadline_s else 0.0
            if batch.priority < job.priority:
                batch.priority = job.priority
                self._push(batch)

    def _push(self, batch: Batch) -> None:
        if batch.priority >= DEMAND:
            self.demand_bytes += batch.size_bytes
        heapq.heappush(self._heap, (-batch.priority, next(self._order), batch))
        if len(self._heap) > self._heap_max:
            # What was dropped would gather behind one that may not begin.
            self._heap = [item for item in self._heap if item[2].waiting and item[2].priority == -item[0]]
            heapq.heapify(self._heap)
            self._heap_max = max(HEAP_MIN, 2 * len(self._heap))

    def next(self) -> Batch | None:
        """Take out the most urgent one, where it may begin; `begin` or forget it then."""
        heap = self._heap
        while heap:
            negative, _, batch = heap[0]
            if not batch.waiting or batch.priority != -negative:  # dropped, begun, or in the heap again further up
                heapq.heappop(heap)
            elif not self._may_begin(batch):
                return None
            else:
                heapq.heappop(heap)
                self.remove(batch)
                return batch
        return None

    def _may_begin(self, batch: Batch) -> bool:
        """One of each kind always may, or a limit below the size of a batch would stop everything."""
        demanded_bytes = self.inflight_bytes - self.speculative_bytes
        if batch.priority >= DEMAND:
            return not demanded_bytes or demanded_bytes < self.inflight_limit_bytes
        if self.inflight_bytes >= self.inflight_limit_bytes:
            return not self.inflight_bytes
        return not self.speculative_bytes or self.speculative_bytes + batch.size_bytes <= self.speculative_limit_bytes

    def remove(self, batch: Batch) -> None:
        """It waits no more."""
        assert batch.waiting, "removed twice"
        batch.waiting = False
        del batch.job.batches[batch]
        for entry in batch.entries:
            del self._batches[id(entry)]
        self.blocks -= len(batch.entries)
        if batch.priority >= DEMAND:
            self.demand_bytes -= batch.size_bytes

    def begin(self, batch: Batch) -> None:
        """It is given to the device."""
        batch.speculative = batch.priority < DEMAND
        self.inflight_bytes += batch.size_bytes
        self.speculative_bytes += batch.size_bytes if batch.speculative else 0

    def ended(self, batch: Batch) -> None:
        """The device is done with it, or given up."""
        self.inflight_bytes -= batch.size_bytes
        self.speculative_bytes -= batch.size_bytes if batch.speculative else 0
