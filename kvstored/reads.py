"""Reading: lookup, contains, get, attach, release, touch and prefetch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final

import msgspec

from kvstored.catalog import DEAD, READY, Entry, Space
from kvstored.errors import LimitExceeded, NotFound
from kvstored.leases import Lease, Session
from kvstored.outcomes import HIT, MISS, PENDING, THROTTLED
from kvstored.parts import Below, Parts
from kvstored.promoter import DEMAND, Found, Job

PREFETCHES_PER_SESSION_MAX: Final = 1024
IN_DRAM: Final = 1
ON_NVME: Final = 2
_PENDING: Final = 4


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


class Prefetched(msgspec.Struct):
    """A prefetch as it was started."""

    prefetch_id: int
    outcome: int
    resident_blocks: int
    queued_blocks: int


class Reads:
    """The reading half of the store."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._room = parts.room
        self._below = parts.below
        self._limits = parts.limits
        self._counters = parts.counters
        self._jobs: dict[int, tuple[Session, Job]] = {}

    # ---- lookup ----

    def lookup(self, spaces: Sequence[Space], hashes: Sequence[bytes]) -> FoundRun | Awaitable[FoundRun]:
        """The longest run from the start that all the spaces have. It promises nothing: `get` does."""
        self._parts.stats[spaces[0].tenant].lookups += 1
        resident = min(len(self._resident(space, hashes)) for space in spaces)
        if resident == len(hashes):
            return FoundRun(resident, resident, resident, 0, 0, HIT)
        if self._below is None:
            return self._count(spaces, hashes, [{}] * len(spaces))
        return self._lookup_below(self._below, spaces, hashes)

    async def _lookup_below(self, below: Below, spaces: Sequence[Space], hashes: Sequence[bytes]) -> FoundRun:
        found = await below.promoter.find(spaces, hashes)
        try:
            return self._count(spaces, hashes, found)
        finally:
            below.promoter.unpin(found)

    def _resident(self, space: Space, hashes: Sequence[bytes]) -> list[Entry]:
        run: list[Entry] = []
        get = space.entries.get
        for hash_ in hashes:
            entry = get(hash_)
            if entry is None or entry.state != READY:
                break
            run.append(entry)
        return run

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
        below = await self._on_nvme(space, hashes)
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
        group = session.group
        if len(group.leases) + len(spaces) > self._limits.leases_per_session:
            self._counters["throttled_gets"] += 1
            return Held(0, THROTTLED, [])
        runs = [self._resident(space, hashes) for space in spaces]
        resident = min(len(run) for run in runs)
        if resident == len(hashes):
            return self._lease(session, spaces, runs, len(hashes), resident, HIT)
        if self._below is None and not any(self._pending_at(s, hashes, resident) for s in spaces):
            return self._lease(session, spaces, runs, len(hashes), resident, MISS)
        return self._get_later(session, spaces, hashes, min(wait_s, self._limits.get_wait_max_s))

    def _pending_at(self, space: Space, hashes: Sequence[bytes], index: int) -> bool:
        entry = space.entries.get(hashes[index])
        return entry is not None and entry.state != READY

    async def _get_later(
        self, session: Session, spaces: Sequence[Space], hashes: Sequence[bytes], wait_s: float
    ) -> Held:
        runs, no_room = await self._bring(spaces, hashes, DEMAND)
        held = [entry for run in runs for entry in run]
        self._catalog.hold(held)
        await self._settled(held, wait_s)
        lengths = [self._ready_length(run) for run in runs]
        length = min(lengths)
        if length < len(runs[0]):
            waits = any(len(run) > length and run[length].state != DEAD for run in runs)
            ended = PENDING if waits else MISS
        else:
            ended = HIT if length == len(hashes) else THROTTLED if no_room else MISS
        if session.ended:
            length = 0
        result = self._lease(session, spaces, runs, len(hashes), length, ended)
        for run in runs:
            self._room.unhold(run)
        return result

    async def _bring(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], priority: int
    ) -> tuple[list[list[Entry]], bool]:
        """Entries for the longest run that is in DRAM or can come up, whatever their state."""
        if self._below is None:
            runs = [self._entered(space, hashes) for space in spaces]
            length = min(len(run) for run in runs)
            return [run[:length] for run in runs], False
        found = await self._below.promoter.find(spaces, hashes)
        plan = self._below.promoter.plan(spaces, hashes, found, priority)
        if plan.no_room:
            self._below.mover.kick()
        return plan.runs, plan.no_room

    def _entered(self, space: Space, hashes: Sequence[bytes]) -> list[Entry]:
        run: list[Entry] = []
        for hash_ in hashes:
            entry = space.entries.get(hash_)
            if entry is None:
                break
            run.append(entry)
        return run

    def _ready_length(self, run: Sequence[Entry]) -> int:
        return next((index for index, entry in enumerate(run) if entry.state != READY), len(run))

    async def _settled(self, entries: Sequence[Entry], wait_s: float) -> None:
        """Wait until every block is readable or gone, or the time is up."""
        changes = [self._catalog.change_of(entry) for entry in entries if entry.state not in (READY, DEAD)]
        if changes and wait_s > 0:
            await asyncio.wait(changes, timeout=wait_s)

    def _lease(
        self,
        session: Session,
        spaces: Sequence[Space],
        runs: Sequence[list[Entry]],
        asked: int,
        length: int,
        ended: int,
    ) -> Held:
        group = session.group
        fits = self._fitting(runs, length, self._limits.held_bytes - group.leased_bytes)
        if fits < length:
            length, ended = fits, THROTTLED
            self._counters["throttled_gets"] += 1
        stats = self._parts.stats[session.caller.tenant]
        stats.blocks_asked += asked
        stats.blocks_hit += length
        if not length:
            return Held(0, ended, [])
        leases = []
        for space, run in zip(spaces, runs, strict=True):
            held = run[:length]
            size_bytes = sum([entry.pool.slot_bytes for entry in held])
            lease = Lease(self._parts.sessions.new_id(), space, held, size_bytes)
            self._catalog.hold(held)
            group.leases[lease.lease_id] = lease
            group.leased_bytes += size_bytes
            leases.append(lease)
        return Held(length, ended, leases)

    def _fitting(self, runs: Sequence[Sequence[Entry]], length: int, budget_bytes: int) -> int:
        """How many leading blocks of the runs fit into a budget."""
        if sum([entry.pool.slot_bytes for run in runs for entry in run[:length]]) <= budget_bytes:
            return length
        for index in range(length):
            budget_bytes -= sum(run[index].pool.slot_bytes for run in runs)
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
            self._room.unhold(lease.entries)
        if leases and self._below is not None:
            self._below.mover.kick()
        return len(leases)

    # ---- touch ----

    def touch(self, space: Space, hashes: Sequence[bytes]) -> int:
        """Note a use of blocks in DRAM; returns how many there were."""
        entries = [entry for hash_ in hashes if (entry := space.entries.get(hash_)) and entry.state == READY]
        self._catalog.touch(entries, self._parts.clock.monotonic())
        return len(entries)

    # ---- prefetch ----

    async def prefetch(
        self, session: Session, spaces: Sequence[Space], hashes: Sequence[bytes], priority: int, deadline_s: float
    ) -> Prefetched:
        """Start bringing a run up from NVMe. Raises LimitExceeded past the session's number of prefetches."""
        if len(session.prefetches) >= PREFETCHES_PER_SESSION_MAX:
            raise LimitExceeded(f"{PREFETCHES_PER_SESSION_MAX} prefetches are open: poll or cancel some")
        if self._below is None:
            resident = min(len(self._resident(space, hashes)) for space in spaces)
            return Prefetched(0, HIT if resident == len(hashes) else MISS, resident, 0)
        found = await self._below.promoter.find(spaces, hashes)
        end_s = self._parts.clock.monotonic() + deadline_s if deadline_s else 0.0
        plan = self._below.promoter.plan(spaces, hashes, found, min(priority, DEMAND - 1), end_s)
        resident = min(self._ready_length(run) for run in plan.runs)
        if plan.job.done.done():
            ended = HIT if resident == len(hashes) else THROTTLED if plan.no_room else MISS
            return Prefetched(0, ended, resident, 0)
        if session.ended:
            self._below.promoter.abandon(plan.job)
            return Prefetched(0, MISS, 0, 0)
        prefetch_id = self._parts.sessions.new_id()
        self._jobs[prefetch_id] = (session, plan.job)
        session.prefetches.add(prefetch_id)
        return Prefetched(prefetch_id, PENDING, resident, plan.job.total_blocks)

    async def poll_prefetch(self, session: Session, prefetch_id: int, wait_s: float) -> Job:
        """How far a prefetch is; a finished one is forgotten once told. Raises NotFound."""
        job = self._job(session, prefetch_id)
        if not job.done.done() and wait_s > 0:
            await asyncio.wait([job.done], timeout=min(wait_s, self._limits.get_wait_max_s))
        if job.done.done():
            self._forget_job(session, prefetch_id)
        return job

    async def cancel_prefetch(self, session: Session, prefetch_id: int) -> Job:
        """Drop what is queued; answered when no copy of it runs. Raises NotFound."""
        job = self._job(session, prefetch_id)
        assert self._below is not None, "jobs come from below"
        await self._below.promoter.cancel(job)
        self._forget_job(session, prefetch_id)
        return job

    def _job(self, session: Session, prefetch_id: int) -> Job:
        if prefetch_id not in session.prefetches:
            raise NotFound(
                f"prefetch {prefetch_id} is not open in this session (a finished one is forgotten once told)"
            )
        return self._jobs[prefetch_id][1]

    def _forget_job(self, session: Session, prefetch_id: int) -> None:
        session.prefetches.discard(prefetch_id)
        self._jobs.pop(prefetch_id, None)

    def end_session(self, session: Session, leases: Sequence[Lease]) -> None:
        """Give back the leases that ended with a session, and drop its prefetches."""
        for prefetch_id in list(session.prefetches):
            _, job = self._jobs[prefetch_id]
            if self._below is not None:
                self._below.promoter.abandon(job)
            self._forget_job(session, prefetch_id)
        for lease in leases:
            self._room.unhold(lease.entries)
