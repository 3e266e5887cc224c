"""The NVMe tier: blocks on one or more file systems, each an append-only log with its own index.

A call is spread over the volumes and awaited once. A volume that fails is read-only or off from
then on, and the others carry on. Nothing is kept in memory per block: the index is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kvstored.clock import Clock
from kvstored.device.file import FileDevice
from kvstored.errors import ConfigError, DeviceError
from kvstored.keys import Namespace
from kvstored.tiers.base import Health, Load, Record, Store, Usage
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.formats import DIGEST_BYTES
from kvstored.tiers.index import Index
from kvstored.tiers.nvme_config import NvmeConfig
from kvstored.tiers.recycling import OnEvicted
from kvstored.tiers.threads import VolumeThreads, call
from kvstored.tiers.volume import Volume

__all__ = ["NvmeConfig", "NvmeTier"]

T = TypeVar("T")
NAMESPACES_MAX: Final = 100_000
PAGE_RECORDS_MAX: Final = 8192
_log = logging.getLogger(__name__)


def _ignore(_tenant: str, _digest: bytes, _hashes: list[bytes]) -> None:
    """Nobody wants to know what was evicted."""


class NvmeTier:
    """A `LowerTier` on local file systems."""

    def __init__(self, config: NvmeConfig, device: FileDevice, clock: Clock, on_evicted: OnEvicted = _ignore) -> None:
        self._config = config
        self._device = device
        self._clock = clock
        self._on_evicted = on_evicted
        self._volumes: dict[int, Volume] = {}
        self._absent: dict[int, str] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._counts: Counter[str] = Counter()

    # --- life ---

    async def open(self) -> None:
        """Open every path. One whose device fails is off, and said to be; the daemon lives on.

        Raises ConfigError where a setting is wrong or a path is in use by another daemon.
        """
        self._config.check()
        try:
            for number, path in enumerate(self._config.paths):
                try:
                    self._volumes[number] = await self._open(number, path)
                except DeviceError as error:
                    self._absent[number] = str(error)
                    _log.error("%s is off: %s", path, error)
        except ConfigError:
            await self.close()
            raise

    async def _open(self, number: int, path: Path) -> Volume:
        config = self._config
        directory = VolumeDirectory(self._device, path, open_files_max=config.open_files_max)
        threads = VolumeThreads(number, config.threads())
        index = Index(directory.index, number, config.index_map_bytes)
        try:
            require = config.require_direct_io
            await call(threads.stores, directory.open, config.extent_bytes, require_direct_io=require)
            await call(threads.index_writer, index.open)
            rows = await call(threads.index_reader, index.rows)
            namespaces = await call(threads.index_reader, index.namespaces)
        except BaseException:
            index.close()
            directory.close()
            threads.stop()
            raise
        table = ExtentTable(config.extent_bytes, config.capacity_bytes // config.extent_bytes, rows)
        run_bytes, clock, on_evicted = config.run_bytes, self._clock, self._on_evicted
        volume = Volume(directory, table, index, namespaces, threads, run_bytes, clock, on_evicted)
        await volume.settle()
        return volume

    async def close(self) -> None:
        """Wait for calls under way, then let go of files, threads and directories. No calls after it."""
        while self._calls:
            await asyncio.wait(self._calls)
        while self._volumes:
            await self._volumes.popitem()[1].close()

    async def flush(self) -> None:
        """Return when every store begun before is durable; raises DeviceError."""
        if self._calls:
            await asyncio.wait(set(self._calls))
        for volume in self._of_health(Health.OK):
            await volume.sync()

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that goes on to its end when the caller is cancelled, who then waits for it."""
        task = asyncio.ensure_future(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                try:
                    await asyncio.wait([task])
                except asyncio.CancelledError:
                    continue
            raise

    # --- finding ---

    async def find(self, tenant: str, digest: bytes, hashes: Sequence[bytes], *, prefix: bool) -> list[Record | None]:
        """See `LowerTier.find`."""
        records = await self._records(tenant, digest, hashes, prefix=prefix)
        for record in records:
            if record is not None:
                self._table(record).pin(record)
        return records

    async def _records(
        self, tenant: str, digest: bytes, hashes: Sequence[bytes], *, prefix: bool
    ) -> list[Record | None]:
        # A prefix may go on in another volume, so that only a lone one may stop at its first miss.
        alone = prefix and len(self._volumes) == 1
        finds = [volume.find(digest, hashes, prefix=alone) for volume in self._volumes.values()]
        records: list[Record | None] = [None] * len(hashes)
        for found in await asyncio.gather(*finds):
            for i, record in enumerate(found):
                if record is not None and records[i] is None and self._table(record).owner(record) == tenant:
                    records[i] = record
        if prefix and None in records:
            del records[records.index(None) :]
        return records

    def unpin(self, records: Sequence[Record]) -> None:
        """See `LowerTier.unpin`."""
        for record in records:
            self._table(record).unpin(record)

    async def list_records(
        self, digest: bytes | None, cursor: bytes, limit: int
    ) -> tuple[list[tuple[bytes, bytes, Record]], bytes]:
        """A page of at most `limit` valid records (digest, hash, record), of one namespace or of all.

        `cursor` is empty at first and then what the last call returned, which is empty at the
        end. A page may be short, or empty, before that. Raises DeviceError.
        """
        limit = min(limit, PAGE_RECORDS_MAX)
        start, after = (cursor[0], cursor[1:]) if cursor else (0, b"")
        for number, volume in sorted(self._volumes.items()):
            if number < start or volume.health is Health.OFF:
                continue
            page = await volume.page(digest or b"", after if number == start else b"", limit)
            if page:
                valid = [(k[:DIGEST_BYTES], k[DIGEST_BYTES:], r) for k, r in page if volume.table.owner(r) is not None]
                return valid, bytes([number]) + page[-1][0]
        return [], b""

    # --- loading, storing, deleting ---

    async def load(self, loads: Sequence[Load]) -> list[bool]:
        """See `LowerTier.load`. Addresses are multiples of 4 KiB."""
        return await self._to_its_end(self._load(loads))

    async def _load(self, loads: Sequence[Load]) -> list[bool]:
        positions: defaultdict[int, list[int]] = defaultdict(list)
        for i, load in enumerate(loads):
            positions[load.record.location.volume].append(i)
        shares = [(self._volumes[number], chosen) for number, chosen in positions.items()]
        parts = await asyncio.gather(*(volume.load([loads[i] for i in chosen]) for volume, chosen in shares))
        return _scatter(len(loads), [chosen for _, chosen in shares], parts)

    async def store(self, tenant: str, stores: Sequence[Store]) -> list[bool]:
        """See `LowerTier.store`. Addresses are multiples of 4 KiB, with room for the size rounded up to it."""
        return await self._to_its_end(self._store(tenant, stores))

    async def _store(self, tenant: str, stores: Sequence[Store]) -> list[bool]:
        keys = [(store.digest, store.hash) for store in stores]
        present = await self._present(tenant, stores)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        wanted = sorted(i for key, i in first.items() if key not in present)
        shares = self._share(wanted)
        parts = await asyncio.gather(*(volume.store(tenant, [stores[i] for i in share]) for volume, share in shares))
        done = _scatter(len(stores), [share for _, share in shares], parts)
        stored = [stores[i].size_bytes for i in wanted if done[i]]
        self._counts.update(stored_blocks=len(stored), stored_bytes=sum(stored))
        return [key in present or done[first[key]] for key in keys]

    async def _present(self, tenant: str, stores: Sequence[Store]) -> set[tuple[bytes, bytes]]:
        by_digest: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for store in stores:
            by_digest[store.digest].append(store.hash)
        present: set[tuple[bytes, bytes]] = set()
        for digest, hashes in by_digest.items():
            records = await self._records(tenant, digest, hashes, prefix=False)
            present.update((digest, h) for h, record in zip(hashes, records, strict=True) if record is not None)
        return present

    def _share(self, positions: Sequence[int]) -> list[tuple[Volume, Sequence[int]]]:
        """Consecutive blocks for each volume, the one with the most room first."""
        volumes = sorted(self._of_health(Health.OK), key=lambda v: -v.table.usage().free_bytes)
        count = min(len(volumes), -(-len(positions) // self._config.share_blocks))
        if not count:
            return []
        size = -(-len(positions) // count)
        return [(volumes[i], positions[i * size : (i + 1) * size]) for i in range(count)]

    async def delete(self, tenant: str, digest: bytes, hashes: Sequence[bytes]) -> int:
        """See `LowerTier.delete`; raises DeviceError where an entry may still be there."""
        return await self._to_its_end(self._delete(tenant, digest, hashes))

    async def _delete(self, tenant: str, digest: bytes, hashes: Sequence[bytes]) -> int:
        volumes = [*self._of_health(Health.OK), *self._of_health(Health.READ_ONLY)]
        deleted = sum(await asyncio.gather(*(volume.remove(tenant, digest, hashes) for volume in volumes)))
        self._counts["deleted_blocks"] += deleted
        return deleted

    # --- namespaces ---

    async def remember_namespace(self, tenant: str, digest: bytes, encoding: bytes, fields: dict[str, str]) -> None:
        """Keep what a digest stands for, so that the blocks of a namespace can be named after a restart."""
        namespace = Namespace(tenant, digest, encoding, fields)
        if len(self.namespaces()) < NAMESPACES_MAX:
            await self._to_its_end(self._remember(namespace))

    async def _remember(self, namespace: Namespace) -> None:
        await asyncio.gather(*(volume.remember(namespace) for volume in self._volumes.values()))

    def namespaces(self) -> list[Namespace]:
        """Every namespace that was remembered."""
        return list({n.digest: n for volume in self._volumes.values() for n in volume.namespaces.values()}.values())

    # --- status ---

    def usage(self) -> Usage:
        """See `LowerTier.usage`; a path that is off has no capacity."""
        parts = [msgspec.structs.astuple(volume.table.usage()) for volume in self._volumes.values()]
        return Usage(*map(sum, zip(*parts, strict=True))) if parts else Usage(0, 0, 0, 0, 0, 0)

    def audit(self) -> None:
        """Recount the account of every volume; AssertionError where it is wrong."""
        for volume in self._volumes.values():
            volume.table.audit()

    def tenant_usage(self) -> Mapping[str, tuple[int, int]]:
        """See `LowerTier.tenant_usage`."""
        totals: dict[str, tuple[int, int]] = {}
        for volume in self._volumes.values():
            for tenant, (bytes_, blocks) in volume.table.tenant_usage().items():
                before = totals.get(tenant, (0, 0))
                totals[tenant] = (before[0] + bytes_, before[1] + blocks)
        return totals

    @property
    def health(self) -> Health:
        """The best that any path can do."""
        found = {volume.health for volume in self._volumes.values()}
        return next((health for health in (Health.OK, Health.READ_ONLY) if health in found), Health.OFF)

    def properties(self) -> dict[str, str]:
        """See `LowerTier.properties`: one line for every path."""
        lines = {}
        for number, path in enumerate(self._config.paths):
            volume = self._volumes.get(number)
            state = _describe(volume) if volume else f"off: {self._absent.get(number, 'not open')}"
            lines[f"path.{number}"] = f"{path}: {state}"
        return lines

    def counters(self) -> dict[str, int]:
        """See `LowerTier.counters`."""
        return dict(sum((volume.counts for volume in self._volumes.values()), start=Counter(self._counts)))

    def _of_health(self, health: Health) -> list[Volume]:
        return [volume for volume in self._volumes.values() if volume.health is health]

    def _table(self, record: Record) -> ExtentTable:
        return self._volumes[record.location.volume].table


def _describe(volume: Volume) -> str:
    health = volume.health.value + (f" ({volume.reason})" if volume.reason else "")
    return f"{health}, {'direct I/O' if volume.directory.direct else 'buffered, the file system refuses direct I/O'}"


def _scatter(count: int, positions: Sequence[Sequence[int]], parts: Sequence[Sequence[bool]]) -> list[bool]:
    """Results of shares, back in the order of the whole."""
    results = [False] * count
    for chosen, part in zip(positions, parts, strict=True):
        for position, result in zip(chosen, part, strict=True):
            results[position] = result
    return results
