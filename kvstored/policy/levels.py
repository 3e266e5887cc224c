"""Orders by how much a block is used: least frequently used; `heat` builds on the same rings.

Nodes stand in rings, one a level; the lowest level goes first, and in a level the least
recently used. A use is a move to another ring, whatever the number of nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Final

from kvstored.policy.eviction import Node, Rings, around, ring

USES_MAX: Final = 1 << 16  # more make no difference to `Lfu`
LEVELS_MIN: Final = 64  # so many are kept, empty or not


class Levels(Rings):
    """Rings by level, and the heap of the levels that have one."""

    __slots__ = ("_heap", "_levels_max", "_rings")

    def __init__(self) -> None:
        super().__init__()
        self._levels_max = LEVELS_MIN
        self._rings: dict[int, Node] = {}
        self._heap: list[int] = []

    def _put(self, level: int, node: Node) -> None:
        sentinel = self._rings.get(level)
        if sentinel is None:
            if len(self._heap) >= self._levels_max:
                self._tidy()
            sentinel = self._rings[level] = ring()
            heapq.heappush(self._heap, level)
        self._append(sentinel, node)

    def _prune(self) -> None:
        """Forget the lowest levels as far as they are empty."""
        while self._heap:
            level = self._heap[0]
            sentinel = self._rings[level]
            if sentinel.next is not sentinel:
                return
            heapq.heappop(self._heap)
            del self._rings[level]

    def _tidy(self) -> None:
        """Forget all empty levels: above a block that nobody uses and nobody evicts they would gather for ever."""
        self._rings = {level: sentinel for level, sentinel in self._rings.items() if sentinel.next is not sentinel}
        self._heap = sorted(self._rings)
        self._levels_max = max(LEVELS_MIN, 2 * len(self._heap))

    def _level(self, mark: float) -> int:
        """Where a node with this mark stands."""
        raise NotImplementedError

    def mark_of(self, uses: int) -> float:
        """See `EvictionOrder`."""
        raise NotImplementedError

    def adopt_many(self, nodes: Sequence[tuple[Node, int]]) -> None:
        """See `EvictionOrder`."""
        for node, uses in nodes:
            node.mark = self.mark_of(uses)
            self._put(self._level(node.mark), node)

    def __iter__(self) -> Iterator[Node]:
        self._prune()
        if not self._heap:
            return
        yield from around(self._rings[self._heap[0]])
        for level in sorted(self._heap)[1:]:
            if level in self._rings:  # a walk in pieces may outlive it
                yield from around(self._rings[level])


class Lfu(Levels):
    """Least frequently used first. A node's mark is one more than its uses."""

    __slots__ = ()

    def touch_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        put = self._put
        for node in nodes:
            mark = int(node.mark) or 1
            node.mark = mark = mark + 1 if mark < USES_MAX else mark
            put(mark, node)

    def enter_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        put = self._put
        for node in nodes:
            node.mark = mark = int(node.mark) or 1
            put(mark, node)

    def _level(self, mark: float) -> int:
        return int(mark)

    def uses(self, node: Node) -> int:
        """See `EvictionOrder`."""
        return max(0, int(node.mark) - 1)

    def mark_of(self, uses: int) -> float:
        """See `EvictionOrder`."""
        return 1 + min(uses, USES_MAX - 1)
