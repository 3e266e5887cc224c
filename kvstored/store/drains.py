"""Drain: no new puts; what is held ends, what is only in DRAM is flushed, both by a deadline.

An admin asks for it before maintenance, and can take it back; the daemon's own stop is the same thing.
Gets are served all the while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import islice
from typing import Any, Final

import msgspec

from kvstored.catalog.catalog import Entry
from kvstored.store.parts import Parts
from kvstored.store.releases import PostedReleases
from kvstored.store.writes import Writes

LOOK_EVERY_S: Final = 0.02  # at what is held: releases are posted in shared memory, nothing tells of them
IN_USE_BLOCKS_MAX: Final = 65_536  # leased ones that are written before all others


class Drained(msgspec.Struct):
    """What a drain achieved."""

    written_blocks: int = 0
    left_blocks: int = 0  # only in DRAM, though there is a lower tier
    leases: int = 0  # still held
    reservations: int = 0

    @property
    def complete(self) -> bool:
        """Nothing is held, and nothing would be lost with DRAM."""
        return not (self.left_blocks or self.leases or self.reservations)


class Drains:
    """Drains one store, for as many as ask at once."""

    def __init__(
        self, parts: Parts, writes: Writes, releases: PostedReleases, held: Callable[[], dict[str, int]]
    ) -> None:
        self._parts = parts
        self._writes = writes
        self._releases = releases
        self._held = held
        self._running: dict[asyncio.Event, None] = {}  # no set: they are told in the order in which they began

    def begin(self) -> None:
        """Refuse new puts from here on."""
        self._writes.draining = True

    def end(self) -> None:
        """Take puts again; drains that still wait give up."""
        self._writes.draining = False
        self.hurry()

    def hurry(self) -> None:
        """Drains that still wait or flush give up, and answer with what they have."""
        for ended in self._running:
            ended.set()

    def drain(self, timeout_s: float, *, held_timeout_s: float | None = None) -> Coroutine[Any, Any, Drained]:
        """Refuse new puts, flush, and wait until nothing is held; or for so long. They stay refused.

        So they are when this returns, not only when its result is awaited: an `end` may come between.

        `held_timeout_s`: for so long, and while the flush goes on, what sessions hold is waited for; None: as long
        as for the flush.
        """
        self.begin()
        ended = asyncio.Event()
        self._running[ended] = None
        return self._drain(ended, timeout_s, held_timeout_s)

    async def _drain(self, ended: asyncio.Event, timeout_s: float, held_timeout_s: float | None) -> Drained:
        drained, now = Drained(), self._parts.clock.monotonic
        start_s = now()
        held_end_s = start_s + min(timeout_s, timeout_s if held_timeout_s is None else held_timeout_s)
        flushing = asyncio.create_task(self._flush(drained, timeout_s, ended))
        try:
            while not ended.is_set() and (not flushing.done() or (now() < held_end_s and self._count(drained))):
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), LOOK_EVERY_S)
            left_s = start_s + timeout_s - now()
            if left_s > 0 and not ended.is_set():
                await self._flush(drained, left_s, ended)  # what was committed behind the first one's back
        finally:
            self._running.pop(ended, None)
            ended.set()
            await asyncio.wait([flushing])
        await flushing
        self._count(drained)
        return drained

    def _count(self, drained: Drained) -> int:
        self._releases.take_all()
        held = self._held()
        drained.leases, drained.reservations = held["leases"], held["reservations"]
        return drained.leases + drained.reservations

    async def _flush(self, drained: Drained, timeout_s: float, ended: asyncio.Event) -> None:
        if self._parts.below is not None:
            written, drained.left_blocks = await self._parts.below.mover.flush(timeout_s, self._in_use(), ended)
            drained.written_blocks += written

    def _in_use(self) -> list[Entry]:
        groups = {id(session.group): session.group for session in self._parts.sessions}.values()
        leases = (lease for group in groups for lease in group.leases.values())
        return list(islice((entry for lease in leases for entry in lease.entries), IN_USE_BLOCKS_MAX))
