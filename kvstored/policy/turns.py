"""When a conversation is likely to go on: turns of a chain, told by its gets and puts.

A turn begins with a get of a chain; puts of what follows its last block make the chain longer, and then it is
idle until the next get that has this last block in it. From the intervals between turns, the last weighing as
much as all before it, come a mean and a mean deviation. A chain is regular after two intervals that deviate by
no more than half the mean. Its next turn is foretold once: from `mean - deviation` after its last one, and a
tenth of the mean before that, until two deviations after the mean.

Time is passed in, in seconds of a clock that does not go back. What is remembered is bounded in chains and in
blocks; the chain whose last call is longest ago goes first.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

import msgspec

CHAINS_MAX: Final = 256
BLOCKS_MAX: Final = 16_384  # of all chains
LAST_WEIGHT: Final = 0.5  # of the last interval in the mean
INTERVALS_MIN: Final = 2
DEVIATION_MAX: Final = 0.5  # relative to the mean
LEAD: Final = 0.1  # of the mean: so much earlier than it is expected
INTERVAL_S_MIN: Final = 1.0  # what comes back sooner is in DRAM still
INTERVAL_S_MAX: Final = 3600.0


class Foretold(msgspec.Struct, frozen=True):
    """A turn that is expected."""

    place: Hashable
    ids: Sequence[Hashable]
    until_s: float  # after that it is not any more


class _Chain(msgspec.Struct, eq=False):
    """What is known of one."""

    place: Hashable
    ids: list[Hashable]
    began_s: float  # its last turn
    extended: bool = False  # in this turn
    told: bool = False  # in this turn, that another is to come
    intervals: int = 0
    mean_s: float = 0.0
    deviation_s: float = 0.0
    ahead_s: float = 0.0  # when its next turn is to be foretold; 0: it is not

    def went_on(self, now_s: float) -> None:
        """Another turn begins."""
        interval_s = min(now_s - self.began_s, INTERVAL_S_MAX)
        off_s = abs(interval_s - self.mean_s)
        if not self.intervals:
            self.mean_s = interval_s
        else:
            self.mean_s += LAST_WEIGHT * (interval_s - self.mean_s)
            self.deviation_s = (
                off_s if self.intervals == 1 else self.deviation_s + LAST_WEIGHT * (off_s - self.deviation_s)
            )
        self.intervals += 1
        self.extended = self.told = False
        self.ahead_s = 0.0

    @property
    def regular(self) -> bool:
        """Whether its next turn can be foretold."""
        fits = INTERVAL_S_MIN <= self.mean_s < INTERVAL_S_MAX
        return fits and self.intervals >= INTERVALS_MIN and self.deviation_s <= DEVIATION_MAX * self.mean_s


class Turns:
    """The chains of one tenant. A place is where ids mean the same: a namespace."""

    def __init__(self, chains_max: int = CHAINS_MAX, blocks_max: int = BLOCKS_MAX) -> None:
        self._chains_max = chains_max
        self._blocks_max = blocks_max
        self._tails: OrderedDict[tuple[Hashable, Hashable], _Chain] = OrderedDict()  # the last called at the end
        self._agenda: list[tuple[float, int, _Chain]] = []
        self._noted = 0  # orders the agenda where times are equal
        self.blocks = 0  # that are remembered

    def __len__(self) -> int:
        return len(self._tails)

    # ---- what happened ----

    def got(self, place: Hashable, ids: Sequence[Hashable], held: int, now_s: float) -> None:
        """A get of a chain, of which the leading `held` blocks were there."""
        if not 0 < held <= self._blocks_max:
            return
        chain = self._known(place, ids)
        if chain is None:
            chain = _Chain(place, [], now_s)
        else:
            self._forget(chain)
            if chain.extended:
                chain.went_on(now_s)
            chain.began_s = now_s
        chain.ids = list(ids[:held])
        self._remember(chain)

    def put(self, place: Hashable, parent: Hashable, ids: Sequence[Hashable], now_s: float) -> None:
        """Blocks were stored behind `parent` (none: empty or None), which makes a chain longer or begins one."""
        if not ids:
            return
        chain = self._tails.get((place, parent)) if parent else _Chain(place, [], now_s)
        if chain is None or len(chain.ids) + len(ids) > self._blocks_max:
            return
        if parent:
            self._forget(chain)
        chain.ids.extend(ids)
        chain.extended = True
        self._remember(chain)
        if chain.regular:
            self._foretell(chain)

    def ended(self, place: Hashable, ids: Sequence[Hashable]) -> None:
        """The chain that these are of will not go on."""
        chain = self._known(place, ids)
        if chain is not None:
            self._forget(chain)

    def _known(self, place: Hashable, ids: Sequence[Hashable]) -> _Chain | None:
        """The chain that goes on here: the longest whose last block is in it."""
        get = self._tails.get
        return next((chain for id_ in reversed(ids) if (chain := get((place, id_))) is not None), None)

    def _remember(self, chain: _Chain) -> None:
        tail = (chain.place, chain.ids[-1])
        if (other := self._tails.get(tail)) is not None:
            self._forget(other)
        self._tails[tail] = chain
        self.blocks += len(chain.ids)
        while len(self._tails) > self._chains_max or self.blocks > self._blocks_max:
            self._forget(next(iter(self._tails.values())))

    def _forget(self, chain: _Chain) -> None:
        del self._tails[chain.place, chain.ids[-1]]
        self.blocks -= len(chain.ids)

    # ---- what is to come ----

    def _foretell(self, chain: _Chain) -> None:
        ahead_s = chain.began_s + (1 - LEAD) * chain.mean_s - chain.deviation_s
        if chain.ahead_s == ahead_s or chain.told:
            return  # another put of the same turn
        chain.ahead_s = ahead_s
        self._noted += 1
        heapq.heappush(self._agenda, (ahead_s, self._noted, chain))
        if len(self._agenda) > 2 * self._chains_max:
            self._agenda = [item for item in self._agenda if self._stands(*item)]
            heapq.heapify(self._agenda)

    def _stands(self, ahead_s: float, _noted: int, chain: _Chain) -> bool:
        return chain.ahead_s == ahead_s and self._tails.get((chain.place, chain.ids[-1])) is chain

    @property
    def next_s(self) -> float | None:
        """When something is due next."""
        while self._agenda and not self._stands(*self._agenda[0]):
            heapq.heappop(self._agenda)
        return self._agenda[0][0] if self._agenda else None

    def due(self, now_s: float) -> list[Foretold]:
        """Turns that are expected from now on, each told once."""
        found: list[Foretold] = []
        while (at_s := self.next_s) is not None and at_s <= now_s:
            chain = heapq.heappop(self._agenda)[2]
            chain.ahead_s, chain.told = 0.0, True
            until_s = chain.began_s + chain.mean_s + 2 * max(chain.deviation_s, LEAD * chain.mean_s)
            if now_s < until_s:
                found.append(Foretold(chain.place, list(chain.ids), until_s))
        return found
