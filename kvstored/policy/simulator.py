"""What a tier of a given size would have hit: requests of a trace against an eviction order.

The order is the daemon's own code, and it is called here as the daemon calls it for one client
that gets the leading blocks of a request, lets them go, and puts the rest. So a replay of the
same requests through a real daemon, alone, gives the same hits (`bench.replay` checks it), as
long as no chain exceeds the share of the tier that one client may hold.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, cast

from kvstored.policy.calls import Call
from kvstored.policy.eviction import EvictionOrder, Node

PIECE_BLOCKS: Final = 512  # for so many the daemon makes room at a time
Ids = Sequence[Hashable]


class Block(Node, gc=False, eq=False, kw_only=True):
    """A block that is in the simulated tier."""

    block_id: Hashable

    @property
    def identity(self) -> Hashable:
        """See `Node`."""
        return self.block_id


class Tier:
    """One tier of `capacity_blocks`; a request names the blocks of one chain, from its start."""

    def __init__(self, order: EvictionOrder, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"a capacity is {capacity_blocks} blocks: it must be 1 or more")
        self._order = order
        self._free = capacity_blocks
        self._present: dict[Hashable, Block] = {}
        self.stored_blocks = 0  # that were written into the tier

    def request(self, ids: Ids) -> int:
        """How many leading blocks were there; afterwards the whole chain is, as far as there is room."""
        hits = self.get(ids)
        if hits < len(ids):
            self.put(ids, hits)
        return hits

    def at(self, now_s: float) -> None:
        """When the calls that follow are made; only some tiers care."""

    def get(self, ids: Ids) -> int:
        """How many leading blocks are there; they are used."""
        get = self._present.get
        run: list[Node] = []
        for block_id in ids:
            block = get(block_id)
            if block is None:
                break
            run.append(block)
        hits = len(run)
        if hits:
            self._order.remove_many(run)  # leased
            run.reverse()
            self._order.touch_many(run)
        return hits

    def put(self, ids: Ids, start: int) -> None:
        """Store what is missing of a chain from the place `start` on, as far as there is room."""
        stored: list[int] = []  # places in the chain
        for piece in range(start, len(ids), PIECE_BLOCKS):
            places = range(piece, min(piece + PIECE_BLOCKS, len(ids)))
            missing = self._missing(ids, places)
            taken = self._take(ids, places, len(missing))
            for place in missing[:taken]:
                self._present[ids[place]] = Block(block_id=ids[place])
            stored += missing[:taken]
            if taken < len(missing):
                break
        if stored:
            self._enter([ids[place] for place in stored])
            if stored[-1] - stored[0] >= len(stored):  # what was there already stands between them
                self._enter_above(ids, stored[-1])
            self._enter_above(ids, stored[0])

    def _missing(self, ids: Ids, places: Sequence[int]) -> list[int]:
        """Which of these blocks a put would write."""
        return [place for place in places if ids[place] not in self._present]

    def _take(self, ids: Ids, places: Sequence[int], count: int) -> int:
        """Room for up to `count` blocks; those of the chain that are there already are not evicted for it."""
        held = [block for place in places if (block := self._present.get(ids[place])) is not None]
        if held:
            self._order.remove_many(held)
        if count > self._free:
            self._evict(list(self._victims(count - self._free)))
        if held:
            self._order.enter_many(held[::-1])
        taken = min(count, self._free)
        self._free -= taken
        self.stored_blocks += taken
        return taken

    def _victims(self, count: int) -> Iterable[Node]:
        """Up to so many blocks that may go at once, coldest first."""
        return islice(self._order, count)

    def _evict(self, victims: Sequence[Node]) -> None:
        self._order.evict_many(victims)
        for victim in victims:
            del self._present[cast(Block, victim).block_id]
        self._free += len(victims)

    def _enter_above(self, ids: Ids, place: int) -> None:
        """Warm what a block hangs on, as far up as it is there."""
        top = place
        while top and ids[top - 1] in self._present:
            top -= 1
        if top < place:
            self._enter(ids[top:place])

    def _enter(self, ids: Ids) -> None:
        present = self._present
        self._order.enter_many([present[block_id] for block_id in reversed(ids)])

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, block_id: Hashable) -> bool:
        return block_id in self._present


def simulate(requests: Iterable[Ids], order: EvictionOrder, capacity_blocks: int) -> Iterator[int]:
    """Hits of each request in an empty tier; `order` is a new one."""
    return map(Tier(order, capacity_blocks).request, requests)


def replay(calls: Sequence[Call], tier: Tier) -> Iterator[int]:
    """Hits of each call. A put that followed a get stores what this tier missed of it, not what was missed then."""
    found: dict[int, int] = {}  # hits of gets by number
    for number, call in enumerate(calls):
        tier.at(call.t_ms / 1000)
        if call.gets and call.puts:
            yield tier.request(call.ids)
        elif call.gets:
            found[number] = hits = tier.get(call.ids)
            yield hits
        else:
            start = found.get(call.after, call.start)
            if start < len(call.ids):
                tier.put(call.ids, start)
            yield 0
