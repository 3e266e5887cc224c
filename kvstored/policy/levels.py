"""Orders by how much a block is used: least frequently used, and heat that decays.

Nodes stand in rings, one a level; the lowest level goes first, and in a level the least
recently used. A use is a move to another ring, whatever the number of nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from math import exp2, log2
from typing import Final

from kvstored.policy.eviction import Node, Rings, around, ring

USES_MAX: Final = 1 << 16  # more make no difference to `Lfu`
STEPS: Final = 8  # levels of `Heat` to a doubling
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


class Heat(Levels):
    """Coldest first: a use adds 1 to the heat of a block, and heat halves every half-life.

    The half-life is counted in turnovers of the order: one is as many blocks named to it as it
    holds, so that a setting fits a tier of any size and any load. Between uses all heats decay
    alike, so nothing needs to be walked: a node's mark is the half-lives passed until now plus
    log2 of its heat, and stays as it is until the next use.
    """

    __slots__ = ("_half_life", "_now")

    def __init__(self, half_life: float = 1.0) -> None:
        super().__init__()
        if not half_life > 0:
            raise ValueError(f"the half-life is {half_life}: it must be over 0 turnovers")
        self._half_life = half_life
        self._now = 1.0  # half-lives; over 0, so that no mark looks like that of a new node

    def touch_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        now, put = self._pass(len(nodes)), self._put
        for node in nodes:
            node.mark = mark = now + log2(1 + exp2(node.mark - now)) if node.mark else now
            put(int(mark * STEPS), node)

    def enter_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        now, put = self._pass(len(nodes)), self._put
        for node in nodes:
            # At least as warm as a new one: what it comes after may be its own children.
            node.mark = mark = max(node.mark, now)
            put(int(mark * STEPS), node)

    def _pass(self, named: int) -> float:
        self._now += named / (max(self._count, named) * self._half_life) if named else 0.0
        return self._now
