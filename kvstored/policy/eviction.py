"""Eviction orders: which block goes first.

An order holds nodes, from the coldest to the warmest; it sees no bytes, no keys and no clock
(callers pass `now`, in seconds). The same code serves the daemon and the trace simulator.

What callers owe an order:

* They touch a chain tail first, parents after children, so that a child is always colder than
  its parent and goes before it. A block is useless without its parent.
* A held block (leased, being copied) is removed, and comes back with a touch at its release:
  no order has to skip nodes that cannot go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

import msgspec


class Node(msgspec.Struct, gc=False, eq=False, kw_only=True):
    """What an order links; entries of the catalogue inherit from it.

    The links lie in the node itself: a million of them cost no further objects. The collector
    does not see nodes, so removal must cut both links (a removed node has None for both).
    """

    prev: Node | None = None
    next: Node | None = None

    def __repr__(self) -> str:
        # The generated one would follow `next` through the whole order.
        return f"<{type(self).__name__} at {id(self):#x}>"


class EvictionOrder(Protocol):
    """An order of nodes. A node is in one order at most; `now` never goes back."""

    def insert(self, node: Node, now: float) -> None:
        """Add a node that is in no order."""
        ...

    def touch(self, node: Node, now: float) -> None:
        """Note a use of a node; adds it where it is absent."""
        ...

    def touch_many(self, nodes: Iterable[Node], now: float) -> None:
        """Touch several, in the order given: the last one ends up warmest."""
        ...

    def remove(self, node: Node) -> None:
        """Take a node out; nothing happens where it is absent."""
        ...

    def remove_many(self, nodes: Iterable[Node]) -> None:
        """Take several out: one call for a whole prefix."""
        ...

    def coldest(self) -> Node | None:
        """The node to go first; None in an empty order."""
        ...

    def warmer(self, node: Node) -> Node | None:
        """The node to go right after `node`; None after the last."""
        ...

    def __len__(self) -> int: ...


class Lru:
    """Least recently used first: a doubly linked ring through a sentinel.

    `sentinel.next` is the coldest node and `sentinel.prev` the warmest.
    """

    __slots__ = ("_count", "_sentinel")

    def __init__(self) -> None:
        sentinel = Node()
        sentinel.prev = sentinel.next = sentinel
        self._sentinel = sentinel
        self._count = 0

    def insert(self, node: Node, now: float) -> None:
        """See `EvictionOrder`."""
        assert node.next is None, "a node is in one order at most"
        self.touch(node, now)

    def touch(self, node: Node, now: float) -> None:
        """See `EvictionOrder`."""
        colder, warmer = node.prev, node.next
        if colder is None or warmer is None:
            self._count += 1
        else:
            colder.next = warmer
            warmer.prev = colder
        sentinel = self._sentinel
        warmest = sentinel.prev
        assert warmest is not None, "the ring is closed"
        node.prev = warmest
        node.next = sentinel
        warmest.next = node
        sentinel.prev = node

    def touch_many(self, nodes: Iterable[Node], now: float) -> None:
        """See `EvictionOrder`."""
        # `touch`, written out: a get of 512 blocks spends most of its time in this loop.
        sentinel = self._sentinel
        warmest, added = sentinel.prev, 0
        assert warmest is not None, "the ring is closed"
        for node in nodes:
            if node is warmest:
                continue
            colder, warmer = node.prev, node.next
            if colder is None or warmer is None:
                added += 1
            else:
                colder.next = warmer
                warmer.prev = colder
            node.prev = warmest
            warmest.next = node
            warmest = node
        warmest.next = sentinel
        sentinel.prev = warmest
        self._count += added

    def remove(self, node: Node) -> None:
        """See `EvictionOrder`."""
        colder, warmer = node.prev, node.next
        if colder is None or warmer is None:
            return
        colder.next = warmer
        warmer.prev = colder
        node.prev = node.next = None
        self._count -= 1

    def remove_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`."""
        removed = 0
        for node in nodes:
            colder, warmer = node.prev, node.next
            if colder is not None and warmer is not None:
                colder.next = warmer
                warmer.prev = colder
                node.prev = node.next = None
                removed += 1
        self._count -= removed

    def coldest(self) -> Node | None:
        """See `EvictionOrder`."""
        return self.warmer(self._sentinel)

    def warmer(self, node: Node) -> Node | None:
        """See `EvictionOrder`."""
        following = node.next
        return None if following is self._sentinel else following

    def __len__(self) -> int:
        return self._count


ORDERS: Final[Mapping[str, Callable[[], EvictionOrder]]] = MappingProxyType({"lru": Lru})


def make_order(name: str) -> EvictionOrder:
    """A new, empty order by its name in the configuration; raises ValueError for an unknown name."""
    make = ORDERS.get(name)
    if make is None:
        raise ValueError(f"eviction is {name!r}: it must be one of {', '.join(sorted(ORDERS))}")
    return make()
