"""The eviction orders there are, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from kvstored.policy.eviction import EvictionOrder, Lru
from kvstored.policy.heat import Heat
from kvstored.policy.levels import Lfu
from kvstored.policy.s3fifo import S3Fifo
from kvstored.policy.shelf_life import ShelfLife

OrderMaker = Callable[[], EvictionOrder]

ORDERS: Final[Mapping[str, OrderMaker]] = MappingProxyType(
    {"shelf_life": ShelfLife, "lru": Lru, "lfu": Lfu, "heat": Heat, "s3fifo": S3Fifo}
)


class OrderSettings(msgspec.Struct, frozen=True):
    """Which orders are made, and with what; calling it makes one. Raises ValueError for an unknown name."""

    name: str = "lru"
    heat_half_life: float = 1.0  # turnovers
    heat_demote_above: float = 0.0  # 0: no threshold
    heat_promote_from: float = 0.0

    def __call__(self) -> EvictionOrder:
        """A new, empty order."""
        return make_order(
            self.name,
            heat_half_life=self.heat_half_life,
            heat_demote_above=self.heat_demote_above,
            heat_promote_from=self.heat_promote_from,
        )


def make_order(
    name: str = "lru",
    *,
    heat_half_life: float | None = None,
    heat_demote_above: float = 0.0,
    heat_promote_from: float = 0.0,
) -> EvictionOrder:
    """A new, empty order by its name in the configuration; raises ValueError for an unknown name.

    `heat_half_life` (in turnovers) and the thresholds are for `heat` alone.
    """
    make = ORDERS.get(name)
    if make is None:
        raise ValueError(f"eviction is {name!r}: it must be one of {', '.join(sorted(ORDERS))}")
    if name == "heat":
        half_life = 1.0 if heat_half_life is None else heat_half_life
        return Heat(half_life, demote_above=heat_demote_above, promote_from=heat_promote_from)
    return make()
