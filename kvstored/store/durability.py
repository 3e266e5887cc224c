"""Durable puts: blocks that are on NVMe before their put is answered.

Whoever waits at the same time shares one write and one index commit: while a batch is on its way down, the
blocks that arrive wait for the next. A commit of the index costs 5 to 12 ms, so that nothing here is ever
done block by block.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from kvstored.catalog.catalog import DEAD, READY, Entry, Space
from kvstored.errors import FailedPrecondition
from kvstored.store.parts import Parts

BATCH_BYTES_MAX: Final = 64 << 20
BATCH_BLOCKS_MAX: Final = 2048

_log = logging.getLogger(__name__)


class Wish(msgspec.Struct, eq=False):
    """Held blocks of one caller, parents first, and where to say which of them are on NVMe."""

    entries: Sequence[Entry]
    size_bytes: int
    done: asyncio.Future[list[bool]]


class Durability:
    """Brings blocks below that somebody waits for."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._queue: deque[Wish] = deque()
        self._working: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raises FailedPrecondition where no lower tier is configured."""
        if self._parts.below is None:
            raise FailedPrecondition("durability nvme: this daemon has no NVMe tier: set nvme.paths, or use memory")

    async def persist(self, entries: Sequence[Entry]) -> list[bool]:
        """Which of these readable blocks are on NVMe, when all was done for it that can be done now.

        They are given in chain order, and held until then, however early the caller leaves.
        """
        if not entries:
            return []
        self._parts.catalog.hold(entries)
        size_bytes = sum(entry.pool.slot_bytes for entry in entries)
        wish = Wish(entries, size_bytes, asyncio.get_running_loop().create_future())
        self._queue.append(wish)
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await asyncio.shield(wish.done)

    async def persist_hashes(self, space: Space, hashes: Sequence[bytes]) -> list[bool]:
        """The same for blocks by their hashes; of those not in DRAM, whether they are on NVMe."""
        entries = [space.entries.get(hash_) for hash_ in hashes]
        ready = [entry for entry in entries if entry is not None and entry.state == READY]
        durable = dict(zip(map(id, ready), await self.persist(ready), strict=True))
        absent = [hash_ for hash_, entry in zip(hashes, entries, strict=True) if entry is None]
        found = await self._find(space, absent)
        return [
            hash_ in found if entry is None else durable.get(id(entry), False)
            for hash_, entry in zip(hashes, entries, strict=True)
        ]

    async def _find(self, space: Space, hashes: Sequence[bytes]) -> set[bytes]:
        below = self._parts.below
        if below is None or not hashes:
            return set()
        return set(await below.records(space, hashes))

    async def drained(self) -> None:
        """Return when nothing is on its way or waits for it."""
        while self._working is not None:
            await asyncio.wait([self._working])

    # ---- the work ----

    async def _work(self) -> None:
        try:
            while self._queue:
                await self._write(self._batch())
        finally:
            self._working = None

    def _batch(self) -> list[Wish]:
        """Who goes next, together: at least one, and no more than a batch."""
        wishes = [self._queue.popleft()]
        blocks, size_bytes = len(wishes[0].entries), wishes[0].size_bytes
        while self._queue:
            blocks += len(self._queue[0].entries)
            size_bytes += self._queue[0].size_bytes
            if blocks > BATCH_BLOCKS_MAX or size_bytes > BATCH_BYTES_MAX:
                break
            wishes.append(self._queue.popleft())
        return wishes

    async def _write(self, wishes: list[Wish]) -> None:
        below = self._parts.below
        assert below is not None, "checked when the put began"
        # Tenant by tenant, as the tier takes them.
        wishes.sort(key=lambda wish: wish.entries[0].pool.space.tenant)
        entries = [entry for wish in wishes for entry in wish.entries]
        done: set[int] = set()
        try:
            done = await below.mover.write(entries)
        except Exception:
            _log.exception("durable blocks could not be written")  # their putters are told that they are not durable
        written = 0
        for wish in wishes:
            durable = [id(entry) in done and entry.state != DEAD for entry in wish.entries]
            written += sum(durable)
            if not wish.done.done():
                wish.done.set_result(durable)
        self._parts.counters["durable_blocks"] += written
        self._parts.counters["durable_failed_blocks"] += len(entries) - written
        self._parts.counters["durable_batches"] += 1
