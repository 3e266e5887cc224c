"""One path of the NVMe tier, open: a directory with its extents and its index, sufficient in itself.

State (the extent table) changes on the event loop, without awaiting; bytes move on I/O threads,
the index changes on one thread and is read on another. A call that moves blocks has really ended
when it returns, whatever the outcome: the tier keeps its calls from being cancelled half-way.

The order of a store: data written, synced; index committed; then acknowledged.

A volume that fails is READ_ONLY where only its writes fail, else OFF. From READ_ONLY it can
`resume`, unless what its index holds is in doubt; else it is opened anew (see `recovery`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvstored.clock import Clock
from kvstored.errors import DeviceError
from kvstored.keys import Namespace
from kvstored.tiers.base import Health, Load, Record, Store
from kvstored.tiers.condition import Condition
from kvstored.tiers.deadline import Late
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.formats import Placed
from kvstored.tiers.index import Index
from kvstored.tiers.nvme_config import NvmeConfig
from kvstored.tiers.recycling import Notices, Recycler, report
from kvstored.tiers.runs import Block, Mover, Read, cut
from kvstored.tiers.threads import VolumeThreads, call_all

# A bad sector spoils a record or a few neighbours, a device that is gone spoils all: so many in a row, without
# one that can be read between them, are more than one call reads, and cost no record.
UNREADABLE_IN_A_ROW_MAX: Final = 32
_log = logging.getLogger(__name__)


class Volume(Condition):
    """One path, open: its health, its extents, its index."""

    def __init__(
        self,
        directory: VolumeDirectory,
        table: ExtentTable,
        index: Index,
        namespaces: Iterable[Namespace],
        threads: VolumeThreads,
        config: NvmeConfig,
        clock: Clock,
        notices: Notices,
        counts: Counter[str],
    ) -> None:
        super().__init__(directory, table, threads, config, clock, counts)
        self.namespaces = {namespace.digest: namespace for namespace in namespaces}
        self.suspects: dict[int, None] = {}  # extents in which something was wrong, to be scrubbed first
        self.mover = Mover(directory.device, directory.files, directory.extents)
        self.index = index
        self._run_bytes = config.run_bytes
        self._wall = clock.wall
        self._notices = notices
        self._users = 0
        self._unreadable_in_a_row = 0
        evicted = notices.evicted
        self.recycler = Recycler(directory, table, index, self.mover, threads, self.calls, counts, evicted, clock)
        # One reservation at a time: the blocks of one call lie together, and recycling awaits.
        self._reserving = asyncio.Lock()

    async def settle(self, lost: Sequence[int] = ()) -> None:
        """After opening: empty extents that lost their file, give up those beyond the capacity, seal full ones."""
        try:
            await self.recycler.empty(lost)
            await self.recycler.shrink()
            await self.recycler.seal_full()
        except DeviceError as error:
            self.doubt(error)

    async def close(self) -> None:
        """Let go of index, files, threads and directory. Searches end; no other call may be under way.

        Raises Late where a thread does not come back: what it may be using stays open then.
        """
        self.health, self.reason = Health.OFF, self.reason or "closed"
        self.calls.renew()
        await self.calls.ask(self.threads.index_reader, _nothing)  # the searches before it have ended, none follows
        try:
            await self.calls.ask(self.threads.index_writer, self.index.close)
        except Late:
            raise
        except DeviceError as error:
            _log.warning("closing %s: %s", self.directory.path, error)
        self.threads.stop()
        self.directory.close()

    @property
    def busy(self) -> bool:
        """Whether a call is under way, a thread has not come back from one, or a record is pinned."""
        return bool(self._users or self.calls.running) or self.table.pinned

    @contextmanager
    def use(self) -> Iterator[None]:
        """Keep the volume from being closed meanwhile."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    # --- finding ---

    async def find(self, digest: bytes, hashes: Sequence[bytes], *, prefix: bool) -> list[Record | None]:
        """Index entries, valid or not (`table.owner` tells); all missing where the index is unreadable."""
        if self.health is Health.OFF:
            return []
        try:
            return await self.calls.ask(self.threads.index_reader, self.index.find, digest, hashes, prefix=prefix)
        except DeviceError as error:
            self.turn(Health.OFF, str(error))
            return []

    async def page(self, digest: bytes, after: bytes, limit: int) -> list[tuple[bytes, Record]]:
        """See `Index.page`; raises DeviceError."""
        if self.health is Health.OFF:
            raise DeviceError(f"{self.directory.path} is off: {self.reason}")
        return await self.calls.ask(self.threads.index_reader, self.index.page, digest, after, limit)

    async def evicted_s(self, key: bytes) -> float | None:
        """See `Evictions.evicted_s`; raises DeviceError."""
        if self.health is Health.OFF:
            return None
        return await self.calls.ask(self.threads.loads, self.directory.evictions.evicted_s, key)

    # --- loading ---

    async def load(self, loads: Sequence[Load]) -> list[bool]:
        """See `LowerTier.load`."""
        if self.health is Health.OFF:
            return [False] * len(loads)
        with self.use():
            valid = [i for i, load in enumerate(loads) if self.table.owner(load.record) is not None]
            outcomes = await self._read([_source(loads[i], i) for i in valid])
            bad = [loads[position] for position, outcome in outcomes.items() if outcome is not Read.OK]
            if bad and await self.device_reads(list(outcomes.values())):
                await self.drop([(load.digest + load.hash, load.record) for load in bad])
        # Asked again: a record that became void while it was read is not to be trusted.
        return [
            outcomes.get(i) is Read.OK and self.table.owner(load.record) is not None for i, load in enumerate(loads)
        ]

    async def _read(self, blocks: Sequence[Block]) -> dict[int, Read]:
        runs = cut(blocks, self._run_bytes, self.threads.load_count)
        read = await call_all(self.calls.call(self.threads.loads, self.mover.read, run) for run in runs)
        outcomes: dict[int, Read] = {}
        for run, results in zip(runs, read, strict=True):
            # A call that was not begun because the device hangs; else a failed read is an outcome.
            found = [Read.UNREADABLE] * len(run.blocks) if isinstance(results, DeviceError) else results
            for block, outcome in zip(run.blocks, found, strict=True):
                self.counts[f"load_{outcome.value}_blocks"] += 1
                outcomes[block.position] = outcome
                if outcome is not Read.OK:
                    self.suspects[block.extent] = None
        if Read.OK in outcomes.values():
            self._unreadable_in_a_row = 0
        return outcomes

    async def device_reads(self, outcomes: Sequence[Read]) -> bool:
        """Whether it is the records that are bad, and not the device or its directory that is gone."""
        if Read.OK in outcomes:
            self._unreadable_in_a_row = 0
        unreadable = sum(outcome is Read.UNREADABLE for outcome in outcomes)
        self._unreadable_in_a_row += unreadable
        if unreadable and self.health is not Health.OFF:
            if self._unreadable_in_a_row > UNREADABLE_IN_A_ROW_MAX:
                self.turn(Health.OFF, f"{self._unreadable_in_a_row} reads in a row failed")
            await self.check()
        return self.health is not Health.OFF

    async def drop(self, entries: Sequence[tuple[bytes, Record]]) -> None:
        """Remove records whose bytes are wrong, if they are there still, and tell of it."""
        tenants = {self.table.owner(record) for _, record in entries} - {None}
        try:
            delta = await self.calls.call(self.threads.index_writer, self.index.remove_unchanged, entries)
        except DeviceError as error:
            self.doubt(error)
            return
        self.table.apply(delta)
        for tenant in tenants:
            keys = [key for key, record in entries if self.table.owner(record) == tenant]
            report(self._notices.dropped, tenant or "", keys)

    # --- storing ---

    async def store(self, tenant: str, stores: Sequence[Store]) -> list[bool]:
        """Write blocks, make them durable and findable; see `LowerTier.store`."""
        with self.use():
            return await self._store(tenant, stores)

    async def _store(self, tenant: str, stores: Sequence[Store]) -> list[bool]:
        placed = await self._reserve(tenant, stores)
        delta: dict[int, tuple[int, int]] = {}
        written: set[int] = set()
        try:
            written = await self._write(placed)
            if self.no_room:  # before the index has to grow
                await self.release()
            durable = [placed[i] for i in sorted(written)]
            if durable:
                insert = self.index.insert
                delta = await self.calls.call(self.threads.index_writer, insert, tenant, durable, self._wall())
        except DeviceError as error:
            self.doubt(error)
            written = set()
        finally:
            self.table.settle(placed, delta)
        self.counts["store_failed_blocks"] += len(placed) - len(written)
        self.counts["store_no_room_blocks"] += len(stores) - len(placed)
        await self._seal_full()
        return [i in written for i in range(len(stores))]

    async def _reserve(self, tenant: str, stores: Sequence[Store]) -> list[Placed]:
        placed: list[Placed] = []
        async with self._reserving:
            while self.health is Health.OK:
                placed += self.table.place(tenant, stores[len(placed) :])
                if len(placed) == len(stores) or not await self._make_ready(tenant):
                    break
        return placed

    async def _make_ready(self, tenant: str) -> bool:
        try:
            return await self.recycler.make_ready(tenant)
        except DeviceError as error:
            self.recycler_failed(error)
            return False

    async def _write(self, placed: Sequence[Placed]) -> set[int]:
        """Write and sync; positions of the blocks that are durable."""
        blocks = [Block(p.extent, p.offset, p.store.address, p.store.size_bytes, b"", i) for i, p in enumerate(placed)]
        runs = cut(blocks, self._run_bytes, self.threads.store_count)
        stores, call = self.threads.stores, self.calls.call
        outcomes = await call_all(call(stores, self.mover.write, run) for run in runs)
        written = [run for run, error in zip(runs, outcomes, strict=True) if not self._failed(run.extent, error)]
        extents = sorted({run.extent for run in written})
        synced = await call_all(call(stores, self.mover.sync, extent) for extent in extents)
        durable = {e for e, error in zip(extents, synced, strict=True) if not self._failed(e, error)}
        self.counts["written_bytes"] += sum(run.bytes for run in written)
        return {block.position for run in written if run.extent in durable for block in run.blocks}

    def _failed(self, extent: int, error: DeviceError | None) -> bool:
        if error is None:
            return False
        self.table.fill(extent)
        self.write_failed(error)
        return True

    async def _seal_full(self) -> None:
        try:
            await self.recycler.seal_full()
        except DeviceError as error:
            self.recycler_failed(error)

    # --- the rest ---

    async def remove(self, tenant: str, keys: Sequence[bytes]) -> int:
        """Remove the tenant's entries; returns how many. Raises DeviceError: then they may be there still."""
        with self.use():
            try:
                delta = await self.calls.ask(self.threads.index_writer, self.index.remove, tenant, keys)
            except DeviceError as error:
                self.doubt(error)
                raise
            self.table.apply(delta)
        return -sum(blocks for _, blocks in delta.values())

    async def remember(self, namespace: Namespace) -> None:
        """Keep what a digest stands for, durably; a failure costs no more than the name."""
        if self.health is not Health.OK or namespace.digest in self.namespaces:
            return
        try:
            await self.calls.ask(self.threads.index_writer, self.index.remember, namespace)
        except DeviceError as error:
            self.doubt(error)
        else:
            self.namespaces[namespace.digest] = namespace

    async def sync(self) -> None:
        """Make the index durable once more, whatever it was opened with; raises DeviceError."""
        await self.calls.ask(self.threads.index_writer, self.index.sync)


def _nothing() -> None:
    """What a thread does to show that it is done with all before."""


def _source(load: Load, position: int) -> Block:
    record = load.record
    place = record.location
    return Block(place.extent, place.offset, load.address, record.size_bytes, record.content_hash, position)
