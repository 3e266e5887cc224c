"""Shelf life: how long a block is kept unused depends on how often it was seen, and that is learned."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from math import inf
from typing import Final

from kvstored.policy.eviction import Node, Rings, around, ring
from kvstored.policy.returns import EQUAL, LEVELS, Lives, Returns

GHOSTS_PER_BLOCK: Final = 2  # in each of two generations, for each block that is there
GHOSTS_MAX: Final = 1 << 16  # in each as well: some 12 MB
LEARN_USES_MIN: Final = 4096  # between two looks at what is learned, which take about a millisecond
MEMORY: Final = 4.0  # of so many times the horizon what was counted loses half its weight


class ShelfLife(Rings):
    """A queue for each level (how often a block was seen), least recently used first.

    Of the coldest of each queue the one goes that is most over its level's life, which `Returns` learns from the ages
    at which blocks came again. For that, and for their levels, blocks are remembered a while after they went. Prompts
    that never come back then pass without washing out conversations that do; where levels do not differ, or too
    little is known, this is plain LRU.

    Age is counted in uses of blocks. A node's mark is when it came last, and its level in the lowest digit; 0: it is
    new. Within a call and over all of them a parent's level is never under that of its child, nor its mark: so a
    child goes first, whatever the lives are, as they grow with the level.
    """

    __slots__ = ("_former", "_ghosts", "_learn_at", "_lives", "_now", "_returns", "_rings")

    def __init__(self) -> None:
        super().__init__()
        self._rings = tuple(ring() for _ in range(LEVELS))
        self._now = 1
        self._lives: Lives = EQUAL
        self._returns = Returns()
        self._learn_at = LEARN_USES_MIN
        # Marks of those that went: two generations, of which the older is forgotten as a whole.
        self._ghosts: dict[Hashable, int] = {}
        self._former: dict[Hashable, int] = {}

    def touch_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        self._come(nodes, used=True)

    def enter_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        self._come(nodes, used=False)

    def evict_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`."""
        nodes = list(nodes)
        ghosts = self._ghosts
        for node in nodes:
            ghosts[node.identity] = int(node.mark)
        if self._now >= self._learn_at:
            self._learn()
        if len(ghosts) > min(GHOSTS_PER_BLOCK * self._count, GHOSTS_MAX):
            self._former, self._ghosts = ghosts, {}
        self.remove_many(nodes)

    def __iter__(self) -> Iterator[Node]:
        queues = [around(sentinel) for sentinel in self._rings]
        lives = [life * LEVELS for life in self._lives]  # in the unit of marks
        heads = {level: node for level, queue in enumerate(queues) if (node := next(queue, None)) is not None}
        while heads:
            level = min(heads, key=lambda each: heads[each].mark + lives[each])
            node, queue, life = heads.pop(level), queues[level], lives[level]
            until = min((head.mark + lives[each] for each, head in heads.items()), default=inf)
            while node.mark + life <= until:
                yield node
                following = next(queue, None)
                if following is None:
                    break
                node = following
            else:
                heads[level] = node

    # ---- another order takes over, or this one does ----

    def uses(self, node: Node) -> int:
        """See `EvictionOrder`."""
        return int(node.mark) % LEVELS

    def mark_of(self, uses: int) -> float:
        """See `EvictionOrder`."""
        return self._now * LEVELS + min(uses, LEVELS - 1)

    def adopt_many(self, nodes: Sequence[tuple[Node, int]]) -> None:
        """See `EvictionOrder`."""
        self._now += len(nodes)
        for node, uses in nodes:
            node.mark = mark = self.mark_of(uses)
            level = int(mark) % LEVELS
            self._returns.came(level, 1)
            self._append(self._rings[level], node)

    # ---- levels ----

    def _come(self, nodes: Sequence[Node], *, used: bool) -> None:
        self._now += len(nodes)
        self._returns.passed(len(nodes))
        level = 0
        for run in runs(nodes):
            mark = int(run[0].mark)
            if mark and not used:
                level = max(level, mark % LEVELS)
                self._append_run(run, level)
                continue
            if not mark:
                self._recall(run)
            for part in runs(run):
                level = max(level, self._level_of_return(int(part[0].mark), len(part)))
                self._append_run(part, level)

    def _recall(self, nodes: Sequence[Node]) -> None:
        """Give new nodes the marks that their blocks had when they went, where that is not long ago."""
        ghosts, former = self._ghosts, self._former
        for node in nodes if ghosts or former else ():
            identity = node.identity
            mark = ghosts.get(identity) or former.get(identity)
            if mark:
                node.mark = mark

    def _level_of_return(self, mark: int, count: int) -> int:
        """The level of blocks that are used now, whose marks were this."""
        level = 0
        if mark:
            then, before = divmod(mark, LEVELS)
            self._returns.came_again(before, self._now - then, count)
            level = min(before + 1, LEVELS - 1)
        self._returns.came(level, count)
        return level

    def _append_run(self, nodes: Sequence[Node], level: int) -> None:
        """Make nodes the warmest of a level, the last one warmest of all."""
        # As `Lru.touch_many`: a get of 512 blocks spends most of its time in this loop.
        mark, sentinel = self._now * LEVELS + level, self._rings[level]
        warmest, added = sentinel.prev, 0
        assert warmest is not None, "the ring is closed"
        for node in nodes:
            node.mark = mark
            colder = node.prev
            if colder is None:  # as after every lease
                added += 1
            elif node is warmest:
                continue
            elif (warmer := node.next) is not None:
                colder.next = warmer
                warmer.prev = colder
            node.prev = warmest
            warmest.next = node
            warmest = node
        warmest.next = sentinel
        sentinel.prev = warmest
        self._count += added

    # ---- what is learned ----

    def _learn(self) -> None:
        oldest = next(iter(self._former.values()), 0) or next(iter(self._ghosts.values()))
        horizon = max(self._now - oldest // LEVELS, 1)
        self._lives = self._returns.lives(self._count, horizon)
        pause = max(LEARN_USES_MIN, horizon // 4)
        self._learn_at = self._now + pause
        self._returns.fade(0.5 ** (pause / max(MEMORY * horizon, LEARN_USES_MIN)))


def runs(nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
    """The nodes in pieces whose marks are equal: mostly a whole chain, which was used together before."""
    start, count = 0, len(nodes)
    while start < count:
        mark, end = nodes[start].mark, start + 1
        while end < count and nodes[end].mark == mark:
            end += 1
        yield nodes if end - start == count else nodes[start:end]
        start = end
