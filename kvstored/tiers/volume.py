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
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvstored.clock import Clock
from kvstored.errors import DeviceError
from kvstored.keys import Namespace
from kvstored.lifetime import Expiry
from kvstored.tiers.base import Health, Load, Record, Store
from kvstored.tiers.deadline import Late
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.end_agenda import EndAgenda
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.formats import Placed
from kvstored.tiers.index import Index
from kvstored.tiers.key_ring import KeyRing
from kvstored.tiers.nvme_config import NvmeConfig
from kvstored.tiers.recycling import Notices, Recycler, report
from kvstored.tiers.reinsertion import Reinsertion
from kvstored.tiers.runs import Read
from kvstored.tiers.sealing import Lock
from kvstored.tiers.threads import VolumeThreads
from kvstored.tiers.volume_io import VolumeIO, locks_for, with_seals
from kvstored.tiers.wear import WearMeter

_log = logging.getLogger(__name__)


class Volume(VolumeIO):
    """One path, open: its health, its extents, its index."""

    def __init__(
        self,
        number: int,
        directory: VolumeDirectory,
        table: ExtentTable,
        index: Index,
        namespaces: Iterable[Namespace],
        threads: VolumeThreads,
        config: NvmeConfig,
        clock: Clock,
        notices: Notices,
        counts: Counter[str],
        keys: KeyRing,
        meter: WearMeter,
    ) -> None:
        super().__init__(directory, table, threads, config, clock, counts, keys, meter)
        self.number = number
        self.namespaces = {namespace.digest: namespace for namespace in namespaces}
        self.index = index
        self._wall = clock.wall
        self.end_agenda = EndAgenda()
        self.end_agenda.look_at(table.with_records())
        self._notices = notices
        self._users = 0
        place = (directory, table, index, self.mover, threads, self.calls, counts)
        self.recycler = Recycler(*place, notices.evicted, clock, self.wear)
        # One reservation at a time: the blocks of one call lie together, and recycling awaits.
        self.reserving = asyncio.Lock()
        self.reinsertion = Reinsertion(self, config.reinsert_share)
        self._begun: set[str] = set()  # tenants whose blocks go to another extent since the last look

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
        await self.reinsertion.stop()
        self.health, self.reason = Health.OFF, self.reason or "closed"
        self.calls.renew()
        await self.calls.ask(self.threads.index_reader, _nothing)  # the searches before it have ended, none follows
        try:
            await self.calls.ask(self.threads.index_writer, self.index.close)
            await self.wear.close()
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
            outcomes = await self._read(self._sources(loads, valid))
            bad = [loads[position] for position, outcome in outcomes.items() if outcome is not Read.OK]
            if bad and await self.device_reads(list(outcomes.values())):
                await self.drop([(load.digest + load.hash, load.record) for load in bad])
        for i, load in enumerate(loads):
            if load.used and outcomes.get(i) is Read.OK and self.table.owner(load.record) is not None:
                self.reinsertion.hit(load.record)
        # Asked again: a record that became void while it was read is not to be trusted.
        return [
            outcomes.get(i) is Read.OK and self.table.owner(load.record) is not None for i, load in enumerate(loads)
        ]

    async def drop(self, entries: Sequence[tuple[bytes, Record]]) -> None:
        """Remove records whose bytes are wrong, if they are there still, and tell of it."""
        owners = dict.fromkeys(self.table.owner(record) for _, record in entries)
        try:
            delta = await self.calls.call(self.threads.index_writer, self.index.remove_unchanged, entries)
        except DeviceError as error:
            self.doubt(error)
            return
        self.table.apply(delta)
        for tenant in owners:
            if tenant is not None:
                keys = [key for key, record in entries if self.table.owner(record) == tenant]
                report(self._notices.dropped, tenant, keys)

    # --- storing ---

    async def store(self, tenant: str, stores: Sequence[Store]) -> list[bool]:
        """Write blocks, make them durable and findable; see `LowerTier.store`."""
        with self.use():
            return await self._store(tenant, stores)

    async def _store(self, tenant: str, stores: Sequence[Store]) -> list[bool]:
        locks = locks_for(self.keys, tenant, stores)
        if locks is None:  # not one of its blocks goes there as it is
            self.counts["store_locked_blocks"] += len(stores)
            return [False] * len(stores)
        with self.keys.use(tenant):
            return await self._store_with(tenant, stores, locks)

    async def _store_with(self, tenant: str, stores: Sequence[Store], locks: Sequence[Lock]) -> list[bool]:
        placed = await self._reserve(tenant, stores, sealed=bool(locks))
        delta: dict[int, tuple[int, int]] = {}
        written: Mapping[int, bytes] = {}
        try:
            written = await self._write(placed, locks)
            if self.no_room:  # before the index has to grow
                await self.release()
            durable = with_seals(placed, written, sealed=bool(locks))
            self.end_agenda.note_all((p.extent, p.store.expiry) for p in durable)
            if durable:
                insert, opens = (
                    self.wear.measured(self.index.insert),
                    self.keys.opens if self.directory.sealed else None,
                )
                delta = await self.calls.call(self.threads.index_writer, insert, tenant, durable, self._wall(), opens)
        except DeviceError as error:
            self.doubt(error)
            written = {}
        finally:
            self.table.settle(placed, delta)
        self.counts["store_failed_blocks"] += len(placed) - len(written)
        self.counts["store_no_room_blocks"] += len(stores) - len(placed)
        await self._seal_full()
        if tenant in self._begun:
            self._begun.discard(tenant)
            self.reinsertion.began(tenant)
        return [i in written for i in range(len(stores))]

    async def _reserve(self, tenant: str, stores: Sequence[Store], *, sealed: bool) -> list[Placed]:
        placed: list[Placed] = []
        async with self.reserving:
            while self.health is Health.OK:
                placed += self.table.place(tenant, stores[len(placed) :], sealed=sealed)
                if len(placed) == len(stores) or not await self._make_ready(tenant, sealed=sealed):
                    break
        return placed

    async def recycle_oldest(self, tenant: str) -> bool:
        """Drop the blocks in the tenant's oldest extent; False where there is none that can go."""
        with self.use():
            async with self.reserving:
                return self.health is Health.OK and await self._made(self.recycler.recycle_oldest(tenant))

    async def _make_ready(self, tenant: str, *, sealed: bool) -> bool:
        made = await self._made(self.recycler.make_ready(tenant, sealed=sealed))
        if made:
            self._begun.add(tenant)
        return made

    async def _made(self, room: Awaitable[bool]) -> bool:
        try:
            return await room
        except DeviceError as error:
            self.recycler_failed(error)
            return False

    async def _seal_full(self) -> None:
        try:
            await self.recycler.seal_full()
        except DeviceError as error:
            self.recycler_failed(error)

    # --- the rest ---

    async def extend(self, entries: Sequence[tuple[bytes, Record, Expiry]]) -> None:
        """Give entries that are unchanged another end; where the index fails they keep the one that they have."""
        with self.use():
            try:
                await self.calls.ask(self.threads.index_writer, self.index.extend, entries)
            except DeviceError as error:
                self.doubt(error)

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

    async def forget(self, entries: Sequence[tuple[bytes, Record]]) -> tuple[int, int]:
        """Remove entries that are unchanged, without a note of it; blocks and bytes. Raises DeviceError."""
        if self.health is Health.OFF:
            return 0, 0
        with self.use():
            try:
                delta = await self.calls.ask(self.threads.index_writer, self.index.remove_unchanged, entries)
            except DeviceError as error:
                self.doubt(error)
                raise
            self.table.apply(delta)
        return -sum(blocks for _, blocks in delta.values()), -sum(size_bytes for size_bytes, _ in delta.values())

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

    async def forget_namespaces(self, tenant: str) -> None:
        """Keep none of a tenant's any longer; raises DeviceError."""
        digests = [namespace.digest for namespace in self.namespaces.values() if namespace.tenant == tenant]
        try:
            await self.calls.ask(self.threads.index_writer, self.index.forget_namespaces, digests)
        except DeviceError as error:
            self.doubt(error)
            raise
        for digest in digests:
            self.namespaces.pop(digest, None)

    async def sync(self) -> None:
        """Make the index durable once more, whatever it was opened with; raises DeviceError."""
        await self.calls.ask(self.threads.index_writer, self.index.sync)


def _nothing() -> None:
    """What a thread does to show that it is done with all before."""
