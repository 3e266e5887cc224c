"""Hints of clients in an eviction order: pins, priorities, and chains that end. All of them bounded.

`Hinted` stands in front of an order and knows the blocks that were hinted, and no others. Those stand in rings
of their own where that is what the hint means: `final` ones go first, soft pins last, hard pins not at all
while they last. A priority counts as so many uses more or less, whatever the order makes of uses.

What a wrong hint may cost: soft pins are no more than a quarter of the blocks; hard ones what the caller allows;
priorities a few uses; and who says `final` of blocks that are asked for again is not believed until it is right
(`Trust`). Whoever hints gives the blocks that a block hangs on as well, so that leaves go first all the same.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Final

from kvstored.policy.eviction import EvictionOrder, Lru, Node
from kvstored.policy.hints import FIRST, HARD, INNER, LAST, PRIORITY_MAX, Hint, Trust

SOFT_SHARE: Final = 0.25  # of the blocks of an order
GONE_MIN: Final = 64  # blocks that went by a `final`, and are remembered
ENDS_SLACK: Final = 64  # of the heap of ends, beyond two for each hinted block


class Hinted:
    """An order whose `inner` may be exchanged at any time. See `EvictionOrder`."""

    def __init__(self, inner: EvictionOrder, trust: Trust | None = None) -> None:
        self.inner = inner
        self.trust = trust or Trust()
        self.known: dict[Node, Hint] = {}
        self.counts = [0, 0, 0, 0]  # hinted blocks by place
        self._rings = {FIRST: Lru(), LAST: Lru(), HARD: Lru()}
        self._ends: list[tuple[float, int, Node]] = []
        self._numbers = itertools.count()
        self._gone: OrderedDict[Hashable, None] = OrderedDict()  # by a `final`, right or wrong is still to be seen

    # ---- hints; blocks are given in chain order ----

    def pin(self, nodes: Sequence[Node], until_s: float, *, hard: bool = False) -> int:
        """Have blocks go last, or not at all, until then or later; how many leading ones there was room for."""
        if not hard:
            nodes = nodes[: self._soft_places(nodes)]
        for node in reversed(nodes):
            hint = self._hint(node)
            hint.final = hint.held = False
            if hard:
                hint.hard_until_s = max(hint.hard_until_s, until_s)
            else:
                hint.soft_until_s = max(hint.soft_until_s, until_s)
            heapq.heappush(self._ends, (until_s, next(self._numbers), node))
            self._move(node, hint, hint.where)
        if len(self._ends) > 2 * len(self.known) + ENDS_SLACK:
            self._tidy()
        return len(nodes)

    def _soft_places(self, nodes: Sequence[Node]) -> int:
        """How many leading blocks may be soft pins; those that are pinned need no new place."""
        left = int(SOFT_SHARE * len(self)) - self.counts[LAST]
        for number, node in enumerate(nodes):
            hint = self.known.get(node)
            left -= hint is None or hint.where == INNER
            if left < 0:
                return number
        return len(nodes)

    def end(self, nodes: Sequence[Node]) -> int:
        """These will not be asked for again: they go first, unless they are pinned. How many of them will."""
        believed, count = self.trust.earned, 0
        for node in reversed(nodes):
            hint = self._hint(node)
            if hint.where == INNER:
                hint.final, hint.held = True, node.prev is None
                self._move(node, hint, FIRST if believed else INNER)
                count += believed
        return count

    def prefer(self, nodes: Sequence[Node], priority: int) -> None:
        """Give blocks this priority, whatever they had."""
        assert -PRIORITY_MAX <= priority <= PRIORITY_MAX, "bounded"
        for node in reversed(nodes):
            hint = self._hint(node)
            more, hint.priority = priority - hint.priority, priority
            if hint.place != INNER:
                hint.uses = max(0, hint.uses + more)
            elif more > 0 or (more and self.inner.uses(node)):
                self._count(node, max(0, self.inner.uses(node) + more))
            self._drop_if_empty(node, hint)

    def unpin(self, nodes: Iterable[Node]) -> None:
        """End pins and `final`; priorities stay."""
        for node in nodes:
            hint = self.known.get(node)
            if hint is not None:
                hint.hard_until_s = hint.soft_until_s = 0.0
                hint.final = hint.held = False
                self._move(node, hint, INNER)
                self._drop_if_empty(node, hint)

    def sweep(self, now_s: float, limit: int) -> bool:
        """End up to `limit` pins whose time is over, children first; whether there may be more."""
        for _ in range(limit):
            if not self._ends or self._ends[0][0] > now_s:
                return False
            _, _, node = heapq.heappop(self._ends)
            hint = self.known.get(node)
            if hint is None:
                continue
            hint.hard_until_s *= hint.hard_until_s > now_s
            hint.soft_until_s *= hint.soft_until_s > now_s
            if not hint.final:
                self._move(node, hint, hint.where)
            self._drop_if_empty(node, hint)
        return True

    # ---- places ----

    def _hint(self, node: Node) -> Hint:
        hint = self.known.get(node)
        if hint is None:
            hint = self.known[node] = Hint()
            self.counts[INNER] += 1
        return hint

    def _move(self, node: Node, hint: Hint, place: int) -> None:
        if hint.place == place:
            if place != INNER and node.prev is not None:
                self._rings[place].touch_many([node])  # as the last of its chain to come
            return
        standing = node.prev is not None
        if hint.place == INNER:
            hint.uses = self.inner.uses(node) if node.mark else 0
            self.inner.remove(node)
        else:
            self._rings[hint.place].remove(node)
        self.counts[hint.place] -= 1
        self.counts[place] += 1
        hint.place = place
        if place != INNER:
            if standing:
                self._rings[place].touch_many([node])
        elif standing:
            self.inner.adopt_many([(node, hint.uses)])
        else:
            node.mark = self.inner.mark_of(hint.uses)

    def _count(self, node: Node, uses: int) -> None:
        """Have the inner order take a block for one that was used so often."""
        if node.prev is None:
            node.mark = self.inner.mark_of(uses)
        else:
            self.inner.remove(node)
            self.inner.adopt_many([(node, uses)])

    def _drop_if_empty(self, node: Node, hint: Hint) -> None:
        if hint.empty and hint.place == INNER:
            del self.known[node]
            self.counts[INNER] -= 1

    def _drop(self, node: Node, hint: Hint) -> None:
        """The block is gone, or on its way."""
        (self.inner if hint.place == INNER else self._rings[hint.place]).remove(node)
        del self.known[node]
        self.counts[hint.place] -= 1

    def _tidy(self) -> None:
        self._ends = [end for end in self._ends if (hint := self.known.get(end[2])) and hint.where != INNER]
        latest = {node: (until_s, number, node) for until_s, number, node in sorted(self._ends)}
        self._ends = list(latest.values())
        heapq.heapify(self._ends)

    def _plain(self, nodes: Iterable[Node]) -> bool:
        return not self.known or self.known.keys().isdisjoint(nodes)

    # ---- as an order ----

    def touch_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        if self._gone:
            self._asked(nodes)
        self.inner.touch_many(nodes if self._plain(nodes) else self._come(nodes, 1))

    def enter_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        if self._gone:
            self._asked(nodes)
        self.inner.enter_many(nodes if self._plain(nodes) else self._come(nodes, 0))

    def _come(self, nodes: Sequence[Node], more: int) -> list[Node]:
        """Those that the inner order is to be told of."""
        inner: list[Node] = []
        for node in nodes:
            hint = self.known.get(node)
            if hint is not None and hint.final and not self._stays_final(node, hint, more):
                self._move(node, hint, INNER)
                self._drop_if_empty(node, hint)
            if hint is None or hint.place == INNER:
                inner.append(node)
            else:
                hint.uses += more
                self._rings[hint.place].touch_many([node])
        return inner

    def _stays_final(self, node: Node, hint: Hint, more: int) -> bool:
        if hint.held:
            hint.held = False
            return True
        hint.final = False
        if more:
            self.trust.note(wrong=True)
        return False

    def _asked(self, nodes: Iterable[Node]) -> None:
        """Blocks that are new here: were they said to be of no more use?"""
        for node in nodes:
            if not node.mark and node.identity in self._gone:
                del self._gone[node.identity]
                self.trust.note(wrong=True)

    def remove_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`."""
        nodes = list(nodes)
        if self._plain(nodes):
            self.inner.remove_many(nodes)
            return
        for node in nodes:
            self.remove(node)

    def remove(self, node: Node) -> None:
        """See `EvictionOrder`."""
        hint = self.known.get(node)
        (self.inner if hint is None or hint.place == INNER else self._rings[hint.place]).remove(node)

    def evict_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`."""
        nodes = list(nodes)
        if not self._plain(nodes):
            nodes = [node for node in nodes if not self._evicted(node)]
        if nodes:
            self.inner.evict_many(nodes)

    def _evicted(self, node: Node) -> bool:
        hint = self.known.get(node)
        if hint is None:
            return False
        if hint.final:
            self._gone[node.identity] = None
            while len(self._gone) > max(len(self), GONE_MIN):
                self._gone.popitem(last=False)
                self.trust.note(wrong=False)
        if hint.place == INNER:
            del self.known[node]
            self.counts[INNER] -= 1
            return False
        self._drop(node, hint)
        return True

    def forget(self, node: Node) -> None:
        """See `EvictionOrder`."""
        hint = self.known.get(node)
        if hint is None:
            self.inner.forget(node)
        else:
            self._drop(node, hint)

    def from_below(self, node: Node) -> None:
        """See `EvictionOrder`."""
        if self._gone:
            self._asked([node])
        self.inner.from_below(node)

    def keeps(self, node: Node) -> bool:
        """See `EvictionOrder`."""
        hint = self.known.get(node)
        return self.inner.keeps(node) if hint is None or hint.place == INNER else False

    def fixed(self, node: Node) -> bool:
        """See `EvictionOrder`."""
        hint = self.known.get(node)
        return hint is not None and hint.place == HARD

    def uses(self, node: Node) -> int:
        """See `EvictionOrder`."""
        hint = self.known.get(node)
        return self.inner.uses(node) if hint is None or hint.place == INNER else hint.uses

    def mark_of(self, uses: int) -> float:
        """See `EvictionOrder`."""
        return self.inner.mark_of(uses)

    def adopt_many(self, nodes: Sequence[tuple[Node, int]]) -> None:
        """See `EvictionOrder`."""
        self.inner.adopt_many(nodes)

    def drained(self) -> Iterator[Node]:
        """See `EvictionOrder`; hard pins too, which `__iter__` leaves out."""
        yield from self._rings[FIRST]
        yield from self.inner.drained()
        yield from self._rings[LAST]
        yield from self._rings[HARD]

    def __iter__(self) -> Iterator[Node]:
        yield from self._rings[FIRST]
        yield from self.inner
        yield from self._rings[LAST]

    def __len__(self) -> int:
        return len(self.inner) + sum(map(len, self._rings.values()))
