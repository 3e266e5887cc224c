"""Reading: contains, get, attach, release and touch; lookup is in `lookups`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from kvstored.catalog.catalog import DEAD, READY, Entry, Space, ready_length
from kvstored.catalog.leases import Group, Lease, Session
from kvstored.explain.misses import Misses
from kvstored.mover.jobs import DEMAND, Job
from kvstored.mover.promoter import PIECE_BLOCKS
from kvstored.store.answers import IN_DRAM, ON_NVME, Held, places_of
from kvstored.store.endings import LeaseEnds
from kvstored.store.lease_notes import LeaseNotes
from kvstored.store.lookups import Lookups
from kvstored.store.outcomes import HIT, MISS, PENDING, THROTTLED
from kvstored.store.parts import Parts
from kvstored.store.prefetches import Prefetches
from kvstored.store.tenant_limits import LEASED_BLOCKS_MAX, TenantLimits

Deferred = Callable[[Callable[[], None]], None]
# A get waits so long for blocks that are verified after a restart, where it did not ask to wait longer.
REVIVAL_WAIT_S: Final = 0.5


class Reads:
    """The reading half of the store."""

    def __init__(self, parts: Parts, limits: TenantLimits, prefetches: Prefetches) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._room = parts.room
        self._below = parts.below
        self._limits = parts.limits
        self._of_tenant = limits
        self._allotments = parts.room.allotments
        self._counters = parts.counters
        self._revival = parts.revival
        self._asked = parts.note_asked
        self._misses = Misses(parts)
        self.lookups = Lookups(parts, self._misses, prefetches)
        self.lookup = self.lookups.lookup
        self.notes = LeaseNotes(parts.dram)
        self.ends = LeaseEnds(parts, self.notes)
        # Set by the store, where it wants to know: a get had so many leading blocks of what it asked for.
        self.on_got: Callable[[Sequence[Space], Sequence[bytes], int], None] | None = None
        # Set by the store: ends leases whose release a session has posted, some at a time; whether none is left.
        self.take_posted: Callable[[Session], bool] = lambda session: True

    # ---- contains ----

    async def contains(self, space: Space, hashes: Sequence[bytes]) -> tuple[bytes, bytes]:
        """One outcome and one set of tiers (IN_DRAM, ON_NVME) per hash, packed."""
        known = [hash_ for hash_ in dict.fromkeys(hashes) if hash_ in space.entries]
        below = await self._on_nvme(space, hashes)
        moved = [hash_ for hash_ in known if hash_ not in space.entries and hash_ not in below]
        if moved:  # down, while the index was asked
            below |= await self._on_nvme(space, moved)
        space.drop_ended(hashes)
        outcomes, tiers = bytearray(), bytearray()
        for hash_ in hashes:
            entry = space.entries.get(hash_)
            ready = entry is not None and entry.state == READY
            tiers.append((IN_DRAM if ready else 0) | (ON_NVME if hash_ in below else 0))
            outcomes.append(HIT if tiers[-1] else PENDING if entry is not None else MISS)
        return bytes(outcomes), bytes(tiers)

    async def _on_nvme(self, space: Space, hashes: Sequence[bytes]) -> set[bytes]:
        if self._below is None:
            return set()
        return set(await self._below.records(space, hashes))

    # ---- get ----

    def get(
        self,
        session: Session,
        spaces: Sequence[Space],
        hashes: Sequence[bytes],
        wait_s: float,
        after_answer: Deferred | None = None,
    ) -> Held | Awaitable[Held]:
        """Lease the longest run that all the spaces have; what is pending or below is waited for.

        `after_answer`: of a caller that answers at once, see `Session`: what was found is held then.
        """
        if self._too_many(session, len(spaces)):
            self._throttled(session.caller.tenant)
            return Held(0, THROTTLED, [])
        runs = [space.ready_run(hashes) for space in spaces]
        resident = min(len(run) for run in runs)
        if resident == len(hashes):
            return self._lease(session, spaces, runs, hashes, resident, HIT, after_answer)
        if self._below is None and not any(self._pending_at(s, hashes, resident) for s in spaces):
            return self._lease(session, spaces, runs, hashes, resident, MISS, after_answer)
        return self._get_later(session, spaces, hashes, min(wait_s, self._limits.get_wait_max_s))

    def _too_many(self, session: Session, more: int) -> bool:
        leases, most = session.group.leases, self._limits.leases_per_session - more
        of_tenant, tenant = self._of_tenant, session.caller.tenant
        while len(leases) > most or (of_tenant.max_leases and of_tenant.too_many_leases(tenant, more)):
            if not self._room.take_posted():
                return True
        return False

    def _pending_at(self, space: Space, hashes: Sequence[bytes], index: int) -> bool:
        entry = space.entries.get(hashes[index])
        return entry is not None and entry.state != READY

    async def _get_later(
        self, session: Session, spaces: Sequence[Space], hashes: Sequence[bytes], wait_s: float
    ) -> Held:
        end_s = self._parts.clock.monotonic() + wait_s
        # What comes up may evict, by an order that knows of the caller's own releases.
        while not self.take_posted(session):  # noqa: ASYNC110 - a turn for others, not a wait for anything
            await asyncio.sleep(0)
        runs: list[list[Entry]] = [[] for _ in spaces]
        digests = [space.digest for space in spaces]
        no_room = False
        try:
            for start in range(0, len(hashes), PIECE_BLOCKS):
                piece = hashes[start : start + PIECE_BLOCKS]
                # Only the first piece may wait for room: nothing is held then.
                more, no_room = await self._bring(spaces, piece, end_s if not start else 0.0)
                for run, part in zip(runs, more, strict=True):
                    self._catalog.hold(part)
                    run += part
                if no_room or len(more[0]) < len(piece):
                    break
            held = [entry for run in runs for entry in run]
            if self._revival.active:
                self._revival.hurry(held)
                end_s = max(end_s, self._parts.clock.monotonic() + REVIVAL_WAIT_S)
            await self._settled(held, end_s)
            for space in spaces:
                space.drop_ended(hashes)
            length = min(ready_length(run) for run in runs)
            if digests != [space.digest for space in spaces]:
                length = 0  # an epoch has passed meanwhile
            ended = self._ended(runs, length, len(hashes), no_room)
            return self._lease(session, spaces, runs, hashes, 0 if session.ended else length, ended)
        finally:
            for run in runs:
                self._room.unhold(run)

    def _ended(self, runs: Sequence[list[Entry]], length: int, asked: int, no_room: bool) -> int:
        if length < len(runs[0]):
            waits = any(len(run) > length and run[length].state not in (READY, DEAD) for run in runs)
            return PENDING if waits else MISS
        return HIT if length == asked else THROTTLED if no_room else MISS

    async def _bring(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], end_s: float
    ) -> tuple[list[list[Entry]], bool]:
        """Entries for the longest run that is in DRAM or can come up, whatever their state.

        Where room is short the mover is asked for some; while waiting for it nothing is held.
        """
        if self._below is None:
            runs = [space.entered_run(hashes) for space in spaces]
            length = min(len(run) for run in runs)
            return [run[:length] for run in runs], False
        reached = -1
        while True:
            job = Job(DEMAND, 0.0)
            found = await self._below.promoter.find(spaces, hashes)
            plan = self._below.promoter.plan(spaces, hashes, found, job)
            left_s = end_s - self._parts.clock.monotonic()
            if not job.short or len(plan.runs[0]) <= reached or left_s <= 0:
                return plan.runs, plan.cut
            reached = len(plan.runs[0])
            self._below.mover.demand(*job.short)
            await self._below.mover.demand_seen(left_s)

    async def _settled(self, entries: Sequence[Entry], end_s: float) -> None:
        """Wait until every block is readable or gone, or the time is up.

        One after the other: they come in batches, so that few are waited for, and a thousand gets that
        wait for the same thousand blocks do not make a million callbacks.
        """
        clock = self._parts.clock
        for entry in entries:
            left_s = end_s - clock.monotonic()
            if left_s <= 0:
                return
            if entry.state not in (READY, DEAD):
                await asyncio.wait([self._catalog.change_of(entry)], timeout=left_s)

    def _lease(
        self,
        session: Session,
        spaces: Sequence[Space],
        runs: Sequence[list[Entry]],
        hashes: Sequence[bytes],
        length: int,
        ended: int,
        after_answer: Deferred | None = None,
    ) -> Held:
        group, tenant = session.group, session.caller.tenant
        fits = self._fitting(tenant, spaces, runs, length)
        while fits < length and self._room.take_posted():
            fits = self._fitting(tenant, spaces, runs, length)
        if fits < length:
            length, ended = fits, THROTTLED
            self._throttled(tenant)
        stats = self._parts.stats[tenant]
        stats.blocks_asked += len(hashes)
        stats.blocks_hit += length
        self._misses.got(spaces, hashes, length, missed=ended == MISS)
        if not length:
            return Held(0, ended, [])
        leases = []
        for space, run in zip(spaces, runs, strict=True):
            held = run if length == len(run) else run[:length]
            lease_id, places = self._parts.sessions.new_id(tenant), places_of(space, held)
            leases.append(Lease(lease_id, space, held, places.slots, places.runs, space.slot_bytes_of(held)))
        if session.place and not self.notes.leased(session, leases):
            self._throttled(tenant)
            return Held(0, THROTTLED, [])
        for lease in leases:
            group.leases[lease.lease_id] = lease
            group.leased_bytes += lease.size_bytes
        holding = partial(self._hold, group, spaces, hashes, leases)
        if after_answer is not None:
            after_answer(holding)
        else:
            holding()
        return Held(length, ended, leases)

    def _hold(self, group: Group, spaces: Sequence[Space], hashes: Sequence[bytes], leases: Sequence[Lease]) -> None:
        """Hold what leases name, in the turn of the loop in which they were made."""
        try:
            for lease in leases:
                self._catalog.lease(lease.space, lease.entries)
        except BaseException:  # no memory: nobody knows which blocks are held, and those stay so
            for lease in leases:
                del group.leases[lease.lease_id]
                group.leased_bytes -= lease.size_bytes
            raise
        for lease in leases:
            if lease.space.prefetched:
                self._room.prefetched.used(lease.space, lease.entries)
            self._catalog.pin(group.tenant, lease.runs, len(lease.entries))
            if lease.space.timers is not None:
                self._catalog.on_use(lease.entries)
            if self._asked is not None:
                self._asked(lease.space, [entry.hash for entry in lease.entries])
        if self.on_got is not None:
            self.on_got(spaces, hashes, len(leases[0].entries))

    def _fitting(self, tenant: str, spaces: Sequence[Space], runs: Sequence[Sequence[Entry]], length: int) -> int:
        """How many leading blocks of the runs the tenant may lease now; what is leased already costs nothing."""
        budget_bytes = self._limits.held_bytes - self._catalog.leased_bytes[tenant]
        if self._catalog.named_blocks[tenant] + length * len(runs) > LEASED_BLOCKS_MAX // 4:
            length = self._of_tenant.leasable_blocks(tenant, length * len(runs)) // len(runs)
        if self._allotments.guarded:
            slots = [entry.slot for row in zip(*(run[:length] for run in runs), strict=True) for entry in row]
            length = self._of_tenant.fitting(spaces[0], slots) // len(runs)
        if sum(space.slot_bytes_of(run[:length]) for space, run in zip(spaces, runs, strict=True)) <= budget_bytes:
            return length
        for index in range(length):
            budget_bytes -= sum(run[index].pool.slot_bytes for run in runs if not run[index].leases)
            if budget_bytes < 0:
                return index
        return length

    def _throttled(self, tenant: str) -> None:
        self._counters["throttled_gets"] += 1
        self._parts.stats[tenant].gets_throttled += 1

    def attach(self, session: Session, lease_id: int) -> Held:
        """A lease that another session of the group took. Raises NotFound."""
        lease = session.lease(lease_id)
        return Held(len(lease.entries), HIT, [lease])

    def release(self, session: Session, lease_ids: Sequence[int]) -> int:
        """End leases of the session's group; unknown ids are passed over. Returns how many ended."""
        leases = [lease for i in lease_ids if (lease := session.group.leases.pop(i, None)) is not None]
        for lease in leases:
            session.group.leased_bytes -= lease.size_bytes
        self.ends.add(session.group, leases)
        return len(leases)

    # ---- touch ----

    def touch(self, space: Space, hashes: Sequence[bytes]) -> int:
        """Note a use of blocks in DRAM; returns how many there were."""
        space.drop_ended(hashes)
        entries = [entry for hash_ in hashes if (entry := space.entries.get(hash_)) and entry.state == READY]
        self._catalog.touch(entries)
        if space.timers is not None:
            self._catalog.on_use(entries)
        return len(entries)
