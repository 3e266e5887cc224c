"""The NVMe tier: blocks on one or more file systems, each an append-only log with its own index.

A call is spread over the volumes and awaited once. A volume that fails is read-only or off from
then on, and the others carry on. Nothing is kept in memory per block: the index is asked.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from kvstored.clock import Clock
from kvstored.device.file import FileDevice
from kvstored.errors import ConfigError, DeviceError
from kvstored.keys import Namespace, slot_bytes
from kvstored.tiers.base import Allotment, Health, Load, Record, Store, Told, Wiped
from kvstored.tiers.end_sweep import EndSweep, outlives
from kvstored.tiers.epochs import Epochs
from kvstored.tiers.formats import footer_bytes, header_bytes
from kvstored.tiers.index import Index
from kvstored.tiers.nvme_config import NvmeConfig
from kvstored.tiers.nvme_finding import NvmeFinding
from kvstored.tiers.opening import MakeIndex, VolumeOpener
from kvstored.tiers.recovery import VolumePath
from kvstored.tiers.recycling import Notices, OnEvicted, ignore
from kvstored.tiers.spread import scatter, spread_store
from kvstored.tiers.tenant_parts import TenantParts
from kvstored.tiers.threads import Calls, MakePool, call_all, real_pool
from kvstored.tiers.volume import Volume
from kvstored.tiers.wiping import wipe_paths

__all__ = ["NvmeConfig", "NvmeTier"]

_Key = tuple[bytes, bytes]
NAMESPACES_MAX: Final = 100_000


class NvmeTier(NvmeFinding):
    """A `LowerTier` on local file systems."""

    def __init__(
        self,
        config: NvmeConfig,
        device: FileDevice,
        clock: Clock,
        on_evicted: OnEvicted = ignore,
        *,
        on_dropped: OnEvicted = ignore,
        make_pool: MakePool = real_pool,
        make_index: MakeIndex = Index,
        allotment: Allotment | None = None,
        epochs: Epochs | None = None,
        on_expired: OnEvicted = ignore,
    ) -> None:
        super().__init__(clock)
        self._config = config
        notices = Notices(on_evicted, on_dropped)
        self.tenants = TenantParts(lambda: self._volumes.values(), allotment)
        self.barred = self.keys.barred
        ours = (self.tenants.choose, self.keys, self._meters)
        self._opener = VolumeOpener(config, device, clock, notices, make_pool, make_index, *ours)
        self._opener.claim, self._opener.settle = self.tenants.claim, self.tenants.settle
        self._known: dict[bytes, Namespace] = {}
        self._paths = [
            VolumePath(number, path, self._opener, clock, config.retry_s, self._known, epochs or Epochs())
            for number, path in enumerate(config.paths)
        ]
        self.keys.paths = self._paths
        self._calls = Calls()
        self.sweep = EndSweep(self.ends, lambda: self._volumes.values(), on_expired)
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
        self.sweep.start()

    async def close(self) -> None:
        """Wait for calls under way, then let go of files, threads and directories. No calls after it.

        A call that its device does not end is not waited for beyond the deadline: `stuck` says so then.
        """
        timeout_s = self._config.io_deadline_s
        self.sweep.stop()
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
            await self._prolong(stores, present)
            return await self._store_absent(tenant, stores, present)
        finally:
            self.unpin(list(present.values()))

    async def _prolong(self, stores: Sequence[Store], present: Mapping[_Key, Record]) -> None:
        """What is there, and was used since, ends as late as its copy above."""
        later = [(key, r, s.expiry) for s in stores if (r := present.get(key := (s.digest, s.hash))) and outlives(s, r)]
        for number, volume in self._volumes.items():
            mine = [(digest + hash_, r, e) for (digest, hash_), r, e in later if e and r.location.volume == number]
            if mine:
                await volume.extend(mine)

    async def _store_absent(self, tenant: str, stores: Sequence[Store], present: Mapping[_Key, Record]) -> list[bool]:
        keys = [(store.digest, store.hash) for store in stores]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        wanted = sorted(i for key, i in first.items() if key not in present and self._fits(stores[i]))
        fitting, charged = await self.tenants.charge(tenant, stores, wanted)
        try:
            done = await spread_store(self._of_health(Health.OK), tenant, stores, fitting, self._config.share_blocks)
        finally:
            self.tenants.settle(tenant, charged)
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
            records, ended = await self._find(tenant, digest, list(hashes), prefix=False)
            present.update(((digest, h), r) for h, r in zip(hashes, records, strict=True) if r is not None)
            if ended:  # what is there still would not be stored again
                await self._forget(digest, ended)
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
            path.note_deletes(tenant, keys)
        outcomes = await call_all(path.remove(tenant, keys) for path in self._paths if path not in off)
        for error in (outcome for outcome in outcomes if isinstance(outcome, DeviceError)):
            raise error
        deleted = sum(outcome for outcome in outcomes if isinstance(outcome, int))
        self._counts["deleted_blocks"] += deleted
        if off:
            names = ", ".join(str(path.path) for path in off)
            raise DeviceError(f"{names} is off: what is deleted may come back from there: delete again when it is ok")
        return deleted

    async def trim(self, tenant: str) -> bool:
        """See `LowerTier.trim`: the tenant's oldest extent."""
        return await self._calls.to_its_end(self.tenants.trim(tenant))

    async def forget(self, digest: bytes, entries: Sequence[tuple[bytes, Record]]) -> tuple[int, int]:
        """See `LowerTier.forget`."""
        return await self._calls.to_its_end(self._forget(digest, entries))

    async def _forget(self, digest: bytes, entries: Sequence[tuple[bytes, Record]]) -> tuple[int, int]:
        shares: defaultdict[int, list[tuple[bytes, Record]]] = defaultdict(list)
        for hash_, record in entries:
            shares[record.location.volume].append((digest + hash_, record))
        volumes = self._volumes
        calls = [volumes[number].forget(share) for number, share in shares.items() if number in volumes]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        done = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        return sum(blocks for blocks, _ in done), sum(size_bytes for _, size_bytes in done)

    async def wipe(self, tenants: Collection[str], told: Told, *, erased: Collection[str] = ()) -> Wiped:
        """See `LowerTier.wipe`."""
        return await wipe_paths(self._paths, tenants, self._calls, told, erased)

    # --- namespaces ---

    async def remember_namespace(self, tenant: str, digest: bytes, encoding: bytes, fields: dict[str, str]) -> None:
        """Keep what a digest stands for, so that the blocks of a namespace can be named after a restart."""
        namespace = Namespace(tenant, digest, encoding, fields)
        if len(self.namespaces()) < NAMESPACES_MAX:
            await self._calls.to_its_end(self._remember(namespace))

    async def _remember(self, namespace: Namespace) -> None:
        self._known[namespace.digest] = namespace
        await asyncio.gather(*(volume.remember(namespace) for volume in self._volumes.values()))

    async def forget_namespaces(self, tenant: str) -> None:
        """See `LowerTier.forget_namespaces`."""
        off = [path.path for path in self._paths if path.volume is None or path.volume.health is not Health.OK]
        if off:
            raise DeviceError(f"{off[0]}: names of namespaces cannot be taken away there now")
        for path in self._paths:
            assert path.volume is not None, "looked at above"
            await self._calls.to_its_end(path.volume.forget_namespaces(tenant))
        self._known = {digest: known for digest, known in self._known.items() if known.tenant != tenant}

    async def remember_epochs(self) -> None:
        """See `LowerTier.remember_epochs`; a path that is off learns of them before it is used again."""
        outcomes = await self._calls.to_its_end(call_all(path.write_epochs() for path in self._paths))
        for error in outcomes:
            if error is not None:
                raise error

    def namespaces(self) -> list[Namespace]:
        """Every namespace that was remembered."""
        return list(self._known.values())

    def _of_health(self, health: Health) -> list[Volume]:
        return [volume for volume in self._volumes.values() if volume.health is health]

    def _fits(self, store: Store) -> bool:
        return (
            slot_bytes(store.size_bytes) + footer_bytes(header_bytes(store, sealed=True)) <= self._config.extent_bytes
        )
