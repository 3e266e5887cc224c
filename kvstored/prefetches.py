"""Prefetch: bring a run up from NVMe before it is asked for. Start, poll, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstored.catalog import READY, Space
from kvstored.errors import LimitExceeded, NotFound
from kvstored.leases import Session
from kvstored.outcomes import HIT, MISS, PENDING, THROTTLED
from kvstored.parts import Parts
from kvstored.promoter import DEMAND, Job

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
        self._jobs: dict[int, Job] = {}

    async def start(
        self, session: Session, spaces: Sequence[Space], hashes: Sequence[bytes], priority: int, deadline_s: float
    ) -> Prefetched:
        """Start bringing a run up from NVMe. Raises LimitExceeded past the session's number of prefetches."""
        if len(session.prefetches) >= PREFETCHES_PER_SESSION_MAX:
            raise LimitExceeded(f"{PREFETCHES_PER_SESSION_MAX} prefetches are open: poll or cancel some")
        if self._below is None:
            resident = min(self._resident(space, hashes) for space in spaces)
            return Prefetched(0, HIT if resident == len(hashes) else MISS, resident, 0)
        found = await self._below.promoter.find(spaces, hashes)
        end_s = self._parts.clock.monotonic() + deadline_s if deadline_s else 0.0
        plan = self._below.promoter.plan(spaces, hashes, found, min(priority, DEMAND - 1), end_s)
        if plan.short:
            self._below.mover.demand(*plan.short)
        resident = min(next((i for i, e in enumerate(run) if e.state != READY), len(run)) for run in plan.runs)
        if plan.job.done.done():
            ended = HIT if resident == len(hashes) else THROTTLED if plan.cut else MISS
            return Prefetched(0, ended, resident, 0)
        if session.ended:
            self._below.promoter.abandon(plan.job)
            return Prefetched(0, MISS, 0, 0)
        prefetch_id = self._parts.sessions.new_id()
        self._jobs[prefetch_id] = plan.job
        session.prefetches.add(prefetch_id)
        return Prefetched(prefetch_id, PENDING, resident, plan.job.total_blocks)

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
        return self._jobs[prefetch_id]

    def _forget_job(self, session: Session, prefetch_id: int) -> None:
        session.prefetches.discard(prefetch_id)
        self._jobs.pop(prefetch_id, None)

    def _resident(self, space: Space, hashes: Sequence[bytes]) -> int:
        for index, hash_ in enumerate(hashes):
            entry = space.entries.get(hash_)
            if entry is None or entry.state != READY:
                return index
        return len(hashes)

    def end_session(self, session: Session) -> None:
        """Drop the prefetches of a session; what they are reading is read to its end."""
        for prefetch_id in list(session.prefetches):
            assert self._below is not None, "jobs come from below"
            self._below.promoter.abandon(self._jobs[prefetch_id])
            self._forget_job(session, prefetch_id)
