"""From NVMe up to DRAM: finding, queueing and reading blocks, one read however many wait for it.

`find` asks the index, `plan` changes state without awaiting (slots, PROMOTING entries, jobs),
and the pump does the I/O in batches, as `ReadQueue` has it: demand before prefetch, bytes in
flight bounded. Whoever else wants a block that is on its way up waits for its entry instead of
reading it again, and makes it as urgent as the own wish is.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstored.catalog.catalog import PROMOTING, READY, Catalog, Entry, Space
from kvstored.catalog.room import Room
from kvstored.clock import Clock
from kvstored.keys import slot_bytes
from kvstored.lifetime import Expiry, capped
from kvstored.mover.jobs import DEMAND, PREDICTED, Batch, Found, Job, Plan
from kvstored.mover.read_queue import ReadQueue
from kvstored.mover.searches import Searches
from kvstored.policy.cost import ASSUMED_READ_BYTES_PER_S, ASSUMED_READ_LATENCY_S, SharedTime
from kvstored.tiers.base import Load, LowerTier, Record
from kvstored.tiers.dram import DramTier

BATCH_BYTES: Final = 32 << 20
SPECULATIVE_BATCH_BYTES: Final = 8 << 20  # smaller: whoever waits for one of its blocks is served sooner
SPECULATIVE_INFLIGHT_BYTES: Final = 64 << 20
PIECE_BLOCKS: Final = 512  # planned in one go; between two pieces the loop does other things


def _expiry(space: Space, record: Record) -> Expiry | None:
    """When a block ends that comes up."""
    return capped(record.expiry, record.created_s + space.max_age_s if space.max_age_s else 0.0)


class Promoter(Searches):
    """Reads from the lower tier."""

    def __init__(
        self,
        catalog: Catalog,
        room: Room,
        dram: DramTier,
        below: LowerTier,
        clock: Clock,
        counters: Counter[str],
        *,
        queue_blocks: int,
        inflight_bytes: int,
        speculative_bytes: int = SPECULATIVE_INFLIGHT_BYTES,
        deadline_s: float = 0.0,
    ) -> None:
        super().__init__(below)
        self._catalog = catalog
        self._room = room
        self._dram = dram
        self._clock = clock
        self._counters = counters
        self._queue_blocks = queue_blocks
        self._deadline_s = deadline_s or None  # for one batch
        self._tasks: set[asyncio.Task[None]] = set()
        self.queue = ReadQueue(inflight_bytes, speculative_bytes)
        self.reads = SharedTime(ASSUMED_READ_BYTES_PER_S, ASSUMED_READ_LATENCY_S)
        self.on_settled: Callable[[], None] = lambda: None  # set by the store: blocks came to rest and may go again

    @property
    def queued_blocks(self) -> int:
        """Blocks that wait to be read."""
        return self.queue.blocks

    @property
    def inflight_bytes(self) -> int:
        """Bytes that are being read."""
        return self.queue.inflight_bytes

    # ---- plan ----

    def plan(self, spaces: Sequence[Space], hashes: Sequence[bytes], found: list[Found], job: Job) -> Plan:
        """Take slots for what must come up and queue the reads. Never waits; cut short where there is no room."""
        assert len(hashes) <= PIECE_BLOCKS, "the loop is kept for a millisecond or two, not longer"
        wanted = length = min(self._run_length(space, hashes, have) for space, have in zip(spaces, found, strict=True))
        job.short = None
        runs: list[list[Entry]] = []
        present = self._hold_present(spaces, hashes[:length])
        for space, have in zip(spaces, found, strict=True):
            runs.append(self._enter(space, hashes[:length], have, job))
            length = min(length, len(runs[-1]))
        self._room.unhold(present)
        self.unpin(found)  # what is left: not needed, or no room
        self._pump()
        job.settle()
        return Plan([run[:length] for run in runs], length < wanted)

    def _run_length(self, space: Space, hashes: Sequence[bytes], have: Found) -> int:
        entries = space.entries
        for index, hash_ in enumerate(hashes):
            if hash_ not in entries and hash_ not in have:
                return index
        return len(hashes)

    def _hold_present(self, spaces: Sequence[Space], hashes: Sequence[bytes]) -> list[Entry]:
        """What is there must not be evicted to make room for what follows it."""
        found = (space.entries.get(hash_) for space in spaces for hash_ in hashes)
        present = [entry for entry in found if entry is not None]
        self._catalog.hold(present)
        return present

    def _enter(self, space: Space, hashes: Sequence[bytes], have: Found, job: Job) -> list[Entry]:
        """Entries for the run, as far as there are slots; takes the records it uses out of `have`."""
        run: list[Entry] = []
        missing = [hash_ for hash_ in hashes if hash_ not in space.entries]
        slots = deque(self._slots(space, [have[hash_].size_bytes for hash_ in missing], job))
        fresh: list[tuple[Entry, Record]] = []
        coming: list[Entry] = []
        for hash_ in hashes:
            entry = space.entries.get(hash_)
            if entry is None:
                if not slots:
                    break
                record = have.pop(hash_)
                where = (record.parent, slots.popleft(), record.size_bytes)
                entry = self._room.enter(space, hash_, *where, PROMOTING, _expiry(space, record))
                fresh.append((entry, record))
            elif entry.state == PROMOTING:
                coming.append(entry)
            run.append(entry)
        for slot in slots:
            self._dram.free(slot)
        self._queue(space, fresh, job)
        self.queue.join(coming, job)
        if job.priority >= DEMAND:
            self._room.prefetched.late(space, coming)
        return run

    def _slots(self, space: Space, sizes: Sequence[int], job: Job) -> list[int]:
        """Slots for blocks of these sizes, in order; ends where there is no room or the queue is full."""
        # Half of the queue is for reads that somebody waits for, however many prefetches there are.
        limit = self._queue_blocks if job.priority >= DEMAND else max(1, self._queue_blocks // 2)
        budget = max(0, limit - self.queued_blocks)
        slots: list[int] = []
        for size, group in itertools.groupby(sizes[:budget]):
            count = len(list(group))
            take = self._room.take if job.priority > PREDICTED else self._room.take_free
            taken = take(space.tenant, size, count)
            slots += taken
            if len(taken) < count:
                job.short = (space.tenant, slot_bytes(size), count - len(taken))
                break
        return slots

    def _queue(self, space: Space, fresh: Sequence[tuple[Entry, Record]], job: Job) -> None:
        """Queue reads, in batches: each is one call of the tier."""
        batch_bytes = BATCH_BYTES if job.priority >= DEMAND else min(BATCH_BYTES, SPECULATIVE_BATCH_BYTES)
        batches: list[Batch] = []
        for entry, record in fresh:
            if not batches or batches[-1].size_bytes + entry.size_bytes > batch_bytes:
                batches.append(Batch(space, job, [], [], job.priority, job.deadline_s))
            batch = batches[-1]
            batch.entries.append(entry)
            batch.records.append(record)
            batch.size_bytes += entry.size_bytes
            job.entries.append(entry)
        for batch in batches:
            self.queue.add(batch)
        if job.source:
            self._room.prefetched.begun(space, [entry for entry, _ in fresh], job.source)

    # ---- act ----

    def _pump(self) -> None:
        """Start reads, the most urgent first, while the bytes in flight allow."""
        while (batch := self.queue.next()) is not None:
            if batch.deadline_s and self._too_late(batch) and not self._wanted(batch):
                self._room.prefetched.late(batch.space, batch.entries)
                self._drop(batch)
                batch.job.settle()
                continue
            batch.job.running += 1
            self.queue.begin(batch)
            task = asyncio.get_running_loop().create_task(self._read(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _too_late(self, batch: Batch) -> bool:
        """Whether it cannot be there by its deadline, by what is known of the device."""
        takes_s = self.reads.seconds(batch.size_bytes) if self.reads.samples else 0.0
        return self._clock.monotonic() + takes_s > batch.deadline_s

    async def _read(self, batch: Batch) -> None:
        address = self._dram.address
        loads = [
            Load(entry.pool.space.digest, entry.hash, record, address(entry.slot))
            for entry, record in zip(batch.entries, batch.records, strict=True)
        ]
        self.reads.began(self._clock.monotonic())
        loading = asyncio.ensure_future(self._below.load(loads))
        await asyncio.wait([loading], timeout=self._deadline_s)
        late = not loading.done()
        if late:
            self._give_up(batch)
        results: Sequence[bool] = ()
        try:
            results = await loading
        finally:
            if not late:
                self.reads.ended(batch.size_bytes, self._clock.monotonic(), failed=not (results and all(results)))
            self._finish(batch, results or [False] * len(loads), late=late)

    def _give_up(self, batch: Batch) -> None:
        """The device does not answer: misses for all who wait. The slots stay held until it is done with them."""
        for entry in batch.entries:
            if entry.state == PROMOTING:
                self._room.forget(entry)
        self._counters["promote_late_blocks"] += len(batch.entries)
        self.reads.ended(batch.size_bytes, self._clock.monotonic(), failed=True)
        self._settle(batch, 0)

    def _finish(self, batch: Batch, results: Sequence[bool], *, late: bool) -> None:
        self._below.unpin(batch.records)
        ready = 0
        for entry, record, ok in zip(batch.entries, batch.records, results, strict=True):
            if ok and self._room.publish(entry, record.content_hash):
                ready += 1
            elif entry.state == PROMOTING:
                self._room.forget(entry)
        self._room.unhold(batch.entries)
        if late:
            self.on_settled()
        else:
            self._settle(batch, ready)

    def _settle(self, batch: Batch, ready: int) -> None:
        """What became of a batch is known."""
        job = batch.job
        job.ready_blocks += ready
        job.failed_blocks += len(batch.entries) - ready
        job.running -= 1
        self._counters["promoted_blocks"] += ready
        self._counters["promote_failed_blocks"] += len(batch.entries) - ready
        self.queue.ended(batch)
        if job.idle:
            # Batch after batch entered the order; once more as one chain, tail first.
            self._catalog.touch([e for e in job.entries if e.state == READY], used=False)
        job.settle()
        self.on_settled()
        self._pump()

    # ---- cancel ----

    async def cancel(self, job: Job) -> None:
        """Drop what is queued, except blocks that others wait for; returns when no copy of the job runs.

        A copy that its device keeps beyond the deadline is not waited for: nobody can see what it writes.
        """
        self.abandon(job)
        await asyncio.wait([job.done])

    def abandon(self, job: Job) -> None:
        """The same without waiting for what runs."""
        for batch in list(job.batches):
            if not self._wanted(batch):
                self.queue.remove(batch)
                self._drop(batch)
        job.settle()

    def _wanted(self, batch: Batch) -> bool:
        return any(entry.holds > 1 or self._catalog.awaited(entry) for entry in batch.entries)

    def _drop(self, batch: Batch) -> None:
        """Give back what a batch has that is not in the queue any more."""
        batch.job.failed_blocks += len(batch.entries)
        self._below.unpin(batch.records)
        for entry in batch.entries:
            if entry.state == PROMOTING:
                self._room.forget(entry)
        self._room.unhold(batch.entries)

    async def drained(self) -> bool:
        """Wait until no read runs. False: some do that their device keeps beyond the deadline."""
        while self._tasks:
            ended, _ = await asyncio.wait(
                list(self._tasks), timeout=self._deadline_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended:
                return False
        return True
