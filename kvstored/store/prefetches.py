"""Prefetch: bring a run up from NVMe before it is asked for. Start, poll, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstored.catalog import prefetched
from kvstored.catalog.catalog import Space, ready_length
from kvstored.catalog.leases import Session
from kvstored.errors import LimitExceeded, NotFound
from kvstored.mover.jobs import LOOKUP, Found, Job
from kvstored.mover.promoter import PIECE_BLOCKS
from kvstored.store.outcomes import HIT, MISS, PENDING, THROTTLED
from kvstored.store.parts import Below, Parts

PREFETCHES_PER_SESSION_MAX: Final = 1024


class Prefetched(msgspec.Struct):
    """A prefetch as it was started."""

    prefetch_id: int
    outcome: int
    resident_blocks: int
    queued_blocks: int


class Prefetches:
    """The prefetches of all sessions."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._below = parts.below
        self._jobs: dict[tuple[str, int], Job] = {}  # by tenant and id

    async def start(
        self, session: Session, spaces: Sequence[Space], hashes: Sequence[bytes], priority: int, deadline_s: float
    ) -> Prefetched:
        """Start bringing a run up from NVMe. Raises LimitExceeded past the session's number of prefetches."""
        if len(session.prefetches) >= PREFETCHES_PER_SESSION_MAX:
            raise LimitExceeded(f"{PREFETCHES_PER_SESSION_MAX} prefetches are open: poll or cancel some")
        if self._below is None:
            resident = min(len(space.ready_run(hashes)) for space in spaces)
            return Prefetched(0, HIT if resident == len(hashes) else MISS, resident, 0)
        job = Job(min(priority, LOOKUP - 1), self._deadline_s(deadline_s), prefetched.EXPLICIT)
        resident, cut = await self._plan(self._below, session, spaces, hashes, job)
        return self._started(session, hashes, job, resident, cut)

    async def follow(
        self,
        session: Session,
        spaces: Sequence[Space],
        hashes: Sequence[bytes],
        found: Sequence[Found],
        deadline_s: float,
    ) -> Prefetched:
        """Start bringing up what a lookup has just found. What of `found` is not taken out of it stays the caller's.

        Nobody has to ask for its end: it is forgotten then. A session with too many prefetches gets none.
        """
        if self._below is None or len(session.prefetches) >= PREFETCHES_PER_SESSION_MAX:
            return Prefetched(0, MISS, 0, 0)
        job = Job(LOOKUP, self._deadline_s(deadline_s), prefetched.LOOKUP)
        resident, cut = await self._plan(self._below, session, spaces, hashes, job, found)
        started = self._started(session, hashes, job, resident, cut)
        if started.prefetch_id:
            job.done.add_done_callback(lambda _: self._forget_job(session, started.prefetch_id))
        return started

    def _deadline_s(self, in_s: float) -> float:
        return self._parts.clock.monotonic() + in_s if in_s else 0.0

    def _started(self, session: Session, hashes: Sequence[bytes], job: Job, resident: int, cut: bool) -> Prefetched:
        """What was planned, as the client sees it."""
        if job.done.done() or session.ended:
            ended = HIT if resident == len(hashes) else THROTTLED if cut else MISS
            return Prefetched(0, ended, resident, 0)
        prefetch_id = self._parts.sessions.new_id(session.caller.tenant)
        self._jobs[session.caller.tenant, prefetch_id] = job
        session.prefetches.add(prefetch_id)
        return Prefetched(prefetch_id, PENDING, resident, job.total_blocks)

    async def _plan(
        self,
        below: Below,
        session: Session,
        spaces: Sequence[Space],
        hashes: Sequence[bytes],
        job: Job,
        found: Sequence[Found] = (),
    ) -> tuple[int, bool]:
        """Queue the reads piece by piece; how many leading blocks are resident, and whether room ended it.

        `found` was found just now: what the first piece needs of it is taken out.
        """
        resident, cut, job.planning = 0, False, True
        try:
            for start in range(0, len(hashes), PIECE_BLOCKS):
                piece = hashes[start : start + PIECE_BLOCKS]
                if start or not found:
                    records = await below.promoter.find(spaces, piece)
                else:
                    records = [{hash_: have.pop(hash_) for hash_ in piece if hash_ in have} for have in found]
                plan = below.promoter.plan(spaces, piece, records, job)
                if resident == start:
                    resident += min(ready_length(run) for run in plan.runs)
                if job.short:
                    below.mover.demand(*job.short)
                cut = plan.cut
                if cut or len(plan.runs[0]) < len(piece) or session.ended:
                    break
        finally:
            job.planning = False
            if session.ended:
                below.promoter.abandon(job)
            job.settle()
        return resident, cut

    async def poll(self, session: Session, prefetch_id: int, wait_s: float) -> Job:
        """How far a prefetch is; a finished one is forgotten once told. Raises NotFound."""
        job = self._job(session, prefetch_id)
        if not job.done.done() and wait_s > 0:
            await asyncio.wait([job.done], timeout=min(wait_s, self._parts.limits.get_wait_max_s))
        if job.done.done():
            self._forget_job(session, prefetch_id)
        return job

    async def cancel(self, session: Session, prefetch_id: int) -> Job:
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
        return self._jobs[session.caller.tenant, prefetch_id]

    def _forget_job(self, session: Session, prefetch_id: int) -> None:
        session.prefetches.discard(prefetch_id)
        self._jobs.pop((session.caller.tenant, prefetch_id), None)

    def end_session(self, session: Session) -> None:
        """Drop the prefetches of a session; what they are reading is read to its end."""
        for prefetch_id in list(session.prefetches):
            assert self._below is not None, "jobs come from below"
            self._below.promoter.abandon(self._job(session, prefetch_id))
            self._forget_job(session, prefetch_id)
