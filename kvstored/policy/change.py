"""From one eviction order to another of a different kind, some nodes at a time, while both are used.

It stands in the place of the old order until it is `done`, and then passes everything on to the new one.
First the old order is emptied, from its cold end, into a queue of its own; then that queue, from its cold
end, into the new order. Nodes that are touched meanwhile go to the warm end of the queue. So what goes first
is, at every moment, what was moved last time, then what is still to be moved, coldest first: no node
outlives its parent for the change.

While a node is with the queue, or is held, its mark says how often it was used, in numbers that no order
makes (`written`): so it is always known where a node stands. Held ones that have not been in the order since the
change began, or will not be before it ends, are looked at once each by whoever drives it (`look`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from kvstored.policy.eviction import EvictionOrder, Node, Rings, around, ring

BIG: Final = 2.0**80
USES_MAX: Final = 1 << 16


def written(uses: int) -> float:
    """A mark that says how often a node was used."""
    return BIG * min(uses, USES_MAX) if uses else -BIG


def is_written(mark: float) -> bool:
    """Whether a mark is one that `written` makes."""
    return abs(mark) >= BIG


def uses_in(mark: float) -> int:
    """The opposite of `written`."""
    return max(0, int(mark / BIG))


class Change(Rings):
    """An order on its way from `old` to `new`. Call `step` until it answers False, each time `look`s are done."""

    __slots__ = ("_moved", "_new", "_old", "_queue", "done")

    def __init__(self, old: EvictionOrder, new: EvictionOrder) -> None:
        super().__init__()
        self._old: EvictionOrder | None = old  # None: it is empty
        self._new = new
        self._moved, self._queue = ring(), ring()  # out of the old order; and what was touched since
        self.done = False

    # ---- moving ----

    def empty_old(self, count: int) -> bool:
        """Take up to `count` nodes out of the old order; False: there are none left in it."""
        old = self._old
        if old is None:
            return False
        nodes = list(islice(old.drained(), count))
        marks = [written(old.uses(node)) for node in nodes]
        old.remove_many(nodes)
        for node, mark in zip(nodes, marks, strict=True):
            node.mark = mark
            self._append(self._moved, node)
        return bool(nodes)

    def fill_new(self, count: int) -> bool:
        """Put up to `count` nodes into the new order; False: all are there. After `empty_old` and all looks."""
        if self._old is not None:
            assert not len(self._old), "emptied first"
            self._old = None
        nodes = list(islice(self._waiting(), count))
        self._leave(nodes)
        self._new.adopt_many([(node, uses_in(node.mark)) for node in nodes])
        self.done = not self._count
        return not self.done

    def look(self, node: Node) -> None:
        """One that may be held: have its mark be one that whoever is next understands."""
        if node.prev is not None or not node.mark:
            return
        if self.done and is_written(node.mark):
            node.mark = self._new.mark_of(uses_in(node.mark))
        elif self._old is not None and not is_written(node.mark):
            node.mark = written(self._old.uses(node))

    def _waiting(self) -> Iterator[Node]:
        yield from around(self._moved)
        yield from around(self._queue)

    # ---- as an order ----

    def touch_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        self._come(nodes, 1)

    def enter_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        self._come(nodes, 0)

    def _come(self, nodes: Sequence[Node], more: int) -> None:
        if self.done:
            for node in nodes:
                self.look(node)
            (self._new.touch_many if more else self._new.enter_many)(nodes)
            return
        most = 0  # no less for a parent than for its children, which come first
        for node in nodes:
            self._write(node)
            most = max(most, uses_in(node.mark) + more)
            node.mark = written(most)
            self._append(self._queue, node)

    def _write(self, node: Node) -> None:
        """Have a node leave an order that is not ours, with its uses in its mark."""
        if is_written(node.mark):
            return
        # One that is in no order has the mark of the old one, or none: in the new one none is ever held.
        where = self._new if self._old is None else self._old
        uses = where.uses(node) if node.mark else 0
        where.remove(node)  # while its mark is what that order made
        node.mark = written(uses)

    def remove(self, node: Node) -> None:
        """See `EvictionOrder`."""
        if self.done:
            self._new.remove(node)
        elif node.prev is not None:
            self._write(node)
            super().remove(node)

    def remove_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`."""
        if self.done:
            self._new.remove_many(nodes)
        else:
            self._leave(nodes)

    def _leave(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.prev is not None:
                self._write(node)
                super().remove(node)

    def evict_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`; nothing is learnt from it during the change."""
        (self._new.evict_many if self.done else self.remove_many)(nodes)

    def from_below(self, node: Node) -> None:
        """See `EvictionOrder`; during the change such blocks are as all others."""
        if self.done:
            self._new.from_below(node)

    def keeps(self, node: Node) -> bool:
        """See `EvictionOrder`."""
        return self.done and self._new.keeps(node)

    def drained(self) -> Iterator[Node]:
        """See `EvictionOrder`."""
        return self._new.drained() if self.done else iter(self)

    def uses(self, node: Node) -> int:
        """See `EvictionOrder`."""
        if is_written(node.mark):
            return uses_in(node.mark)
        return (self._new if self._old is None else self._old).uses(node) if node.mark else 0

    def mark_of(self, uses: int) -> float:
        """See `EvictionOrder`."""
        return self._new.mark_of(uses) if self.done else written(uses)

    def adopt_many(self, nodes: Sequence[tuple[Node, int]]) -> None:
        """See `EvictionOrder`."""
        if self.done:
            self._new.adopt_many(nodes)
            return
        for node, uses in nodes:
            node.mark = written(uses)
            self._append(self._queue, node)

    def __iter__(self) -> Iterator[Node]:
        if self._old is None:
            yield from self._new if self.done else self._new.drained()
        yield from around(self._moved)
        if self._old is not None:
            yield from self._old.drained()
        yield from around(self._queue)

    def __len__(self) -> int:
        return self._count + len(self._new if self._old is None else self._old)
