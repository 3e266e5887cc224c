"""A lower tier in memory: what tests of the store, the mover and the promoter stand on.

Faults are switches: `fail_loads`, `fail_stores`, `health`. `gate` holds every load and store
until it is set, so that a test can look at what is under way.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec.structs import replace

from kvstored.keys import Namespace, slot_bytes
from kvstored.tiers.base import (
    Allotment,
    Health,
    Load,
    Location,
    NoAllotment,
    PathStatus,
    Record,
    Store,
    Told,
    Usage,
    Wiped,
)
from kvstored.tiers.end_sweep import end_s, outlives
from kvstored.tiers.path_wear import PathWear


class MemoryTier:
    """A `LowerTier` whose blocks are bytes in a dict."""

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self.capacity_bytes = capacity_bytes
        self.blocks: dict[tuple[bytes, bytes], tuple[str, Record, bytes]] = {}
        self.pins: Counter[int] = Counter()  # by the record's offset
        self.fail_loads = self.fail_stores = False
        self.health = Health.OK
        self.stuck = False
        self.allotment: Allotment = NoAllotment()
        self.barred: set[str] = set()
        self.budget: tuple[int, int] | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: Counter[str] = Counter()
        self.loaded: list[bytes] = []
        self.evictions: dict[tuple[bytes, bytes], float] = {}
        self.max_age_of: Callable[[str], float] = lambda tenant: 0.0
        self.wall: Callable[[], float] = lambda: 0.0  # what ends are compared with
        self._namespaces: dict[bytes, Namespace] = {}
        self._next_offset = 0

    async def open(self) -> None:
        """See `LowerTier`."""

    async def close(self) -> None:
        """See `LowerTier`."""

    async def find(self, tenant: str, digest: bytes, hashes: Sequence[bytes], *, prefix: bool) -> list[Record | None]:
        """See `LowerTier`."""
        self.calls["find"] += 1
        await asyncio.sleep(0)
        records: list[Record | None] = []
        for hash_ in hashes:
            owner, record, _ = self.blocks.get((digest, hash_), ("", None, b""))
            found = record if owner == tenant and not self._over(record, tenant) else None
            if found is None and prefix:
                break
            records.append(found)
            if found is not None:
                self.pins[found.location.offset] += 1
        return records

    def _over(self, record: Record | None, tenant: str) -> bool:
        return record is not None and 0 < end_s(record, self.max_age_of(tenant)) <= self.wall()

    def unpin(self, records: Sequence[Record]) -> None:
        """See `LowerTier`."""
        for record in records:
            assert self.pins[record.location.offset] > 0, "unpinned more often than pinned"
            self.pins[record.location.offset] -= 1

    async def load(self, loads: Sequence[Load]) -> list[bool]:
        """See `LowerTier`."""
        self.calls["load"] += 1
        await self.gate.wait()
        await asyncio.sleep(0)
        return [self._load(load) for load in loads]

    def _load(self, load: Load) -> bool:
        found = self.blocks.get((load.digest, load.hash))
        if self.fail_loads or found is None:
            return False
        ctypes.memmove(load.address, found[2], len(found[2]))
        self.loaded.append(load.hash)
        return True

    async def store(self, tenant: str, stores: Sequence[Store]) -> list[bool]:
        """See `LowerTier`."""
        self.calls["store"] += 1
        await self.gate.wait()
        await asyncio.sleep(0)
        return [self._store(tenant, store) for store in stores]

    def _store(self, tenant: str, store: Store) -> bool:
        there = self.blocks.get((store.digest, store.hash))
        if there is not None and not self._over(there[1], tenant):
            later = outlives(store, there[1])
            expiry = store.expiry if later else there[1].expiry
            self.blocks[store.digest, store.hash] = (*there[:1], replace(there[1], expiry=expiry), *there[2:])
            return True
        size = slot_bytes(store.size_bytes)
        used = self.tenant_usage().get(tenant, (0, 0))[0]
        no_room = self._used_bytes() + size > self.capacity_bytes or self.allotment.room(tenant, used, size) < size
        if self.fail_stores or no_room:
            return False
        location = Location(0, 0, 1, self._next_offset)
        self._next_offset += size
        record = Record(location, store.size_bytes, store.content_hash, store.parent, self.wall(), expiry=store.expiry)
        data = ctypes.string_at(store.address, store.size_bytes)
        self.blocks[store.digest, store.hash] = (tenant, record, data)
        return True

    async def delete(self, tenant: str, digest: bytes, hashes: Sequence[bytes]) -> int:
        """See `LowerTier`."""
        await asyncio.sleep(0)
        return sum(self.blocks.pop((digest, hash_), None) is not None for hash_ in hashes)

    async def forget(self, digest: bytes, entries: Sequence[tuple[bytes, Record]]) -> tuple[int, int]:
        """See `LowerTier`."""
        await asyncio.sleep(0)
        gone = [hash_ for hash_, record in entries if self.blocks.get((digest, hash_), ("", None, b""))[1] == record]
        sizes = [slot_bytes(self.blocks.pop((digest, hash_))[1].size_bytes) for hash_ in gone]
        return len(sizes), sum(sizes)

    async def wipe(self, tenants: Collection[str], told: Told, *, erased: Collection[str] = ()) -> Wiped:
        """See `LowerTier`: what is not alive is not there."""
        self.calls["wipe"] += 1
        await self.gate.wait()
        told(1, 1, 0)
        return Wiped()

    async def evicted_s(self, digest: bytes, hash_: bytes) -> float | None:
        """See `LowerTier`: it has no capacity to evict for."""
        return self.evictions.get((digest, hash_))

    async def list_records(
        self, digest: bytes | None, cursor: bytes, limit: int
    ) -> tuple[list[tuple[bytes, bytes, Record]], bytes]:
        """See `LowerTier`."""
        keys = sorted(key for key in self.blocks if digest in (None, key[0]) and key[0] + key[1] > cursor)[:limit]
        page = [(key[0], key[1], self.blocks[key][1]) for key in keys]
        return page, keys[-1][0] + keys[-1][1] if len(keys) == limit else b""

    async def remember_namespace(self, tenant: str, digest: bytes, encoding: bytes, fields: dict[str, str]) -> None:
        """See `LowerTier`."""
        self._namespaces[digest] = Namespace(tenant, digest, encoding, fields)

    async def forget_namespaces(self, tenant: str) -> None:
        """See `LowerTier`."""
        self._namespaces = {digest: known for digest, known in self._namespaces.items() if known.tenant != tenant}

    def limit_ages(self, max_age_of: Callable[[str], float], now_s: Callable[[], float]) -> None:
        """See `LowerTier`."""
        self.max_age_of, self.wall = max_age_of, now_s

    async def remember_epochs(self) -> None:
        """See `LowerTier`: it does not outlive the process."""
        self.calls["remember_epochs"] += 1
        await asyncio.sleep(0)

    def namespaces(self) -> list[Namespace]:
        """See `LowerTier`."""
        return list(self._namespaces.values())

    def _used_bytes(self) -> int:
        return sum(slot_bytes(record.size_bytes) for _, record, _ in self.blocks.values())

    def usage(self) -> Usage:
        """See `LowerTier`."""
        used = self._used_bytes()
        return Usage(self.capacity_bytes, used, 0, 0, self.capacity_bytes - used, len(self.blocks))

    def tenant_usage(self) -> Mapping[str, tuple[int, int]]:
        """See `LowerTier`."""
        totals: dict[str, tuple[int, int]] = {}
        for tenant, record, _ in self.blocks.values():
            used, count = totals.get(tenant, (0, 0))
            totals[tenant] = (used + slot_bytes(record.size_bytes), count + 1)
        return totals

    async def trim(self, tenant: str) -> bool:
        """See `LowerTier`: the tenant's oldest block."""
        used = self.tenant_usage().get(tenant, (0, 0))[0]
        mine = next((key for key, (owner, _, _) in self.blocks.items() if owner == tenant), None)
        if mine is None or not self.allotment.excess(tenant, used):
            return False
        await asyncio.sleep(0)
        self.blocks.pop(mine, None)
        return True

    def properties(self) -> dict[str, str]:
        """See `LowerTier`."""
        return {"path": "memory"}

    def paths(self) -> Sequence[PathStatus]:
        """See `LowerTier`."""
        return ()

    def wear(self) -> Sequence[PathWear]:
        """See `LowerTier`: memory does not wear."""
        return ()

    def write_budget(self) -> tuple[int, int] | None:
        """See `LowerTier`."""
        return self.budget

    def counters(self) -> dict[str, int]:
        """See `LowerTier`."""
        return dict(self.calls)
