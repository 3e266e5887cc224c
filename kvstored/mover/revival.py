"""Blocks of an earlier process: in the catalogue from the start, readable when their bytes are verified.

A block that was adopted is REVIVING: a look-up calls it pending, a get waits for it, and a hold
keeps it out of every eviction order. Its bytes are hashed in the copier threads, the coldest
first, so that the eviction order comes back as it was and room can be made early; what somebody
asks for goes before all others. What does not match its content hash is forgotten.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import Final

from kvstored.catalog.catalog import REVIVING, Catalog, Entry, Space
from kvstored.catalog.history import History, Reason
from kvstored.catalog.room import Room
from kvstored.clock import Clock
from kvstored.device import memory
from kvstored.errors import DeviceError
from kvstored.keys import Namespace
from kvstored.lifetime import Expiry, capped
from kvstored.tiers.base import LowerTier, Record
from kvstored.tiers.dram import DramTier
from kvstored.tiers.slots import Found

BATCH_BYTES: Final = 8 << 20
BATCH_BLOCKS: Final = 512
SLOT_BITS: Final = 64
SLOT_MASK: Final = (1 << SLOT_BITS) - 1
UNRANKED: Final = 1 << 32  # put since the order was last noted: warmer than all that was in it


class Revival:
    """Enters what the DRAM tier adopted, verifies it, and is done then."""

    def __init__(
        self,
        catalog: Catalog,
        room: Room,
        dram: DramTier,
        clock: Clock,
        counters: Counter[str],
        history: History,
        copiers: Executor,
        copy_threads: int,
        below: LowerTier | None,
    ) -> None:
        self._catalog = catalog
        self._room = room
        self._dram = dram
        self._clock = clock
        self._counters = counters
        self._history = history
        self._copiers = copiers
        self._jobs = copy_threads
        self._below = below
        self._cold_first: deque[Entry] = deque()
        self._urgent: deque[Entry] = deque()
        self._waiting: set[int] = set()  # slots that are not taken up yet
        self._hurried: set[int] = set()  # those that stand in `_urgent`, once each
        self.left_blocks = 0

    @property
    def active(self) -> bool:
        """Whether some block is not verified yet."""
        return self.left_blocks > 0

    # ---- entering ----

    async def enter(self) -> None:
        """Give every adopted block its entry; those of no known namespace are dropped."""
        adoption = self._dram.adoption
        digest_of = self._catalog.digest_of
        known = {digest_of(namespace): namespace for namespace in self._dram.namespaces()}
        now_s = self._catalog.now_s()
        leased = {slot for lease in adoption.leases for slot in lease.slots()}
        blocks: list[tuple[int, Found, Namespace]] = []
        for segment in adoption.segments:
            for found in adoption.found.pop(segment.segment_id):
                over = found.expiry is not None and found.expiry.expires_s <= now_s
                slot, namespace = segment.segment_id << 20 | found.slot, known.get(found.digest) if not over else None
                if namespace is None or namespace.tenant != segment.tenant:
                    adoption.dropped["expired" if over else "namespace_unknown"] += 1  # or of a past epoch
                    if slot in leased:  # freed when its readers are gone, and nothing to be found until then
                        self._dram.records.clear(slot)
                    else:
                        self._dram.free(slot)
                else:
                    # A chain lies in ascending slots mostly: of what was in no order the last is the coldest.
                    blocks.append(((found.rank or UNRANKED) << SLOT_BITS | (SLOT_MASK - slot), found, namespace))
            await asyncio.sleep(0)
        blocks.sort()  # by the number, which no two share
        for number, (key, found, namespace) in enumerate(blocks):
            self._enter(SLOT_MASK - (key & SLOT_MASK), found, namespace)
            if not number % BATCH_BLOCKS:
                await asyncio.sleep(0)
        self._waiting.update(entry.slot for entry in self._cold_first)
        self.left_blocks = len(self._cold_first)
        self._counters["dram_adopted_blocks"] += self.left_blocks
        self._counters["dram_dropped_blocks"] += adoption.dropped.total()

    def _enter(self, slot: int, found: Found, namespace: Namespace) -> None:
        space = self._catalog.space(namespace)
        if found.hash in space.entries:
            self._dram.adoption.dropped["twice"] += 1
            self._dram.free(slot)
            return
        expiry = self._expiry(space, slot, found)
        entry = self._catalog.reserve(space, found.hash, found.parent, slot, found.size_bytes, REVIVING, expiry)
        self._dram.bind(slot, entry)
        self._cold_first.append(entry)

    def _expiry(self, space: Space, slot: int, found: Found) -> Expiry | None:
        """When it ends; where its age is not known and limited, from here on as if it was put now."""
        if not space.max_age_s:
            return found.expiry
        end_s = self._catalog.now_s() + space.max_age_s
        if found.expiry is not None and found.expiry.expires_s <= end_s:
            return found.expiry
        expiry = capped(found.expiry, end_s)
        assert expiry is not None, "capped"
        self._dram.records.move_end(slot, expiry)
        return expiry

    # ---- verifying ----

    def hurry(self, entries: Iterable[Entry]) -> None:
        """Somebody wants these, given in chain order: they are verified next."""
        for entry in entries if self.left_blocks else ():
            if entry.slot in self._waiting and entry.slot not in self._hurried:
                self._hurried.add(entry.slot)
                self._urgent.append(entry)

    async def run(self) -> None:
        """Verify until nothing is left."""
        loop = asyncio.get_running_loop()
        while self._urgent or self._cold_first:
            batches = [batch for _ in range(self._jobs) if (batch := self._next())]
            jobs = [loop.run_in_executor(self._copiers, memory.hash_many, self._places(batch)) for batch in batches]
            for batch, job in zip(batches, jobs, strict=True):
                self._finish(batch, await job)
                await self._ask_below(batch)

    def _next(self) -> list[Entry]:
        """The next blocks to verify, coldest first or in reversed chain order; each is taken once."""
        batch: list[Entry] = []
        size = 0
        queue = self._urgent or self._cold_first
        while queue and size < BATCH_BYTES and len(batch) < BATCH_BLOCKS:
            entry = queue.popleft()
            if entry.slot in self._waiting:  # what was asked for stands in both queues
                self._waiting.discard(entry.slot)
                self._hurried.discard(entry.slot)
                batch.append(entry)
                size += entry.size_bytes
        return batch if queue is self._cold_first else batch[::-1]

    def _places(self, batch: Sequence[Entry]) -> list[tuple[int, int]]:
        return [(self._dram.address(entry.slot), entry.size_bytes) for entry in batch]

    def _finish(self, batch: list[Entry], hashes: Sequence[bytes]) -> None:
        for entry, found in zip(batch, hashes, strict=True):
            if found == self._dram.records.content_hash(entry.slot):
                self._catalog.publish(entry)  # or it was deleted meanwhile
            elif entry.state == REVIVING:
                self._drop(entry)
        self.left_blocks -= len(batch)
        # The last hold touches, the last of the list first.
        self._room.unhold(batch[::-1])

    def _drop(self, entry: Entry) -> None:
        rule = "its bytes in DRAM no longer had their content hash after a restart"
        self._history.note(entry.pool.space, [entry.hash], Reason.CORRUPT, rule)
        self._counters["corrupt_blocks"] += 1
        self._room.forget(entry)

    async def _ask_below(self, batch: Sequence[Entry]) -> None:
        """Learn which of them are below too; one that is wrongly believed not to be is only written again."""
        below = self._below
        if below is None:
            return
        for space in dict.fromkeys(entry.pool.space for entry in batch):
            entries = [entry for entry in batch if entry.pool.space is space]
            try:
                records = await below.find(space.tenant, space.digest, [e.hash for e in entries], prefix=False)
            except DeviceError:
                return
            there: list[Record] = []
            for entry, record in zip(entries, records, strict=True):
                if record is not None:
                    entry.below = True
                    there.append(record)
            below.unpin(there)
