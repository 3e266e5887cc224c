"""Reading: lookup, contains, get, attach, release and touch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
from kvstored_proto import frames

from kvstored.catalog import DEAD, READY, Entry, Space, ready_length
from kvstored.endings import LeaseEnds
from kvstored.jobs import Found, Job
from kvstored.lease_notes import LeaseNotes
from kvstored.leases import Lease, Session
from kvstored.outcomes import HIT, MISS, PENDING, THROTTLED
from kvstored.parts import Below, Parts
from kvstored.promoter import DEMAND, PIECE_BLOCKS

IN_DRAM: Final = 1
ON_NVME: Final = 2
_PENDING: Final = 4
# A get waits so long for blocks that are verified after a restart, where it did not ask to wait longer.
REVIVAL_WAIT_S: Final = 0.5


class FoundRun(msgspec.Struct):
    """How far a chain is stored: see `LookupReply`."""

    prefix_blocks: int
    ready_blocks: int
    dram_blocks: int
    nvme_blocks: int
    pending_blocks: int
    next: int


class Held(msgspec.Struct):
    """What a get holds: leading blocks, one lease per space, and what ended the run."""

    blocks: int
    next: int
    leases: list[Lease]


class Reads:
    """The reading half of the store."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._room = parts.room
        self._below = parts.below
        self._limits = parts.limits
        self._counters = parts.counters
        self._revival = parts.revival
        self.notes = LeaseNotes(parts.dram)
        self.ends = LeaseEnds(parts, self.notes)
        # Set by the store: ends leases whose release a session has posted, some at a time; whether none is left.
        self.take_posted: Callable[[Session], bool] = lambda session: True

    # ---- lookup ----

    def lookup(self, spaces: Sequence[Space], hashes: Sequence[bytes]) -> FoundRun | Awaitable[FoundRun]:
        """The longest run from the start that all the spaces have. It promises nothing: `get` does."""
        self._parts.stats[spaces[0].tenant].lookups += 1
        resident = min(len(space.ready_run(hashes)) for space in spaces)
        if resident == len(hashes):
            return FoundRun(resident, resident, resident, 0, 0, HIT)
        if self._revival.active:
            for space in spaces:
                self._revival.hurry(self._entered(space, hashes))
        if self._below is None:
            return self._count(spaces, hashes, [{}] * len(spaces))
        return self._lookup_below(self._below, spaces, hashes)

    async def _lookup_below(self, below: Below, spaces: Sequence[Space], hashes: Sequence[bytes]) -> FoundRun:
        found = await below.promoter.find(spaces, hashes)
        try:
            return self._count(spaces, hashes, found)
        finally:
            below.promoter.unpin(found)

    def _count(self, spaces: Sequence[Space], hashes: Sequence[bytes], found: Sequence[Found]) -> FoundRun:
        run = FoundRun(0, 0, 0, 0, 0, HIT)
        for hash_ in hashes:
            tiers = [self._tier(space, hash_, have) for space, have in zip(spaces, found, strict=True)]
            if 0 in tiers:
                run.next = MISS
                break
            run.prefix_blocks += 1
            if _PENDING in tiers:
                run.pending_blocks += 1
            elif ON_NVME in tiers:
                run.nvme_blocks += 1
            else:
                run.dram_blocks += 1
            if not run.pending_blocks:
                run.ready_blocks += 1
        return run

    def _tier(self, space: Space, hash_: bytes, have: Found) -> int:
        entry = space.entries.get(hash_)
        if entry is None:
            return ON_NVME if hash_ in have else 0
        return IN_DRAM if entry.state == READY else _PENDING

    # ---- contains ----

    async def contains(self, space: Space, hashes: Sequence[bytes]) -> tuple[bytes, bytes]:
        """One outcome and one set of tiers (IN_DRAM, ON_NVME) per hash, packed."""
        known = space.entries.keys() & set(hashes)
        below = await self._on_nvme(space, hashes)
        moved = [hash_ for hash_ in known if hash_ not in space.entries and hash_ not in below]
        if moved:  # down, while the index was asked
            below |= await self._on_nvme(space, moved)
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
        records = await self._below.tier.find(space.tenant, space.digest, hashes, prefix=False)
        self._below.tier.unpin([record for record in records if record is not None])
        return {hash_ for hash_, record in zip(hashes, records, strict=True) if record is not None}

    # ---- get ----

    def get(
        self, session: Session, spaces: Sequence[Space], hashes: Sequence[bytes], wait_s: float
    ) -> Held | Awaitable[Held]:
        """Lease the longest run that all the spaces have; what is pending or below is waited for."""
        if self._too_many(session, len(spaces)):
            self._counters["throttled_gets"] += 1
            return Held(0, THROTTLED, [])
        runs = [space.ready_run(hashes) for space in spaces]
        resident = min(len(run) for run in runs)
        if resident == len(hashes):
            return self._lease(session, spaces, runs, len(hashes), resident, HIT)
        if self._below is None and not any(self._pending_at(s, hashes, resident) for s in spaces):
            return self._lease(session, spaces, runs, len(hashes), resident, MISS)
        return self._get_later(session, spaces, hashes, min(wait_s, self._limits.get_wait_max_s))

    def _too_many(self, session: Session, more: int) -> bool:
        leases, most = session.group.leases, self._limits.leases_per_session - more
        while len(leases) > most:
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
            length = min(ready_length(run) for run in runs)
            ended = self._ended(runs, length, len(hashes), no_room)
            return self._lease(session, spaces, runs, len(hashes), 0 if session.ended else length, ended)
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
            runs = [self._entered(space, hashes) for space in spaces]
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

    def _entered(self, space: Space, hashes: Sequence[bytes]) -> list[Entry]:
        run: list[Entry] = []
        for hash_ in hashes:
            entry = space.entries.get(hash_)
            if entry is None:
                break
            run.append(entry)
        return run

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
        asked: int,
        length: int,
        ended: int,
    ) -> Held:
        group, tenant = session.group, session.caller.tenant
        fits = self._fitting(tenant, spaces, runs, length)
        while fits < length and self._room.take_posted():
            fits = self._fitting(tenant, spaces, runs, length)
        if fits < length:
            length, ended = fits, THROTTLED
            self._counters["throttled_gets"] += 1
        stats = self._parts.stats[tenant]
        stats.blocks_asked += asked
        stats.blocks_hit += length
        if not length:
            return Held(0, ended, [])
        leases = []
        for space, run in zip(spaces, runs, strict=True):
            held = run[:length]
            size_bytes = space.slot_bytes_of(held)
            slots = [entry.slot for entry in held]
            runs_of_slots = [(slots[first], end - first) for first, end in frames.slot_runs(slots)]
            lease = Lease(self._parts.sessions.new_id(), space, held, slots, runs_of_slots, size_bytes)
            leases.append(lease)
        if session.place and not self.notes.leased(session, leases):
            self._counters["throttled_gets"] += 1
            return Held(0, THROTTLED, [])
        for lease in leases:
            self._catalog.lease(lease.space, lease.entries)
            group.leases[lease.lease_id] = lease
            group.leased_bytes += lease.size_bytes
        return Held(length, ended, leases)

    def _fitting(self, tenant: str, spaces: Sequence[Space], runs: Sequence[Sequence[Entry]], length: int) -> int:
        """How many leading blocks of the runs the tenant may lease now; what is leased already costs nothing."""
        budget_bytes = self._limits.held_bytes - self._catalog.leased_bytes[tenant]
        if sum(space.slot_bytes_of(run[:length]) for space, run in zip(spaces, runs, strict=True)) <= budget_bytes:
            return length
        for index in range(length):
            budget_bytes -= sum(run[index].pool.slot_bytes for run in runs if not run[index].leases)
            if budget_bytes < 0:
                return index
        return length

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
        entries = [entry for hash_ in hashes if (entry := space.entries.get(hash_)) and entry.state == READY]
        self._catalog.touch(entries)
        return len(entries)
