"""From NVMe up to DRAM: finding, queueing and reading blocks, one read however many wait for it.

`find` asks the index, `plan` changes state without awaiting (slots, PROMOTING entries, jobs),
and the pump does the I/O in batches: demand before prefetch, bytes in flight bounded. Whoever
else wants a block that is on its way up waits for its entry instead of reading it again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from kvstored.catalog import PROMOTING, READY, Catalog, Entry, Space
from kvstored.clock import Clock
from kvstored.jobs import Batch, Found, Job, Plan, Search
from kvstored.keys import slot_bytes
from kvstored.room import Room
from kvstored.tiers.base import Load, LowerTier, Record
from kvstored.tiers.dram import DramTier

BATCH_BYTES: Final = 32 << 20
PIECE_BLOCKS: Final = 512  # planned in one go; between two pieces the loop does other things
DEMAND: Final = 1 << 20  # priority of a read that somebody waits for


class Promoter:
    """The queue of reads from the lower tier."""

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
        deadline_s: float = 0.0,
    ) -> None:
        self._catalog = catalog
        self._room = room
        self._dram = dram
        self._below = below
        self._clock = clock
        self._counters = counters
        self._queue_blocks = queue_blocks
        self._inflight_limit_bytes = inflight_bytes
        self._deadline_s = deadline_s or None  # for one batch
        self._heap: list[tuple[int, int, Job, Batch]] = []
        self._order = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._searches: dict[Search, None] = {}  # under way
        self.on_settled: Callable[[], None] = lambda: None  # set by the store: blocks came to rest and may go again
        self.queued_blocks = 0
        self.inflight_bytes = 0

    # ---- find ----

    async def find(self, spaces: Sequence[Space], hashes: Sequence[bytes]) -> list[Found]:
        """Index records of the blocks that are not in DRAM, per space, up to the first that is nowhere.

        They are pinned: hand each to `plan` or to `unpin`, before anything else can happen.
        """
        # Each once, however often it was asked for: what is pinned twice would have to be let go twice.
        searches = [Search(space, list(dict.fromkeys(hashes)), {}) for space in spaces]
        self._searches.update(dict.fromkeys(searches))
        try:
            # Again, because a block that was in DRAM may have moved down while the index was asked. The last
            # look is here and not in a task: nothing moves between it and the caller.
            while unfinished := [search for search in searches if search.missing()]:
                for failure in await asyncio.gather(*map(self._ask, unfinished), return_exceptions=True):
                    if failure is not None:
                        raise failure
        except BaseException:
            self.unpin([search.found for search in searches])
            raise
        finally:
            for search in searches:
                del self._searches[search]
        return [search.found for search in searches]

    async def _ask(self, search: Search) -> None:
        """Ask the index once for what is missing; the first that is nowhere ends the search there."""
        missing = search.missing()
        records = await self._below.find(search.space.tenant, search.space.digest, missing, prefix=True)
        self._below.unpin(search.answered(missing, records))

    def deleted(self, space: Space, hashes: Collection[bytes]) -> None:
        """Blocks were deleted below: what the index said of them before must not bring them up again."""
        for search in self._searches:
            if search.space is space:
                self._below.unpin(search.forget(hashes))

    def unpin(self, found: Sequence[Found]) -> None:
        """Let go of records that nobody will read."""
        self._below.unpin([record for records in found for record in records.values()])

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
        for hash_ in hashes:
            entry = space.entries.get(hash_)
            if entry is None:
                if not slots:
                    break
                record = have.pop(hash_)
                entry = self._room.enter(space, hash_, record.parent, slots.popleft(), record.size_bytes, PROMOTING)
                fresh.append((entry, record))
            run.append(entry)
        for slot in slots:
            self._dram.free(slot)
        self._queue(space, fresh, job)
        return run

    def _slots(self, space: Space, sizes: Sequence[int], job: Job) -> list[int]:
        """Slots for blocks of these sizes, in order; ends where there is no room or the queue is full."""
        budget = max(0, self._queue_blocks - self.queued_blocks)
        slots: list[int] = []
        for size, group in itertools.groupby(sizes[:budget]):
            count = len(list(group))
            taken = self._room.take(space.tenant, size, count)
            slots += taken
            if len(taken) < count:
                job.short = (space.tenant, slot_bytes(size), count - len(taken))
                break
        return slots

    def _queue(self, space: Space, fresh: Sequence[tuple[Entry, Record]], job: Job) -> None:
        """Queue reads, in batches: each is one call of the tier."""
        batch: Batch | None = None
        for entry, record in fresh:
            if batch is None or batch.size_bytes + entry.size_bytes > BATCH_BYTES:
                batch = Batch(space, [], [])
                job.batches.append(batch)
                heapq.heappush(self._heap, (-job.priority, next(self._order), job, batch))
            batch.entries.append(entry)
            batch.records.append(record)
            batch.size_bytes += entry.size_bytes
            job.entries.append(entry)
        self.queued_blocks += len(fresh)

    # ---- act ----

    def _pump(self) -> None:
        """Start reads, the most urgent first, while the bytes in flight allow."""
        while self._heap and (not self.inflight_bytes or self.inflight_bytes < self._inflight_limit_bytes):
            _, _, job, batch = heapq.heappop(self._heap)
            if batch not in job.batches:  # cancelled
                continue
            job.batches.remove(batch)
            if job.deadline_s and self._clock.monotonic() > job.deadline_s and not self._wanted(batch):
                self._drop(job, batch)
                job.settle()
                continue
            job.running += 1
            self.queued_blocks -= len(batch.entries)
            self.inflight_bytes += batch.size_bytes
            task = asyncio.get_running_loop().create_task(self._read(job, batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _read(self, job: Job, batch: Batch) -> None:
        address = self._dram.address
        loads = [
            Load(batch.space.digest, entry.hash, record, address(entry.slot))
            for entry, record in zip(batch.entries, batch.records, strict=True)
        ]
        loading = asyncio.ensure_future(self._below.load(loads))
        await asyncio.wait([loading], timeout=self._deadline_s)
        late = not loading.done()
        if late:
            self._give_up(job, batch)
        results: Sequence[bool] = ()
        try:
            results = await loading
        finally:
            self._finish(job, batch, results or [False] * len(loads), late=late)

    def _give_up(self, job: Job, batch: Batch) -> None:
        """The device does not answer: misses for all who wait. The slots stay held until it is done with them."""
        for entry in batch.entries:
            if entry.state == PROMOTING:
                self._room.forget(entry)
        self._counters["promote_late_blocks"] += len(batch.entries)
        self._settle(job, batch, 0)

    def _finish(self, job: Job, batch: Batch, results: Sequence[bool], *, late: bool) -> None:
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
            self._settle(job, batch, ready)

    def _settle(self, job: Job, batch: Batch, ready: int) -> None:
        """What became of a batch is known."""
        job.ready_blocks += ready
        job.failed_blocks += len(batch.entries) - ready
        job.running -= 1
        self._counters["promoted_blocks"] += ready
        self._counters["promote_failed_blocks"] += len(batch.entries) - ready
        self.inflight_bytes -= batch.size_bytes
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
                job.batches.remove(batch)
                self._drop(job, batch)
        job.settle()

    def _wanted(self, batch: Batch) -> bool:
        return any(entry.holds > 1 or self._catalog.awaited(entry) for entry in batch.entries)

    def _drop(self, job: Job, batch: Batch) -> None:
        self.queued_blocks -= len(batch.entries)
        job.failed_blocks += len(batch.entries)
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
