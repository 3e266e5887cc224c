"""S3-FIFO: a small queue that most blocks only pass through, a main one, and a memory of who passed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final

from kvstored.policy.eviction import Node, Rings, around, ring

SMALL_SHARE: Final = 0.1
USES_MAX: Final = 3  # counted in the main queue; each saves a node one time
SMALL: Final = 1  # marks: in the small queue, or in the main one and how many uses are left
MAIN: Final = 2


class S3Fifo(Rings):
    """After "FIFO queues are all you need for cache eviction" (Yang et al., SOSP 2023).

    New blocks enter `small`, a tenth of all. Those that pass through it unused are remembered in
    `ghosts`; who comes back from there enters `main` at once. At the cold end of `main` a used
    block gets another round for each use.

    What differs: a block that is got is taken out and has lost its place. So it comes back at the
    warm end, and from `small` it goes over to `main` at once, not when it reaches the cold end;
    so does a block that its children warm. Then no block outlives its parent.
    """

    __slots__ = ("_ghosts", "_main", "_small", "_small_count")

    def __init__(self) -> None:
        super().__init__()
        self._small, self._main = ring(), ring()
        self._small_count = 0
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()  # a dict's first key is not found at once

    def touch_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        come = self._come
        for node in nodes:
            mark = int(node.mark) + 1
            come(node, MAIN if mark < MAIN else min(mark, MAIN + USES_MAX))

    def enter_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        new = SMALL
        for node in nodes:
            if node.mark:
                self._come(node, max(MAIN, int(node.mark)))
            else:
                if new == SMALL and node.identity in self._ghosts:
                    new = MAIN  # and so do its parents, which follow
                self._ghosts.pop(node.identity, None)
                self._come(node, new)

    def uses(self, node: Node) -> int:
        """See `EvictionOrder`."""
        return max(0, int(node.mark) - MAIN)

    def mark_of(self, uses: int) -> float:
        """See `EvictionOrder`: all are in `main`, so that none outlives its parent for standing in `small`."""
        return MAIN + min(uses, USES_MAX)

    def adopt_many(self, nodes: Sequence[tuple[Node, int]]) -> None:
        """See `EvictionOrder`."""
        for node, uses in nodes:
            self._come(node, int(self.mark_of(uses)))

    def _come(self, node: Node, mark: int) -> None:
        colder, warmer = node.prev, node.next
        if colder is None or warmer is None:
            self._count += 1
        else:
            self._small_count -= node.mark == SMALL
            colder.next = warmer
            warmer.prev = colder
        node.mark = mark
        if mark == SMALL:
            self._small_count += 1
            sentinel = self._small
        else:
            sentinel = self._main
        warmest = sentinel.prev
        assert warmest is not None, "the ring is closed"
        node.prev, node.next = warmest, sentinel
        warmest.next = sentinel.prev = node

    def remove(self, node: Node) -> None:
        """See `EvictionOrder`."""
        if node.next is not None:
            self._small_count -= node.mark == SMALL
            super().remove(node)

    def remove_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`."""
        removed = small = 0
        for node in nodes:
            colder, warmer = node.prev, node.next
            if colder is not None and warmer is not None:
                removed += 1
                small += node.mark == SMALL
                colder.next = warmer
                warmer.prev = colder
                node.prev = node.next = None
        self._count -= removed
        self._small_count -= small

    def evict_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`."""
        nodes = list(nodes)
        self._ghosts.update((node.identity, None) for node in nodes if node.mark == SMALL)
        self.remove_many(nodes)
        while len(self._ghosts) > max(self._count - self._small_count, 1):
            self._ghosts.popitem(last=False)

    def drained(self) -> Iterator[Node]:
        """See `EvictionOrder`: what `main` loses first may be above what stands in `small`."""
        yield from around(self._small)
        yield from self._victims_of_main()

    def __iter__(self) -> Iterator[Node]:
        """See `EvictionOrder`. Used blocks that are passed over lose a use on the way, which changes no decision."""
        surplus = self._small_count - SMALL_SHARE * self._count
        small = around(self._small)
        while surplus > 0 and (node := next(small, None)) is not None:
            surplus -= 1 - SMALL_SHARE  # as if it went
            yield node
        yield from self._victims_of_main()
        yield from small

    def _victims_of_main(self) -> Iterator[Node]:
        node = self._main.next
        while node is not None and node is not self._main:
            following = node.next
            if node.mark > MAIN:
                node.mark -= 1
                if following is self._main:
                    continue  # the warmest already: another look at it
                self._append(self._main, node)
            else:
                yield node
            node = following
