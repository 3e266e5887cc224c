"""What each tenant has on NVMe, in all volumes together, and whose extent is recycled for whom.

What counts are the bytes of records, rounded up to 4 KiB, that are alive or being written. A store charges what it
is about to write before it writes it, so that a limit holds at any instant, however many stores run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstored.keys import slot_bytes
from kvstored.tiers.base import Allotment, NoAllotment, Store
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.formats import State
from kvstored.tiers.one_extent import Extent
from kvstored.tiers.volume import Volume

# A tenant needs no more extents than its guarantee fills, one that is filled in part, and the one it writes to.
EXTENTS_BESIDE: Final = 2


class TenantParts:
    """The account of all tenants over the volumes that are open, and what follows from it."""

    def __init__(self, volumes: Callable[[], Iterable[Volume]], allotment: Allotment | None = None) -> None:
        self._volumes = volumes
        self._allotment: Allotment = allotment or NoAllotment()
        self._charged: Counter[str] = Counter()  # by stores that run
        self._trimming = asyncio.Lock()

    # ---- how much ----

    def used_bytes_of(self, tenant: str) -> int:
        """Bytes of records alive and being written: what a limit counts. Recounted: for audits."""
        extents = (extent for table in self._tables() for extent in table.extents)
        return sum(extent.live_bytes + extent.writing_bytes for extent in extents if extent.tenant == tenant)

    def charged_bytes_of(self, tenant: str) -> int:
        """The same at the most: what a store has charged counts until it has ended."""
        return sum(table.live_bytes_of(tenant) for table in self._tables()) + self._charged[tenant]

    async def charge(self, tenant: str, stores: Sequence[Store], wanted: Sequence[int]) -> tuple[list[int], int]:
        """The positions that the tenant's limit has room for, once its oldest blocks went, and the bytes charged."""
        sizes = [slot_bytes(stores[i].size_bytes) for i in wanted]
        if self._room(tenant, sum(sizes)) < sum(sizes):
            async with self._trimming:
                await self._make_room(tenant, sum(sizes))
        room = self._room(tenant, sum(sizes))
        taken: list[int] = []
        charged = 0
        for i, size in zip(wanted, sizes, strict=True):
            if charged + size > room:
                break
            taken.append(i)
            charged += size
        self._charged[tenant] += charged
        return taken, charged

    def claim(self, tenant: str, size_bytes: int) -> int:
        """Charge what a block takes while it lies in two places, as far as the limit has room; nothing goes for it."""
        charged_bytes = self._room(tenant, size_bytes)
        self._charged[tenant] += charged_bytes
        return charged_bytes

    def settle(self, tenant: str, charged_bytes: int) -> None:
        """A store has ended: what of it is alive is in the account of its volume."""
        self._charged[tenant] -= charged_bytes
        if not self._charged[tenant]:
            del self._charged[tenant]

    async def trim(self, tenant: str) -> bool:
        """Recycle one extent of a tenant that is over its limit. False: it is not, or none can go at present."""
        async with self._trimming:
            over = self._room(tenant, 1) < 1 and self._allotment.excess(tenant, self.charged_bytes_of(tenant)) > 0
            return over and await self._recycle_oldest(tenant)

    async def _make_room(self, tenant: str, wanted_bytes: int) -> None:
        # Beyond its limit, emptied, nothing helps.
        wanted_bytes = min(wanted_bytes, self._allotment.room(tenant, self._charged[tenant], wanted_bytes))
        while self._room(tenant, wanted_bytes) < wanted_bytes:
            if not await self._recycle_oldest(tenant):
                break

    async def _recycle_oldest(self, tenant: str) -> bool:
        """Of the volume that has most of the tenant's bytes the oldest extent."""
        volumes = sorted(self._volumes(), key=lambda volume: -volume.table.live_bytes_of(tenant))
        for volume in volumes:
            if volume.table.live_bytes_of(tenant) and await volume.recycle_oldest(tenant):
                return True
        return False

    def _room(self, tenant: str, wanted_bytes: int) -> int:
        return self._allotment.room(tenant, self.charged_bytes_of(tenant), wanted_bytes)

    def _tables(self) -> list[ExtentTable]:
        return [volume.table for volume in self._volumes()]

    # ---- whose ----

    def choose(self, tenant: str, candidates: Sequence[Extent]) -> Extent | None:
        """The extent to recycle for a tenant of those that can be, the oldest first ("": the volume shrinks).

        Those with nothing alive go before all others; then those of tenants above their shares, the one most above
        it first; then the oldest of the tenant's own and of what is above others' guarantees.
        """
        empty = next((extent for extent in candidates if not extent.live_blocks), None)
        if empty is not None or not candidates:
            return empty
        tables = self._tables()
        used = self._lasting(tables)
        asking = {**used, tenant: used.get(tenant, 0) + self._charged[tenant]}
        for loser, spare_bytes in self._allotment.losers(tenant, asking, 0):
            for extent in candidates:
                if extent.tenant == loser and extent.live_bytes <= spare_bytes:
                    return extent
        spare = self._allotment.spare
        allowed = [e for e in candidates if e.tenant == tenant or e.live_bytes <= spare(e.tenant, used[e.tenant])]
        if not tenant:
            return next(iter(allowed), candidates[0])
        if self._allotment.entitled(tenant, asking[tenant], 0):
            others = [extent for extent in allowed if extent.tenant != tenant]
            allowed = others or self._scattered(tables, tenant, candidates) or allowed
        return next(iter(allowed), None)

    def _scattered(self, tables: Sequence[ExtentTable], tenant: str, candidates: Sequence[Extent]) -> list[Extent]:
        """Where guarantees are met but bytes lie in more extents than they need: those with least alive first."""
        with_blocks = (State.OPEN, State.FULL, State.SEALED)
        held = Counter(e.tenant for table in tables for e in table.extents if e.state in with_blocks)
        size = tables[0].extent_bytes
        needed = {name: -(-self._allotment.guaranteed(name) // size) + EXTENTS_BESIDE for name in held}
        found = [e for e in candidates if e.tenant != tenant and held[e.tenant] > needed[e.tenant]]
        return sorted(found, key=lambda extent: extent.live_bytes)

    def _lasting(self, tables: Sequence[ExtentTable]) -> Counter[str]:
        """Per tenant the bytes alive, without those whose extent is being recycled."""
        used: Counter[str] = Counter()
        for table in tables:
            used.update({tenant: bytes_ for tenant, (bytes_, _) in table.tenant_usage().items()})
            for extent in table.extents:
                if extent.state is State.RECYCLING:
                    used[extent.tenant] -= extent.live_bytes
        return used
