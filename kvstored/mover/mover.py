"""From DRAM down to NVMe: demotion at the watermarks, for room that somebody asks for, and flushes.

One step at a time: `Demotion.plan` picks the coldest blocks (state, no await), the lower tier writes
them in one batch, `_finish` frees their slots. Blocks that are below already are just dropped, and so
are those that the gate refuses.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Final

from kvstored.catalog.catalog import DEAD, READY, Catalog, Entry, Space
from kvstored.catalog.room import Room
from kvstored.clock import Clock
from kvstored.errors import DeviceError
from kvstored.mover.claims import Claims
from kvstored.mover.demotion import Demotion, Step
from kvstored.mover.flush_order import STEP_BLOCKS_MAX, hottest_first, needs_writing
from kvstored.mover.gate import OVER_BUDGET, Gate
from kvstored.policy.forecast import Forecast
from kvstored.policy.watermarks import Watermarks
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
        gate: Gate,
        *,
        forecast: Forecast | None = None,
        deadline_s: float = 0.0,
    ) -> None:
        self._catalog = catalog
        self._room = room
        self._dram = dram
        self._below = below
        self._clock = clock
        self._counters = counters
        self.gate = gate
        freed = partial(self._signal, freed=True)
        self._demotion = Demotion(catalog, room, dram, clock, counters, watermarks, forecast, freed)
        self._wake = asyncio.Event()
        self._freed = asyncio.Event()
        self._looked = asyncio.Event()
        self._changed = False
        self._blocked_until_s: dict[str, float] = {}  # per tenant: another's limit is nobody else's delay
        self.moving_blocks = 0
        self._moving: Counter[int] = Counter()  # how often each entry, by identity: a flush may meet a demotion
        self._moved = asyncio.Event()
        # Set by the store: told what was deleted below.
        self.on_deleted: Callable[[Space, Sequence[bytes]], None] = lambda space, hashes: None
        self._deadline_s = deadline_s or None  # for one step
        self._steps: set[asyncio.Future[set[int]]] = set()  # under way, with what they have to delete again
        self._claims = Claims()  # of all of them
        self._late: set[asyncio.Future[set[int]]] = set()  # beyond the deadline
        gate.barred = below.barred
        room.must_demote, room.refusal, room.refusals = self.takes_blocks, gate.refusal, gate.refusals

    def takes_blocks(self, tenant: str = "") -> bool:
        """Whether the lower tier stores blocks at present, of a tenant or at all; if not, eviction drops them."""
        able = self._below.health is Health.OK and len(self._late) < LATE_STEPS_MAX
        return able and self._clock.monotonic() >= self._blocked_until_s.get(tenant, 0.0)

    # ---- asked by the store ----

    def kick(self) -> None:
        """Something was given back: look at the watermarks again, and let whoever waits for room look too."""
        self._changed = True
        self._wake.set()

    def demand(self, tenant: str, slot_bytes: int, count: int) -> None:
        """Ask for room for so many slots; `room_freed` tells when some came."""
        key = (tenant, slot_bytes)
        demands = self._demotion.demands
        demands[key] = max(count, demands.get(key, 0))
        self._wake.set()

    async def room_freed(self, timeout_s: float) -> None:
        """Wait until something was freed or given back, or the time is up."""
        await _wait(self._freed, timeout_s)

    async def demand_seen(self, timeout_s: float) -> None:
        """The same, but also where the mover finds that it can free nothing at present."""
        await _wait(self._looked, timeout_s)

    async def past(self, entries: Sequence[Entry]) -> bool:
        """Wait until none of these is on its way down: what was forgotten meanwhile is not below either then.

        A step that its device keeps beyond the deadline is not waited for; what of it was forgotten goes from
        below when it ends, and may be found until then. False: there is some.
        """
        while any(id(entry) in self._moving for entry in entries):
            await self._moved.wait()
        return not (self._late and any(map(self._claims.has, entries)))

    async def steps_ended(self) -> bool:
        """Wait for every step under way, no longer than the deadline; whether all have ended.

        What was forgotten before is not below then, nor does a later step bring it there.
        """
        steps = set(self._steps)
        return not steps or not (await asyncio.wait(steps, timeout=self._deadline_s))[1]

    @property
    def spare_bytes(self) -> int:
        """What of DRAM may be filled ahead of time."""
        return self._demotion.spare_bytes

    @property
    def idle(self) -> bool:
        """Nothing moves and nothing is to move."""
        return not self.moving_blocks and not self._wake.is_set() and not self._demotion.demands

    # ---- the loop ----

    async def run(self) -> None:
        """Demote until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.takes_blocks():
                step = self._demotion.plan()
                if step.entries:
                    await self._demote(step.entries, step)
                elif step.more:
                    self._wake.set()
                if not step.entries:
                    break
            self._demotion.demands.clear()
            await asyncio.sleep(0)  # a step that only dropped clean blocks has not waited for anything
            changed, self._changed = self._changed, False
            self._signal(freed=changed)

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
        # So are those of blocks that were forgotten; a step beyond its deadline is not waited for.
        while any(id(rival) in self._moving for entry in entries for rival in self._claims.rivals(entry)):
            await self._moved.wait()
        if len(self._late) >= LATE_STEPS_MAX:  # the device does not answer: it need not hold these too
            self._room.unhold(entries)
            return set()
        return await self._demote(entries, always=True)

    async def _demote(self, entries: list[Entry], why: Step | None = None, *, always: bool = False) -> set[int]:
        """Write held blocks below and end their hold; for a step, coldest first, and their slots become free.

        Admission has its say where there is one, the budget of writes where it is not `always`.

        At the deadline the answer is that nothing was stored. The slots stay held until the device is done with
        them, and what was stored by then counts.
        """
        self._moving.update(map(id, entries))
        self.moving_blocks += len(entries)
        step = asyncio.ensure_future(self._write(entries, why, always=always))
        self._steps.add(step)
        self._claims.add(entries)
        step.add_done_callback(self._steps.discard)
        step.add_done_callback(lambda _: self._claims.drop(entries))
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

    async def _write(self, entries: list[Entry], why: Step | None, *, always: bool) -> set[int]:
        began_s = self._clock.monotonic()
        admitted = self.gate.allowed(entries) if always else self.gate.admitted(entries, rule=why is not None)
        done: set[int] = set()
        try:
            for tenant, group in groupby(admitted, key=lambda entry: entry.pool.space.tenant):
                # Deleted while it waited for its turn, a block has been answered as gone from below.
                alive = [entry for entry in group if entry.state != DEAD]
                if not alive:
                    continue
                chunk = [entry for entry in alive if not self._claims.rivals(entry)]
                results = await self._below.store(tenant, [self._as_store(entry) for entry in chunk]) if chunk else []
                done.update(id(entry) for entry, ok in zip(chunk, results, strict=True) if ok)
                if not any(results):
                    self._blocked_until_s[tenant] = self._clock.monotonic() + BACK_OFF_S
        finally:
            deleted = [entry for entry in entries if entry.state == DEAD and id(entry) in done]
            wrote_bytes = sum(entry.pool.slot_bytes for entry in entries if id(entry) in done)
            self._demotion.took(wrote_bytes, self._clock.monotonic() - began_s)
            self._finish(entries, admitted, done, why)
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
            expiry=None if entry.expiry is None else entry.expiry.at(entry.expires_s),
        )

    def _finish(self, entries: list[Entry], admitted: list[Entry], done: set[int], why: Step | None) -> None:
        for entry in entries:
            entry.below = entry.below or id(entry) in done
        if why is not None:  # while held by nobody else: what is gone needs no place in its order
            # Not what should be below and could not be written; of what the gate refused, only where room is short.
            stays = set(map(id, entries if why.spares else admitted))
            leaving = [e for e in entries if e.state == READY and e.holds == 1 and (e.below or id(e) not in stays)]
            leaving = self._room.sparing(leaving, why.asker)  # it may have less by now
            self._demotion.count(leaving, why.cause)
            self._room.evict(leaving, OVER_BUDGET)  # where the gate would take one by now
        # The end of a hold keeps the order that they had: who evicts gives the coldest first.
        self._room.unhold(entries[::-1] if why is not None else entries)
        self._counters["demoted_blocks"] += len(done)
        if not done:
            self._counters["demote_failed_blocks"] += sum(entry.state != DEAD for entry in admitted)
        self._signal(freed=True)

    async def _delete(self, entries: Iterable[Entry]) -> None:
        """Blocks that were deleted while they were being written must not come back from below."""
        by_space: dict[Space, list[bytes]] = {}
        for entry in entries:
            by_space.setdefault(entry.pool.space, []).append(entry.hash)
        for space, hashes in by_space.items():
            try:
                await self._below.delete(space.tenant, space.digest, hashes)
            except DeviceError:
                self._counters["late_delete_failures"] += len(hashes)  # the tier does it when its device is back
            self.on_deleted(space, hashes)
            # Put anew meanwhile they stay, unless they came from the copies that are gone now.
            back = [current for hash_ in hashes if (current := space.entries.get(hash_)) is not None and current.tied]
            for current in back:
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
            able = self._storable(entries) if in_time else []
            if able:
                self._catalog.hold(able)
                done = await self._demote(able)
                written += [entry for entry in able if id(entry) in done]
            left += sum(map(needs_writing, entries))
            await asyncio.sleep(0)
        # The touch that ended each step's hold put the earlier ones behind the later.
        for start in reversed(range(0, len(written), STEP_BLOCKS_MAX)):
            self._catalog.touch(written[start : start + STEP_BLOCKS_MAX], used=False)
            await asyncio.sleep(0)
        return len(written), left

    def _storable(self, entries: list[Entry]) -> list[Entry]:
        able = {tenant for tenant in {entry.pool.space.tenant for entry in entries} if self.takes_blocks(tenant)}
        return [entry for entry in entries if entry.pool.space.tenant in able]


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        pass
