"""Heat: how often a block was used, with less and less weight the longer ago; and thresholds in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from math import exp2, log2
from typing import Final

from kvstored.policy.eviction import Node
from kvstored.policy.levels import Levels

STEPS: Final = 8  # levels to a doubling
PASSING_LEVEL: Final = -1  # below all others
COLD: Final = 64.0  # half-lives: after so many nothing is left of a use
REMEMBERED_MIN: Final = 64  # blocks that went below


class Heat(Levels):
    """Coldest first: a use adds 1 to the heat of a block, and heat halves every half-life.

    The half-life is counted in turnovers of the order: one is as many blocks named to it as it
    holds, so that a setting fits a tier of any size and any load. Between uses all heats decay
    alike, so nothing needs to be walked: a node's mark is the half-lives passed until now plus
    log2 of its heat, and stays as it is until the next use.

    Two thresholds, each off at 0. A block hotter than `demote_above` stays where nobody waits for its
    room (`keeps`). One that comes from below stays only when its heat reaches `promote_from`: until
    then it only passes through, and goes before all others; its mark is negative meanwhile. For that the
    heats of as many blocks as the order holds are remembered when they go.
    """

    __slots__ = ("_demote_above", "_gone", "_half_life", "_now", "_promote_from")

    def __init__(self, half_life: float = 1.0, *, demote_above: float = 0.0, promote_from: float = 0.0) -> None:
        super().__init__()
        if not half_life > 0:
            raise ValueError(f"the half-life is {half_life}: it must be over 0 turnovers")
        if demote_above < 0 or promote_from < 0:
            raise ValueError(f"the thresholds of heat are {demote_above} and {promote_from}: they must not be negative")
        self._half_life = half_life
        self._demote_above = demote_above
        self._promote_from = promote_from
        self._now = COLD + 1.0  # half-lives; so far over 0 that no mark is 0, as that of a new node, or negative
        self._gone: OrderedDict[Hashable, float] = OrderedDict()  # marks of those that went

    def touch_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        now, put = self._pass(len(nodes)), self._put
        for node in nodes:
            if node.mark < 0:
                self._passes(node, now, 1.0)
                continue
            node.mark = mark = now + log2(1 + exp2(node.mark - now)) if node.mark else now
            put(int(mark * STEPS), node)

    def enter_many(self, nodes: Sequence[Node]) -> None:
        """See `EvictionOrder`."""
        now, put = self._pass(len(nodes)), self._put
        for node in nodes:
            if node.mark < 0:
                self._passes(node, now, 0.0)
                continue
            # At least as warm as a new one: what it comes after may be its own children.
            node.mark = mark = max(node.mark, now)
            put(int(mark * STEPS), node)

    def _pass(self, named: int) -> float:
        self._now += named / (max(self._count, named) * self._half_life) if named else 0.0
        return self._now

    # ---- thresholds ----

    def _passes(self, node: Node, now: float, more: float) -> None:
        """A block from below is used (`more` 1) or comes back from a hold: it stays if it is hot enough by now."""
        heat = more + exp2(-node.mark - now)
        mark = now + log2(heat) if heat > 0 else now - COLD
        stays = heat >= self._promote_from
        node.mark = mark if stays else -max(mark, now - COLD)
        self._put(self._level(node.mark), node)

    def from_below(self, node: Node) -> None:
        """See `EvictionOrder`."""
        if self._promote_from:
            node.mark = -max(self._gone.pop(node.identity, 0.0), self._now - COLD)

    def keeps(self, node: Node) -> bool:
        """See `EvictionOrder`."""
        return self._demote_above > 0 and exp2(node.mark - self._now) > self._demote_above

    def evict_many(self, nodes: Iterable[Node]) -> None:
        """See `EvictionOrder`."""
        if self._promote_from:
            nodes = list(nodes)
            self._gone.update((node.identity, abs(node.mark)) for node in nodes)
            while len(self._gone) > max(self._count, REMEMBERED_MIN):
                self._gone.popitem(last=False)
        super().evict_many(nodes)

    # ---- for another order ----

    def _level(self, mark: float) -> int:
        return int(mark * STEPS) if mark > 0 else PASSING_LEVEL

    def uses(self, node: Node) -> int:
        """See `EvictionOrder`."""
        return max(0, round(exp2(min(abs(node.mark) - self._now, COLD))) - 1)

    def mark_of(self, uses: int) -> float:
        """See `EvictionOrder`."""
        return self._now + log2(1 + uses)
