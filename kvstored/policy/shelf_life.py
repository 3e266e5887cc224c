"""Shelf life: blocks that were used again may grow older than those that never were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvstored.policy.eviction import Node, Rings, around, ring

CREDIT: Final = 0.5  # of the mean age of victims: so much longer lives a block that was used again
LEARNING: Final = 0.001  # weight of one victim in the mean


class ShelfLife(Rings):
    """Two queues, least recently used first: `fresh` was stored and not used since, `reused` was.

    Of the two coldest the one goes that is older, a reused one counted younger by half the mean
    age that victims had. A workload of prompts that never come back passes through `fresh`
    without washing out the rest; where everything is reused, or nothing, this is plain LRU.

    Age is counted in uses of blocks. A node's mark is when it came last: positive in `reused`,
    negative in `fresh`.
    """

    __slots__ = ("_fresh", "_now", "_reused", "mean_age")

    def __init__(self) -> None:
        super().__init__()
        self._fresh = ring()
        self._reused = ring()
        self._now = 0
        self.mean_age = 0.0

    def touch_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        # As `Lru.touch_many`: one ring, one store more a node.
        self._now = now = self._now + len(nodes)
        sentinel = self._reused
        warmest, added = sentinel.prev, 0
        assert warmest is not None, "the ring is closed"
        for node in nodes:
            node.mark = now
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

    def enter_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        self._now = now = self._now + len(nodes)
        # As above, with two rings: a put spends its time here.
        unused_now = -now
        fresh, reused, added = self._fresh.prev, self._reused.prev, 0
        assert fresh is not None, "the rings are closed"
        assert reused is not None, "the rings are closed"
        for node in nodes:
            colder, used = node.prev, node.mark > 0
            node.mark = now if used else unused_now
            if colder is None:
                added += 1
            elif node is fresh or node is reused:
                continue
            elif (warmer := node.next) is not None:
                colder.next = warmer
                warmer.prev = colder
            if used:
                node.prev = reused
                reused.next = reused = node
            else:
                node.prev = fresh
                fresh.next = fresh = node
        fresh.next, self._fresh.prev = self._fresh, fresh
        reused.next, self._reused.prev = self._reused, reused
        self._count += added

    def evict_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`."""
        nodes = list(nodes)
        now, mean = self._now, self.mean_age
        for node in nodes:
            mean += LEARNING * (now - abs(node.mark) - mean)
        self.mean_age = mean
        self.remove_many(nodes)

    def __iter__(self) -> Iterator[Node]:
        credit = CREDIT * self.mean_age
        fresh_nodes, reused_nodes = around(self._fresh), around(self._reused)
        fresh, reused = next(fresh_nodes, None), next(reused_nodes, None)
        while fresh is not None and reused is not None:
            if reused.mark + credit < -fresh.mark:
                yield reused
                reused = next(reused_nodes, None)
            else:
                yield fresh
                fresh = next(fresh_nodes, None)
        if fresh is not None:
            yield fresh
            yield from fresh_nodes
        if reused is not None:
            yield reused
            yield from reused_nodes
