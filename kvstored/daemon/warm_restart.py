"""The warm restart of the DRAM tier as the daemon goes through it: what comes back at start, what stays at stop."""

from __future__ import annotations

import asyncio

from kvstored.background import cancel_all
from kvstored.mover.recency import Recency
from kvstored.reporting.logs import get_logger
from kvstored.store.store import Store
from kvstored.store.trimming import Trimming

log = get_logger("restart")


class WarmRestart:
    """The background work that it takes: blocks are verified, and their order is noted for the next time."""

    def __init__(self, store: Store) -> None:
        parts = self._parts = store.parts
        self._store = store
        self._recency = Recency(parts.catalog, parts.dram)
        self._tasks: list[asyncio.Task[None]] = []

    async def enter(self) -> None:
        """Blocks that an earlier process left in DRAM are there from now on; they are verified while serving."""
        parts = self._parts
        self._store.bumps.enter()
        await parts.revival.enter()
        self._store.quarantine.enter()
        parts.sessions.begin_ids(parts.dram.boot)
        for note in parts.dram.adoption.notes:
            log.warning("memory of an earlier process", what=note)
        if parts.dram.boot > 1:
            dropped = dict(parts.dram.adoption.dropped)
            leases = self._store.quarantine.leases
            log.info("memory taken over", blocks=parts.revival.left_blocks, leases=leases, dropped=dropped)

    def start(self) -> None:
        """Begin the background work; the tiers are open."""
        work = (
            *(self._revive(), self._recency.run(), self._store.quarantine.run(), self._take_back()),
            self._store.expiries.run(),
            Trimming(self._parts, self._check_quotas).run(),
            self._store.hints.run(),
        )
        self._tasks += [asyncio.create_task(each) for each in work]

    def _check_quotas(self) -> None:
        for problem in self._store.quota_audit.check():
            log.error("a quota is exceeded", what=problem)

    async def _take_back(self) -> None:
        await self._store.bumps.opened()
        await self._store.bumps.run()

    async def _revive(self) -> None:
        blocks, started_s = self._parts.revival.left_blocks, self._parts.clock.monotonic()
        await self._parts.revival.run()
        if blocks:
            corrupt = self._parts.counters["corrupt_blocks"]
            log.info("verified", blocks=blocks, corrupt=corrupt, s=self._parts.clock.monotonic() - started_s)

    def freeze(self) -> None:
        """The sessions are about to be closed: what clients read now they go on reading over a restart."""
        self._store.reads.notes.freeze()

    async def stop(self) -> None:
        """End the background work; no client is left. What is not verified yet will be by the next process."""
        await cancel_all(self._tasks)
        await self._recency.note_all()
