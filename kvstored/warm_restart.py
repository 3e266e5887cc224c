"""The warm restart of the DRAM tier as the daemon goes through it: what comes back at start, what stays at stop."""

from __future__ import annotations

import asyncio

from kvstored.logs import get_logger
from kvstored.parts import Parts
from kvstored.recency import Recency

log = get_logger("restart")


class WarmRestart:
    """The background work that it takes: blocks are verified, and their order is noted for the next time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._recency = Recency(parts.catalog, parts.dram)
        self._tasks: list[asyncio.Task[None]] = []

    async def enter(self) -> None:
        """Blocks that an earlier process left in DRAM are there from now on; they are verified while serving."""
        parts = self._parts
        await parts.revival.enter()
        for note in parts.dram.adoption.notes:
            log.warning("memory of an earlier process", what=note)
        if parts.dram.boot > 1:
            dropped = dict(parts.dram.adoption.dropped)
            log.info("memory taken over", blocks=parts.revival.left_blocks, dropped=dropped)

    def start(self) -> None:
        """Begin the background work; the tiers are open."""
        self._tasks += [asyncio.create_task(self._revive()), asyncio.create_task(self._recency.run())]

    async def _revive(self) -> None:
        blocks, started_s = self._parts.revival.left_blocks, self._parts.clock.monotonic()
        await self._parts.revival.run()
        if blocks:
            corrupt = self._parts.counters["corrupt_blocks"]
            log.info("verified", blocks=blocks, corrupt=corrupt, s=self._parts.clock.monotonic() - started_s)

    async def stop(self) -> None:
        """End the background work; no client is left. What is not verified yet will be by the next process."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._recency.note_all()
