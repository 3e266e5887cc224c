"""Eviction orders: which block goes first.

An order holds nodes, from the coldest to the warmest; it sees no bytes and no clock. Where an
order needs time it counts the uses that it was told of: so the daemon, which runs at its own
pace, and the simulator, which runs a recorded day in a second, decide the same.

What callers owe an order:

* They name a chain tail first, parents after children, so that a child is always colder than
  its parent and goes before it. A block is useless without its parent.
* A held block (leased, being copied) is removed, and comes back at its release: no order has
  to skip nodes that cannot go. `Node.mark` keeps what the order knows of it meanwhile.
* Uses and other reasons to come back are told apart: `touch` counts a use, `enter` does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec


class Node(msgspec.Struct, gc=False, eq=False, kw_only=True):
    """What an order links; entries of the catalogue inherit from it.

    The links lie in the node itself: a million of them cost no further objects. The collector
    does not see nodes, so removal must cut both links (a removed node has None for both).
    """

    prev: Node | None = None
    next: Node | None = None
    mark: float = 0  # what its order remembers of it, while it is held too; 0: it is new

    @property
    def identity(self) -> Hashable:
        """What is the same in another node of the same block, made after this one was evicted."""
        return id(self)

    def __repr__(self) -> str:
        # The generated one would follow `next` through the whole order.
        return f"<{type(self).__name__} at {id(self):#x}>"


class EvictionOrder(Protocol):
    """An order of nodes. A node is in one order at most.

    Iterating yields every node, the one to go first first. It is valid until the order changes; after
    that it may end early or meet a node twice, and does no harm.

    What an order remembers of a node it can say in `uses` that another kind of order understands: `change`.
    """

    def touch_many(self, nodes: Sequence[Node]) -> None:
        """Note a use of nodes, in the order given: the last one ends up warmest. Adds those that are absent."""
        ...

    def enter_many(self, nodes: Sequence[Node]) -> None:
        """The same without a use: for nodes that are new, that were held for another reason, or whose children came."""
        ...

    def remove_many(self, nodes: Iterable[Node]) -> None:
        """Take nodes out that will come back; those that are absent are passed over."""
        ...

    def evict_many(self, nodes: Iterable[Node]) -> None:
        """Take nodes out that are dropped for room: some orders learn from it."""
        ...

    def remove(self, node: Node) -> None:
        """Take one node out; nothing happens where it is absent."""
        ...

    def forget(self, node: Node) -> None:
        """A node, in the order or held, will not come back: take it out, with what is known of it alone."""
        ...

    def fixed(self, node: Node) -> bool:
        """Whether a node must not go for room at all: it is pinned."""
        ...

    def from_below(self, node: Node) -> None:
        """A node that is in no order comes from the tier below, not from a put; told before it enters."""
        ...

    def keeps(self, node: Node) -> bool:
        """Whether a node, and all that are warmer, is too hot to go where nobody waits for its room."""
        ...

    def uses(self, node: Node) -> int:
        """About how often it was used, as far as this order tells; no less for a parent than for its children."""
        ...

    def mark_of(self, uses: int) -> float:
        """The mark of a node that is held and was used so often."""
        ...

    def adopt_many(self, nodes: Sequence[tuple[Node, int]]) -> None:
        """Enter nodes that are in no order, with their uses, each the warmest of those that were used as often."""
        ...

    def drained(self) -> Iterator[Node]:
        """Every node, children before their parents even if all go one after the other, as without new ones."""
        ...

    def __iter__(self) -> Iterator[Node]: ...

    def __len__(self) -> int: ...


class Sentinel(Node, gc=False, eq=False, kw_only=True):
    """Where a ring begins and ends."""


def ring() -> Sentinel:
    """The sentinel of an empty ring: its `next` is the coldest node, its `prev` the warmest."""
    sentinel = Sentinel()
    sentinel.prev = sentinel.next = sentinel
    return sentinel


def around(sentinel: Node) -> Iterator[Node]:
    """The nodes of a ring, coldest first. What follows a node is read when the next one is asked for.

    It ends at any sentinel: a node may stand in another ring by then.
    """
    node = sentinel.next
    while node is not None and type(node) is not Sentinel:
        yield node
        node = node.next


def _link(colder: Node | None, warmer: Node | None) -> None:
    """Make two nodes neighbours; nothing happens where there is none."""
    if colder is not None and warmer is not None:
        colder.next = warmer
        warmer.prev = colder


class Rings:
    """What orders share whose nodes stand in rings: leaving needs no knowledge of which ring it is."""

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

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
        # A chain mostly stands as a stretch of neighbours, parents warmer than children: its ends are linked once.
        removed = 0
        colder = warmer = None  # the neighbours of the stretch being taken out
        for node in nodes:
            if node is not colder:
                _link(colder, warmer)
                colder, warmer = None, node.next
                if warmer is None:
                    continue
            colder = node.prev
            node.prev = node.next = None
            removed += 1
        _link(colder, warmer)
        self._count -= removed

    def evict_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`."""
        self.remove_many(nodes)

    def forget(self, node: Node) -> None:
        """See `EvictionOrder`."""
        self.remove(node)

    def fixed(self, node: Node) -> bool:
        """See `EvictionOrder`."""
        return False

    def from_below(self, node: Node) -> None:
        """See `EvictionOrder`."""

    def keeps(self, node: Node) -> bool:
        """See `EvictionOrder`."""
        return False

    def drained(self) -> Iterator[Node]:
        """See `EvictionOrder`."""
        return iter(self)

    def __iter__(self) -> Iterator[Node]:
        raise NotImplementedError

    def _append(self, sentinel: Node, node: Node) -> None:
        """Make a node the warmest of a ring, wherever it stood before."""
        colder, warmer = node.prev, node.next
        if colder is None or warmer is None:
            self._count += 1
        else:
            colder.next = warmer
            warmer.prev = colder
        warmest = sentinel.prev
        assert warmest is not None, "the ring is closed"
        node.prev = warmest
        node.next = sentinel
        warmest.next = sentinel.prev = node

    def __len__(self) -> int:
        return self._count


class Lru(Rings):
    """Least recently used first. Uses and other returns are the same to it."""

    __slots__ = ("_sentinel",)

    def __init__(self) -> None:
        super().__init__()
        self._sentinel = ring()

    def touch_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`."""
        # `_append`, written out: a get of 512 blocks spends most of its time in this loop.
        sentinel = self._sentinel
        warmest, added = sentinel.prev, 0
        assert warmest is not None, "the ring is closed"
        for node in nodes:
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

    enter_many = touch_many

    def uses(self, node: Node) -> int:
        """See `EvictionOrder`: it does not count them."""
        return 0

    def mark_of(self, uses: int) -> float:
        """See `EvictionOrder`."""
        return 0.0

    def adopt_many(self, nodes: Sequence[tuple[Node, int]]) -> None:
        """See `EvictionOrder`."""
        for node, _ in nodes:
            node.mark = 0.0
            self._append(self._sentinel, node)

    def __iter__(self) -> Iterator[Node]:
        return around(self._sentinel)
