"""One path of the NVMe tier: a directory with its extents and its index, sufficient in itself.

State (the extent table) changes on the event loop, without awaiting; bytes move on I/O threads,
the index changes on one thread and is read on another. A call has really ended when it returns,
whatever the outcome: the tier keeps its calls from being cancelled half-way.

The order of a store: data written, synced; index committed; then acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from kvstored.clock import Clock
from kvstored.device.file import NoSpace
from kvstored.errors import DeviceError
from kvstored.keys import Namespace
from kvstored.tiers.base import Health, Load, Record, Store
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.formats import Placed
from kvstored.tiers.index import Index
from kvstored.tiers.recycling import OnEvicted, Recycler
from kvstored.tiers.runs import Block, Mover, Read, cut
from kvstored.tiers.threads import VolumeThreads, call, call_all

_log = logging.getLogger(__name__)


class Volume:
    """One path, open: its health, its extents, its index."""

    def __init__(
        self,
        directory: VolumeDirectory,
        table: ExtentTable,
        index: Index,
        namespaces: Iterable[Namespace],
        threads: VolumeThreads,
        run_bytes: int,
        clock: Clock,
        on_evicted: OnEvicted,
    ) -> None:
        self.health = Health.OK
        self.reason = ""
        self.directory = directory
        self.table = table
        self.namespaces = {namespace.digest: namespace for namespace in namespaces}
        self.counts: Counter[str] = Counter()
        self._index = index
        self._threads = threads
        self._run_bytes = run_bytes
        self._clock = clock
        self._mover = Mover(directory.device, directory.files, directory.extents)
        self._recycler = Recycler(directory, table, index, self._mover, threads, self.counts, on_evicted)
        # One reservation at a time: the blocks of one call lie together, and recycling awaits.
        self._reserving = asyncio.Lock()

    async def settle(self) -> None:
        """After opening: give up extents beyond the capacity, seal those that were full."""
        try:
            await self._recycler.shrink()
            await self._recycler.seal_full()
        except DeviceError as error:
            self._degrade(error)

    async def close(self) -> None:
        """Let go of index, files, threads and directory. Searches end; no other call may be under way."""
        self.health, self.reason = Health.OFF, "closed"
        await call(self._threads.index_reader, _nothing)  # the searches before it have ended, and none comes after
        await call(self._threads.index_writer, self._index.close)
        self._threads.stop()
        self.directory.close()

    # --- finding ---

    async def find(self, digest: bytes, hashes: Sequence[bytes], *, prefix: bool) -> list[Record | None]:
        """Index entries, valid or not (`table.owner` tells); all missing where the index is unreadable."""
        if self.health is Health.OFF:
            return []
        try:
            return await call(self._threads.index_reader, self._index.find, digest, hashes, prefix=prefix)
        except DeviceError as error:
            self._degrade(error, Health.OFF)
            return []

    async def page(self, digest: bytes, after: bytes, limit: int) -> list[tuple[bytes, Record]]:
        """See `Index.page`; raises DeviceError."""
        if self.health is Health.OFF:
            raise DeviceError(f"{self.directory.path} is off: {self.reason}")
        return await call(self._threads.index_reader, self._index.page, digest, after, limit)

    # --- loading ---

    async def load(self, loads: Sequence[Load]) -> list[bool]:
        """See `LowerTier.load`."""
        valid = [i for i, load in enumerate(loads) if self.table.owner(load.record) is not None]
        blocks = [_source(loads[i], i) for i in valid]
        outcomes = await self._read(blocks)
        bad = [loads[position] for position, outcome in outcomes.items() if outcome is not Read.OK]
        await self._drop(bad)
        # Asked again: a record that became void while it was read is not to be trusted.
        return [
            outcomes.get(i) is Read.OK and self.table.owner(load.record) is not None for i, load in enumerate(loads)
        ]

    async def _read(self, blocks: Sequence[Block]) -> dict[int, Read]:
        runs = cut(blocks, self._run_bytes, self._threads.load_count)
        read = await call_all(call(self._threads.loads, self._mover.read, run) for run in runs)
        outcomes: dict[int, Read] = {}
        for run, results in zip(runs, read, strict=True):
            assert not isinstance(results, DeviceError), "a failed read is an outcome"
            for block, outcome in zip(run.blocks, results, strict=True):
                self.counts[f"load_{outcome.value}_blocks"] += 1
                outcomes[block.position] = outcome
        return outcomes

    async def _drop(self, loads: Sequence[Load]) -> None:
        if not loads:
            return
        entries = [(load.digest + load.hash, load.record) for load in loads]
        try:
            self.table.apply(await call(self._threads.index_writer, self._index.remove_unchanged, entries))
        except DeviceError as error:
            self._degrade(error)

    # --- storing ---

    async def store(self, tenant: str, stores: Sequence[Store]) -> list[bool]:
        """Write blocks, make them durable and findable; see `LowerTier.store`."""
        placed = await self._reserve(tenant, stores)
        delta: dict[int, tuple[int, int]] = {}
        written: set[int] = set()
        try:
            written = await self._write(placed)
            durable = [placed[i] for i in sorted(written)]
            if durable:
                insert = self._index.insert
                delta = await call(self._threads.index_writer, insert, tenant, durable, self._clock.wall())
        except DeviceError as error:
            self._degrade(error)
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
            return await self._recycler.make_ready(tenant)
        except DeviceError as error:
            self._write_failed(error)
            return False

    async def _write(self, placed: Sequence[Placed]) -> set[int]:
        """Write and sync; positions of the blocks that are durable."""
        blocks = [Block(p.extent, p.offset, p.store.address, p.store.size_bytes, b"", i) for i, p in enumerate(placed)]
        runs = cut(blocks, self._run_bytes, self._threads.store_count)
        outcomes = await call_all(call(self._threads.stores, self._mover.write, run) for run in runs)
        written = [run for run, error in zip(runs, outcomes, strict=True) if not self._failed(run.extent, error)]
        extents = sorted({run.extent for run in written})
        synced = await call_all(call(self._threads.stores, self._mover.sync, extent) for extent in extents)
        durable = {e for e, error in zip(extents, synced, strict=True) if not self._failed(e, error)}
        self.counts["written_bytes"] += sum(run.bytes for run in written)
        return {block.position for run in written if run.extent in durable for block in run.blocks}

    def _failed(self, extent: int, error: DeviceError | None) -> bool:
        if error is None:
            return False
        self.table.fill(extent)
        self._write_failed(error)
        return True

    async def _seal_full(self) -> None:
        try:
            await self._recycler.seal_full()
        except DeviceError as error:
            self._write_failed(error)

    # --- the rest ---

    async def remove(self, tenant: str, digest: bytes, hashes: Sequence[bytes]) -> int:
        """Remove the tenant's entries; returns how many. Raises DeviceError: then they may be there still."""
        keys = [digest + hash_ for hash_ in hashes]
        delta = await call(self._threads.index_writer, self._index.remove, tenant, keys)
        self.table.apply(delta)
        return -sum(blocks for _, blocks in delta.values())

    async def remember(self, namespace: Namespace) -> None:
        """Keep what a digest stands for, durably; a failure costs no more than the name."""
        if self.health is not Health.OK or namespace.digest in self.namespaces:
            return
        try:
            await call(self._threads.index_writer, self._index.remember, namespace)
        except DeviceError as error:
            self._degrade(error)
        else:
            self.namespaces[namespace.digest] = namespace

    async def sync(self) -> None:
        """Make the index durable once more, whatever it was opened with; raises DeviceError."""
        await call(self._threads.index_writer, self._index.sync)

    def _write_failed(self, error: DeviceError) -> None:
        if isinstance(error, NoSpace):
            self.counts["no_space"] += 1
            self.table.stop_growing()
        else:
            self._degrade(error)

    def _degrade(self, error: DeviceError, health: Health = Health.READ_ONLY) -> None:
        if self.health is not Health.OFF and self.health is not health:
            self.health, self.reason = health, str(error)
            _log.error("%s is now %s: %s", self.directory.path, health.value, error)


def _nothing() -> None:
    """What a thread does to show that it is done with all before."""


def _source(load: Load, position: int) -> Block:
    record = load.record
    place = record.location
    return Block(place.extent, place.offset, load.address, record.size_bytes, record.content_hash, position)
