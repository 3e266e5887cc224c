"""The eviction orders there are, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from kvstored.policy.eviction import EvictionOrder, Lru
from kvstored.policy.levels import Heat, Lfu
from kvstored.policy.s3fifo import S3Fifo
from kvstored.policy.shelf_life import ShelfLife

OrderMaker = Callable[[], EvictionOrder]

ORDERS: Final[Mapping[str, OrderMaker]] = MappingProxyType(
    {"shelf_life": ShelfLife, "lru": Lru, "lfu": Lfu, "heat": Heat, "s3fifo": S3Fifo}
)


def make_order(name: str = "lru", *, heat_half_life: float | None = None) -> EvictionOrder:
    """A new, empty order by its name in the configuration; raises ValueError for an unknown name.

    `heat_half_life` is in turnovers, for `heat` alone.
    """
    make = ORDERS.get(name)
    if make is None:
        raise ValueError(f"eviction is {name!r}: it must be one of {', '.join(sorted(ORDERS))}")
    if name == "heat" and heat_half_life is not None:
        return Heat(heat_half_life)
    return make()
