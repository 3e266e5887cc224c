"""A plain leaf-first LRU cache of blocks: what the daemon's hit count is compared with.

Knows nothing of the daemon. Capacity is counted in blocks. A request finds its leading blocks
that are present; then the missing rest is stored. The whole chain is then the most recent,
its head newer than its tail, so that a parent always outlives its children.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class LeafFirstLru:
    """Leaf-first LRU over block ids."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._order: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def request(self, ids: Sequence[int]) -> int:
        """How many leading blocks were present; afterwards all that fit are."""
        hits = self._leading(ids)
        self._touch(ids[:hits])
        missing = [block for block in ids[hits:] if block not in self._order]
        stored = missing[: self._capacity_blocks - hits]  # the own prefix is never a victim
        self._evict(len(self._order) + len(stored) - self._capacity_blocks)
        self._order.update(dict.fromkeys(stored))
        self._touch([block for block in ids if block in self._order])
        return hits

    def _leading(self, ids: Sequence[int]) -> int:
        for count, block in enumerate(ids):
            if block not in self._order:
                return count
        return len(ids)

    def _touch(self, ids: Sequence[int]) -> None:
        for block in reversed(ids):
            self._order.move_to_end(block)

    def _evict(self, count: int) -> None:
        for _ in range(count):
            self._order.popitem(last=False)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._order


def simulate(requests: Sequence[Sequence[int]], capacity_blocks: int) -> list[int]:
    """Hits of each request in a plain leaf-first LRU cache."""
    cache = LeafFirstLru(capacity_blocks)
    return [cache.request(ids) for ids in requests]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first element that differs, or -1."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), -1)
