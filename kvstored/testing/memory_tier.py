"""A lower tier in memory: what tests of the store, the mover and the promoter stand on.

Faults are switches: `fail_loads`, `fail_stores`, `health`. `gate` holds every load and store
until it is set, so that a test can look at what is under way.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence

from kvstored.keys import Namespace, slot_bytes
from kvstored.tiers.base import Health, Load, Location, PathStatus, Record, Store, Usage


class MemoryTier:
    """A `LowerTier` whose blocks are bytes in a dict."""

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self.capacity_bytes = capacity_bytes
        self.blocks: dict[tuple[bytes, bytes], tuple[str, Record, bytes]] = {}
        self.pins: Counter[int] = Counter()  # by the record's offset
        self.fail_loads = self.fail_stores = False
        self.health = Health.OK
        self.stuck = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: Counter[str] = Counter()
        self.loaded: list[bytes] = []
        self.evictions: dict[tuple[bytes, bytes], float] = {}
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
            found = record if owner == tenant else None
            if found is None and prefix:
                break
            records.append(found)
            if found is not None:
                self.pins[found.location.offset] += 1
        return records

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
        if (store.digest, store.hash) in self.blocks:
            return True
        size = slot_bytes(store.size_bytes)
        if self.fail_stores or self._used_bytes() + size > self.capacity_bytes:
            return False
        location = Location(0, 0, 1, self._next_offset)
        self._next_offset += size
        record = Record(location, store.size_bytes, store.content_hash, store.parent, 0.0)
        data = ctypes.string_at(store.address, store.size_bytes)
        self.blocks[store.digest, store.hash] = (tenant, record, data)
        return True

    async def delete(self, tenant: str, digest: bytes, hashes: Sequence[bytes]) -> int:
        """See `LowerTier`."""
        await asyncio.sleep(0)
        return sum(self.blocks.pop((digest, hash_), None) is not None for hash_ in hashes)

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

    def properties(self) -> dict[str, str]:
        """See `LowerTier`."""
        return {"path": "memory"}

    def paths(self) -> Sequence[PathStatus]:
        """See `LowerTier`."""
        return ()

    def counters(self) -> dict[str, int]:
        """See `LowerTier`."""
        return dict(self.calls)
