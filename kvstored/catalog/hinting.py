"""Which eviction orders have a `Hinted` in front: those of pools in which some block was hinted, from then on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvstored.catalog.catalog import Catalog
from kvstored.policy.hinted import Hinted
from kvstored.policy.hints import HARD, Trust


class Hinting:
    """All hinted pools, by tenant and slot size."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._hinted: dict[tuple[str, int], Hinted] = {}
        self.trust: defaultdict[str, Trust] = defaultdict(Trust)  # per tenant

    def of(self, tenant: str, slot_size: int) -> Hinted | None:
        """The hinted order of a pool, put in front of its order at first use; None while orders are replaced."""
        key = (tenant, slot_size)
        found = self._hinted.get(key)
        if found is None and not self._catalog.changing:
            order = self._catalog.order(*key)
            found = self._hinted[key] = self._catalog.orders[key] = Hinted(order, self.trust[tenant])
            for space in (*self._catalog.spaces.values(), *self._catalog.retired):
                for pool in space.pools.values():
                    if pool.order is order:
                        pool.order = found
        return found

    def forget(self, tenant: str) -> None:
        """The tenant has gone with all of its blocks and orders; another of its name begins without."""
        self._hinted = {key: hinted for key, hinted in self._hinted.items() if key[0] != tenant}
        self.trust.pop(tenant, None)

    def of_tenant(self, tenant: str) -> Iterator[tuple[int, Hinted]]:
        """Slot sizes and orders of one tenant's hinted pools."""
        return ((size, hinted) for (owner, size), hinted in list(self._hinted.items()) if owner == tenant)

    def __iter__(self) -> Iterator[tuple[str, int, Hinted]]:
        return ((owner, size, hinted) for (owner, size), hinted in list(self._hinted.items()))

    def hard_bytes(self, tenant: str) -> int:
        """Bytes of the slots that a tenant's hard pins keep."""
        return sum(size * hinted.counts[HARD] for size, hinted in self.of_tenant(tenant))
