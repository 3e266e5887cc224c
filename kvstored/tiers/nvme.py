"""The NVMe tier: blocks on one or more file systems, each an append-only log with its own index.

A call is spread over the volumes and awaited once. A volume that fails is read-only or off from
then on, and the others carry on. Nothing is kept in memory per block: the index is asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from kvstored.clock import Clock
from kvstored.device.file import FileDevice
from kvstored.errors import ConfigError, DeviceError
from kvstored.keys import Namespace, slot_bytes
from kvstored.tiers.base import Health, Load, PathStatus, Record, Store, Usage
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.formats import DIGEST_BYTES, footer_bytes, header_bytes
from kvstored.tiers.index import Index
from kvstored.tiers.nvme_config import NvmeConfig
from kvstored.tiers.opening import MakeIndex, VolumeOpener
from kvstored.tiers.recovery import VolumePath
from kvstored.tiers.recycling import Notices, OnEvicted
from kvstored.tiers.spread import scatter, spread_store
from kvstored.tiers.threads import Calls, MakePool, call_all, real_pool
from kvstored.tiers.volume import Volume

__all__ = ["NvmeConfig", "NvmeTier"]

_Key = tuple[bytes, bytes]
NAMESPACES_MAX: Final = 100_000
PAGE_RECORDS_MAX: Final = 8192


def _ignore(_tenant: str, _digest: bytes, _hashes: list[bytes]) -> None:
    """Nobody wants to know what was evicted."""


class NvmeTier:
    """A `LowerTier` on local file systems."""

    def __init__(
        self,
        config: NvmeConfig,
        device: FileDevice,
        clock: Clock,
        on_evicted: OnEvicted = _ignore,
        *,
        on_dropped: OnEvicted = _ignore,
        make_pool: MakePool = real_pool,
        make_index: MakeIndex = Index,
    ) -> None:
        self._config = config
        notices = Notices(on_evicted, on_dropped)
        self._opener = VolumeOpener(config, device, clock, notices, make_pool, make_index)
        self._known: dict[bytes, Namespace] = {}
        self._paths = [
            VolumePath(number, path, self._opener, clock, config.retry_s, self._known)
            for number, path in enumerate(config.paths)
        ]
        self._calls = Calls()
        self._counts: Counter[str] = Counter()
        self.stuck = False  # after `close`: a thread has not come back from a device

    # --- life ---

    async def open(self) -> None:
        """Open every path. One whose device fails is off, and said to be; the daemon lives on.

        Raises ConfigError where a setting is wrong or a path is in use by another daemon.
        """
        self._config.check()
        try:
            for path in self._paths:
                await path.open()
        except ConfigError:
            await self.close()
            raise
        for path in self._paths:
            path.watch()

    async def close(self) -> None:
        """Wait for calls under way, then let go of files, threads and directories. No calls after it.

        A call that its device does not end is not waited for beyond the deadline: `stuck` says so then.
        """
        timeout_s = self._config.io_deadline_s
        await self._calls.ended(timeout_s)
        closed = await asyncio.gather(*(path.close(timeout_s) for path in self._paths))
        self.stuck = self._opener.stuck or not all(closed)

    async def flush(self) -> None:
        """Return when every store begun before is durable; raises DeviceError."""
        if not await self._calls.ended(self._config.io_deadline_s):
            raise DeviceError("a call to a device has not ended in time")
        for volume in self._of_health(Health.OK):
            await volume.sync()

    async def look_after(self) -> None:
        """Look after every path now and not when its time has come: one that can come back does."""
        for path in self._paths:
            await path.step()

    @property
    def _volumes(self) -> dict[int, Volume]:
        """The open ones, by the number of their path."""
        return {path.number: path.volume for path in self._paths if path.volume is not None}

    # --- finding ---

    async def find(self, tenant: str, digest: bytes, hashes: Sequence[bytes], *, prefix: bool) -> list[Record | None]:
        """See `LowerTier.find`."""
        # A prefix may go on in another volume, so that only a lone one may stop at its first miss.
        alone = prefix and len(self._volumes) == 1
        finds = [volume.find(digest, hashes, prefix=alone) for volume in self._volumes.values()]
        records = self._merge(tenant, len(hashes), await asyncio.gather(*finds))
        if prefix and None in records:
            del records[records.index(None) :]
        for record in records:
            if record is not None:
                self._table(record).pin(record)
        return records

    def _merge(self, tenant: str, count: int, answers: Sequence[Sequence[Record | None]]) -> list[Record | None]:
        """For each hash the first valid record of this tenant that a volume answered."""
        records: list[Record | None] = [None] * count
        for found in answers:
            for i, record in enumerate(found):
                if record is not None and records[i] is None and self._owner(record) == tenant:
                    records[i] = record
        return records

    def unpin(self, records: Sequence[Record]) -> None:
        """See `LowerTier.unpin`."""
        for record in records:
            volume = self._paths[record.location.volume].volume
            if volume is not None:  # else: closed meanwhile
                volume.table.unpin(record)

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

    async def evicted_s(self, digest: bytes, hash_: bytes) -> float | None:
        """See `LowerTier.evicted_s`; a path that cannot be read knows of none."""
        times: list[float] = []
        for volume in list(self._volumes.values()):
            with suppress(DeviceError):
                found = await volume.evicted_s(digest + hash_)
                times += [] if found is None else [found]
        return max(times, default=None)

    # --- loading, storing, deleting ---

    async def load(self, loads: Sequence[Load]) -> list[bool]:
        """See `LowerTier.load`. Addresses are multiples of 4 KiB."""
        return await self._calls.to_its_end(self._load(loads))

    async def _load(self, loads: Sequence[Load]) -> list[bool]:
        positions: defaultdict[int, list[int]] = defaultdict(list)
        for i, load in enumerate(loads):
            positions[load.record.location.volume].append(i)
        volumes = self._volumes
        shares = [(volumes[number], chosen) for number, chosen in positions.items() if number in volumes]
        parts = await asyncio.gather(*(volume.load([loads[i] for i in chosen]) for volume, chosen in shares))
        return scatter(len(loads), [chosen for _, chosen in shares], parts)

    async def store(self, tenant: str, stores: Sequence[Store]) -> list[bool]:
        """See `LowerTier.store`. Addresses are multiples of 4 KiB, with room for the size rounded up to it."""
        return await self._calls.to_its_end(self._store(tenant, stores))

    async def _store(self, tenant: str, stores: Sequence[Store]) -> list[bool]:
        # Pinned: what is answered as being there already must not be recycled for the rest of this call.
        present = await self._find_present(tenant, stores)
        try:
            return await self._store_absent(tenant, stores, present)
        finally:
            self.unpin(list(present.values()))

    async def _store_absent(self, tenant: str, stores: Sequence[Store], present: Mapping[_Key, Record]) -> list[bool]:
        keys = [(store.digest, store.hash) for store in stores]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        wanted = sorted(i for key, i in first.items() if key not in present and self._fits(stores[i]))
        done = await spread_store(self._of_health(Health.OK), tenant, stores, wanted, self._config.share_blocks)
        stored = [stores[i].size_bytes for i in wanted if done[i]]
        self._counts.update(stored_blocks=len(stored), stored_bytes=sum(stored))
        self._counts["store_refused_blocks"] += len(wanted) - len(stored)
        return [key in present or done[first[key]] for key in keys]

    async def _find_present(self, tenant: str, stores: Sequence[Store]) -> dict[_Key, Record]:
        by_digest: defaultdict[bytes, dict[bytes, None]] = defaultdict(dict)
        for store in stores:
            by_digest[store.digest][store.hash] = None
        present: dict[_Key, Record] = {}
        for digest, hashes in by_digest.items():
            records = await self.find(tenant, digest, list(hashes), prefix=False)
            present.update(((digest, h), r) for h, r in zip(hashes, records, strict=True) if r is not None)
        return present

    async def delete(self, tenant: str, digest: bytes, hashes: Sequence[bytes]) -> int:
        """See `LowerTier.delete`; raises DeviceError where an entry may still be there.

        So it does while a path is off: what is deleted goes from there when it is back, but not if this process
        has ended by then. All others have done it.
        """
        return await self._calls.to_its_end(self._delete(tenant, digest, hashes))

    async def _delete(self, tenant: str, digest: bytes, hashes: Sequence[bytes]) -> int:
        volumes = [*self._of_health(Health.OK), *self._of_health(Health.READ_ONLY)]
        keys = [digest + hash_ for hash_ in hashes]
        off = [path for path in self._paths if path.volume not in volumes]
        for path in off:
            path.note_deletes(tenant, digest, hashes)
        outcomes = await call_all(volume.remove(tenant, keys) for volume in volumes)
        failed = {id(v): error for v, error in zip(volumes, outcomes, strict=True) if isinstance(error, DeviceError)}
        for path in (p for p in self._paths if id(p.volume) in failed):  # in doubt: no blocks until it is opened anew
            path.note_deletes(tenant, digest, hashes)
        for error in failed.values():
            raise error
        deleted = sum(outcome for outcome in outcomes if isinstance(outcome, int))
        self._counts["deleted_blocks"] += deleted
        if off:
            names = ", ".join(str(path.path) for path in off)
            raise DeviceError(f"{names} is off: what is deleted may come back from there: delete again when it is ok")
        return deleted

    # --- namespaces ---

    async def remember_namespace(self, tenant: str, digest: bytes, encoding: bytes, fields: dict[str, str]) -> None:
        """Keep what a digest stands for, so that the blocks of a namespace can be named after a restart."""
        namespace = Namespace(tenant, digest, encoding, fields)
        if len(self.namespaces()) < NAMESPACES_MAX:
            await self._calls.to_its_end(self._remember(namespace))

    async def _remember(self, namespace: Namespace) -> None:
        self._known[namespace.digest] = namespace
        await asyncio.gather(*(volume.remember(namespace) for volume in self._volumes.values()))

    def namespaces(self) -> list[Namespace]:
        """Every namespace that was remembered."""
        return list(self._known.values())

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
        return {f"path.{path.number}": path.status().describe() for path in self._paths}

    def paths(self) -> list[PathStatus]:
        """See `LowerTier.paths`."""
        return [path.status() for path in self._paths]

    def counters(self) -> dict[str, int]:
        """See `LowerTier.counters`."""
        return dict(sum((path.counts for path in self._paths), start=Counter(self._counts)))

    def _of_health(self, health: Health) -> list[Volume]:
        return [volume for volume in self._volumes.values() if volume.health is health]

    def _fits(self, store: Store) -> bool:
        return slot_bytes(store.size_bytes) + footer_bytes(header_bytes(store)) <= self._config.extent_bytes

    def _owner(self, record: Record) -> str | None:
        volume = self._paths[record.location.volume].volume  # None or off: closed while its index was asked
        return volume.table.owner(record) if volume is not None and volume.health is not Health.OFF else None

    def _table(self, record: Record) -> ExtentTable:
        volume = self._paths[record.location.volume].volume
        assert volume is not None, "found in it in this turn"
        return volume.table
