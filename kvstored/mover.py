"""From DRAM down to NVMe: demotion at the watermarks, for room that somebody asks for, and flushes.

One step at a time: `_plan` picks the coldest blocks (state, no await), the lower tier writes
them in one batch, `_finish` frees their slots. Blocks that are below already are just dropped.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, islice
from typing import Final, cast

from kvstored.catalog import DEAD, READY, Catalog, Entry, Space
from kvstored.clock import Clock
from kvstored.errors import DeviceError
from kvstored.flush_order import STEP_BLOCKS_MAX, STEP_BYTES_MAX, hottest_first, needs_writing
from kvstored.policy.admission import Admission
from kvstored.policy.eviction import EvictionOrder
from kvstored.policy.watermarks import Watermarks
from kvstored.room import Room
from kvstored.tiers.base import Health, LowerTier, Store
from kvstored.tiers.dram import DramTier

BACK_OFF_S: Final = 1.0  # after a step of which nothing could be stored
LATE_STEPS_MAX: Final = 4  # that a device keeps beyond the deadline, before nothing more goes below


class Mover:
    """Keeps room in DRAM by writing the coldest blocks below."""

    def __init__(
        self,
        catalog: Catalog,
        room: Room,
        dram: DramTier,
        below: LowerTier,
        clock: Clock,
        counters: Counter[str],
        watermarks: Watermarks,
        admission: Admission,
        *,
        deadline_s: float = 0.0,
    ) -> None:
        self._catalog = catalog
        self._room = room
        self._dram = dram
        self._below = below
        self._clock = clock
        self._counters = counters
        self._watermarks = watermarks
        self._admission = admission
        self._wake = asyncio.Event()
        self._freed = asyncio.Event()
        self._looked = asyncio.Event()
        self._demands: dict[tuple[str, int], int] = {}
        self._changed = False
        self._active = False  # between the high and the low watermark
        self._blocked_until_s = 0.0
        self.moving_blocks = 0
        self._moving: Counter[int] = Counter()  # how often each entry, by identity: a flush may meet a demotion
        self._moved = asyncio.Event()
        # Set by the store: told what was deleted below.
        self.on_deleted: Callable[[Space, Sequence[bytes]], None] = lambda space, hashes: None
        self._deadline_s = deadline_s or None  # for one step
        self._late: set[asyncio.Future[set[int]]] = set()  # steps that go on beyond it
        room.must_demote = self.takes_blocks

    def takes_blocks(self) -> bool:
        """Whether the lower tier stores blocks at present; if not, eviction drops them."""
        able = self._below.health is Health.OK and len(self._late) < LATE_STEPS_MAX
        return able and self._clock.monotonic() >= self._blocked_until_s

    # ---- asked by the store ----

    def kick(self) -> None:
        """Something was given back: look at the watermarks again, and let whoever waits for room look too."""
        self._changed = True
        self._wake.set()

    def demand(self, tenant: str, slot_bytes: int, count: int) -> None:
        """Ask for room for so many slots; `room_freed` tells when some came."""
        key = (tenant, slot_bytes)
        self._demands[key] = max(count, self._demands.get(key, 0))
        self._wake.set()

    async def room_freed(self, timeout_s: float) -> None:
        """Wait until something was freed or given back, or the time is up."""
        await _wait(self._freed, timeout_s)

    async def demand_seen(self, timeout_s: float) -> None:
        """The same, but also where the mover finds that it can free nothing at present."""
        await _wait(self._looked, timeout_s)

    async def past(self, entries: Sequence[Entry]) -> None:
        """Wait until none of these is on its way down: what was forgotten meanwhile is not below either then.

        A step that its device keeps beyond the deadline is not waited for; what of it was forgotten goes from
        below when it ends.
        """
        while any(id(entry) in self._moving for entry in entries):
            await self._moved.wait()

    @property
    def idle(self) -> bool:
        """Nothing moves and nothing is to move."""
        return not self.moving_blocks and not self._wake.is_set() and not self._demands

    # ---- the loop ----

    async def run(self) -> None:
        """Demote until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.takes_blocks() and (entries := self._plan()):
                await self._demote(entries, evict=True)
            self._demands.clear()
            await asyncio.sleep(0)  # a step that only dropped clean blocks has not waited for anything
            changed, self._changed = self._changed, False
            self._signal(freed=changed)

    def _plan(self) -> list[Entry]:
        """The next blocks to write, coldest first and held; drops clean ones on the way."""
        while self._demands:
            entries = self._for_demand(*self._demands.popitem())
            if entries:
                return entries
        usage = self._dram.usage()
        occupied = usage.used_bytes + usage.dead_bytes
        wanted = self._watermarks.to_move_bytes(occupied, usage.capacity_bytes, self._active)
        self._active = wanted > 0
        if not wanted or not self._catalog.orders:
            return []
        largest = max(self._catalog.orders.items(), key=lambda item: len(item[1]) * item[0][1])
        dirty, _ = self._coldest(largest[1], wanted)
        return dirty

    def _coldest(self, order: EvictionOrder, wanted_bytes: int) -> tuple[list[Entry], int]:
        """Up to `wanted_bytes` from the cold end: dirty blocks, held; clean ones are dropped at once and counted."""
        wanted_bytes = min(wanted_bytes, STEP_BYTES_MAX)
        dirty: list[Entry] = []
        clean: list[Entry] = []
        for node in islice(order, STEP_BLOCKS_MAX):
            if wanted_bytes <= 0:
                break
            entry = cast(Entry, node)
            (clean if entry.below else dirty).append(entry)
            wanted_bytes -= entry.pool.slot_bytes
        self._room.evict(clean, "demoted earlier")
        if clean:
            self._signal(freed=True)
        self._catalog.hold(dirty, leaving=True)
        if clean and not dirty and self._active:
            self._wake.set()
        return dirty, len(clean)

    def _for_demand(self, pool: tuple[str, int], count: int) -> list[Entry]:
        """What has to be below before room for so many slots can be taken; the same order as `Room.take`'s."""
        tenant, size = pool
        segment = self._room.stale_segment(tenant, size)
        if segment is None:
            dirty, _ = self._coldest(self._catalog.order(tenant, size), count * size)
            return dirty
        entries = [entry for entry in self._room.occupants(segment) if not entry.below]
        entries = entries[: max(1, min(STEP_BLOCKS_MAX, STEP_BYTES_MAX // segment.slot_bytes))]
        self._catalog.hold(entries)
        return entries

    def _signal(self, *, freed: bool) -> None:
        self._looked.set()
        self._looked = asyncio.Event()
        if freed:
            self._freed.set()
            self._freed = asyncio.Event()

    # ---- writing ----

    async def write(self, entries: list[Entry]) -> set[int]:
        """Write held blocks below whatever admission says, and end their hold; they come parents first.

        Returns the identities of those that are below, durably; one that is there already is not written again.
        """
        await self.past(entries)  # who is writing one of them shares the result
        if len(self._late) >= LATE_STEPS_MAX:  # the device does not answer: it need not hold these too
            self._room.unhold(entries)
            return set()
        return await self._demote(entries, evict=False, admit=False)

    async def _demote(self, entries: list[Entry], *, evict: bool, admit: bool = True) -> set[int]:
        """Write held blocks below and end their hold; with `evict`, coldest first, and their slots become free.

        At the deadline the answer is that nothing was stored. The slots stay held until the device is done with
        them, and what was stored by then counts.
        """
        self._moving.update(map(id, entries))
        self.moving_blocks += len(entries)
        step = asyncio.ensure_future(self._write(entries, evict=evict, admit=admit))
        try:
            await asyncio.wait([step], timeout=self._deadline_s)
        except asyncio.CancelledError:
            await asyncio.wait([step], timeout=self._deadline_s)  # until no thread is at its blocks any more
            raise
        finally:
            self._moving.subtract(map(id, entries))
            self._moving += Counter()  # drops what is at zero
            self._moved.set()
            self._moved = asyncio.Event()
            self.moving_blocks -= len(entries)
        if step.done():
            return step.result()
        self._counters["demote_late_blocks"] += len(entries)
        self._late.add(step)
        step.add_done_callback(self._late_ended)
        return set()

    def _late_ended(self, step: asyncio.Future[set[int]]) -> None:
        self._late.discard(step)
        self._wake.set()
        if not step.cancelled() and (error := step.exception()) is not None:
            raise error

    async def _write(self, entries: list[Entry], *, evict: bool, admit: bool) -> set[int]:
        now = self._clock.monotonic()
        done: set[int] = set()
        try:
            for tenant, group in groupby(entries, key=lambda entry: entry.pool.space.tenant):
                chunk = [entry for entry in group if not admit or self._admission.admit(entry.size_bytes, now)]
                results = await self._below.store(tenant, [self._as_store(entry) for entry in chunk])
                done.update(id(entry) for entry, ok in zip(chunk, results, strict=True) if ok)
        finally:
            deleted = [entry for entry in entries if entry.state == DEAD and id(entry) in done]
            self._finish(entries, done, evict=evict)
        await self._delete(deleted)
        return done

    def _as_store(self, entry: Entry) -> Store:
        return Store(
            digest=entry.pool.space.digest,
            hash=entry.hash,
            parent=entry.parent,
            address=self._dram.address(entry.slot),
            size_bytes=entry.size_bytes,
            content_hash=self._dram.records.content_hash(entry.slot),
        )

    def _finish(self, entries: list[Entry], done: set[int], *, evict: bool) -> None:
        for entry in entries:
            entry.below = entry.below or id(entry) in done
        if evict:  # while held by nobody else: what is gone needs no place in its order
            self._room.evict([e for e in entries if e.state == READY and e.holds == 1 and e.below], "demoted")
        # The end of a hold keeps the order that they had: who evicts gives the coldest first.
        self._room.unhold(entries[::-1] if evict else entries)
        self._counters["demoted_blocks"] += len(done)
        if entries and not done:
            self._counters["demote_failed_blocks"] += len(entries)
            self._blocked_until_s = self._clock.monotonic() + BACK_OFF_S
        self._signal(freed=True)

    async def _delete(self, entries: Iterable[Entry]) -> None:
        """Blocks that were deleted while they were being written must not come back from below."""
        for entry in entries:
            space = entry.pool.space
            try:
                await self._below.delete(space.tenant, space.digest, [entry.hash])
            except DeviceError:
                self._counters["late_delete_failures"] += 1  # the tier does it when its device is back
            self.on_deleted(space, [entry.hash])
            # Put anew meanwhile it stays, unless it came from the copy that is gone now.
            current = space.entries.get(entry.hash)
            if current is not None and current.below:
                self._room.forget(current)

    # ---- flush ----

    async def flush(
        self, timeout_s: float, in_use: Iterable[Entry] = (), ended: asyncio.Event | None = None
    ) -> tuple[int, int]:
        """Write every block that is only in DRAM, keeping it there, the most valuable first (`flush_order`).

        Returns blocks written, and left when the time was up or `ended` was set. `in_use` go before all others.
        """
        end_s = self._clock.monotonic() + timeout_s
        written: list[Entry] = []
        left = 0
        for step in hottest_first(self._catalog, in_use):
            await self.past(step)  # who is writing one of them has done it then
            entries = [entry for entry in step if needs_writing(entry)]
            in_time = self._clock.monotonic() <= end_s and not (ended is not None and ended.is_set())
            if entries and in_time and self.takes_blocks():
                self._catalog.hold(entries)
                done = await self._demote(entries, evict=False)
                written += [entry for entry in entries if id(entry) in done]
            left += sum(map(needs_writing, entries))
            await asyncio.sleep(0)
        # The touch that ended each step's hold put the earlier ones behind the later.
        for start in reversed(range(0, len(written), STEP_BLOCKS_MAX)):
            self._catalog.touch(written[start : start + STEP_BLOCKS_MAX], used=False)
            await asyncio.sleep(0)
        return len(written), left


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        pass
