"""What a DRAM tier with NVMe below it would have hit: watermarks and admission as the daemon has them.

One client gets the leading blocks of a request, lets them go and puts the rest, and waits after each of the
three until the mover has come to rest. Then a replay through a real daemon gives the same hits, as long as no
request needs more room than the high watermark leaves free (`short_blocks` stays 0), NVMe is large enough,
and no chain is longer than the daemon plans in one go. There is no forecast: it goes by time.

With `turns` what is expected to be asked for comes up before it is, as the daemon does it with `prefetch.predict`;
its reads take no time here, so what they bring is there when it is due.

Where a request needs more, a client of the daemon waits while the mover makes room. With `waits` the simulated
one does so too: a good estimate then, no longer exact to the block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice, takewhile
from typing import cast

from kvstored.policy.admission import MEMORY_KEYS, Admission, AdmitAll, Asked
from kvstored.policy.eviction import EvictionOrder, Node
from kvstored.policy.extent_log import ExtentLog
from kvstored.policy.simulator import PIECE_BLOCKS, Block, Ids, Tier
from kvstored.policy.turns import Turns
from kvstored.policy.watermarks import Watermarks


class TwoTiers(Tier):
    """DRAM of `capacity_blocks` over NVMe, by default without a limit. Blocks are all of one size, `block_bytes`."""

    def __init__(
        self,
        order: EvictionOrder,
        capacity_blocks: int,
        admission: Admission,
        watermarks: Watermarks | None = None,
        *,
        block_bytes: int = 4096,
        memory_keys: int = MEMORY_KEYS,
        nvme: ExtentLog | None = None,
        waits: bool = False,
        turns: Turns | None = None,
    ) -> None:
        super().__init__(order, capacity_blocks)
        self._capacity_bytes = capacity_blocks * block_bytes
        self._block_bytes = block_bytes
        self._admission = admission
        self._watermarks = watermarks or Watermarks()
        self._asked = Asked(memory_keys)
        self._active = False  # between the high and the low watermark
        self.below = ExtentLog() if nvme is None else nvme
        self._waits = waits
        self._asks = not isinstance(admission, AdmitAll)  # whether it matters what was asked for
        self._turns = turns
        self._now_s = 0.0
        self._unused: set[Hashable] = set()  # read ahead, and not asked for yet
        self.ahead_blocks = 0  # of those read from NVMe: because a turn was expected
        self.ahead_used_blocks = 0  # of these: asked for before they were evicted
        self.written_blocks = 0  # to NVMe
        self.read_blocks = 0  # from it
        self.refused_blocks = 0  # not admitted, and so gone
        self.short_blocks = 0  # that found no room: a real daemon would have made its client wait

    def at(self, now_s: float) -> None:
        """See `Tier`; what is expected by then has come up."""
        self._now_s = now_s
        for foretold in self._turns.due(now_s) if self._turns is not None else ():
            self._bring(foretold.ids)

    def _bring(self, ids: Ids) -> None:
        """The leading blocks, as far as there is room to spare: nothing is evicted for them."""
        used_bytes = len(self._present) * self._block_bytes
        spare_bytes = 0 if self._active else self._watermarks.spare_bytes(used_bytes, self._capacity_bytes)
        spare = min(self._free, spare_bytes // self._block_bytes)
        fresh: list[Hashable] = []
        for block_id in ids:
            if block_id not in self._present:
                if block_id not in self.below or len(fresh) >= spare:
                    break
                fresh.append(block_id)
        for block_id in fresh:
            self._present[block_id] = Block(block_id=block_id)
        self._free -= len(fresh)
        self._enter(fresh)
        self._unused.update(fresh)
        self.read_blocks += len(fresh)
        self.ahead_blocks += len(fresh)

    def _evict(self, victims: Sequence[Node]) -> None:
        super()._evict(victims)
        if self._unused:
            self._unused.difference_update(cast(Block, victim).block_id for victim in victims)

    def get(self, ids: Ids) -> int:
        """How many leading blocks are in either tier; they are used, in DRAM."""
        present, below = self._present, self.below.present
        hits = 0
        for block_id in ids:
            if block_id not in present and block_id not in below:
                break
            hits += 1
        if not hits:
            return 0
        run = self._lease(ids, hits)
        if self._turns is not None:
            self._turns.got("", ids, len(run), self._now_s)
            used = self._unused.intersection(ids[: len(run)])
            self._unused -= used
            self.ahead_used_blocks += len(used)
        if self._asks:
            self._asked.note(ids[: len(run)])
        self._demote()
        run.reverse()
        self._order.touch_many(run)
        self._demote()
        return len(run)

    def put(self, ids: Ids, start: int) -> None:
        """See `Tier`; what is below is there already."""
        before = set(ids[start:]) & self._present.keys() if self._asks else ()
        super().put(ids, start)
        if self._turns is not None:
            self._turns.put("", ids[start - 1] if start else None, ids[start:], self._now_s)
        if self._asks:
            self._asked.note([block for block in ids[start:] if block in self._present and block not in before])
        self._demote()

    def _lease(self, ids: Ids, hits: int) -> list[Node]:
        """The leading blocks, in no order while they are held; those below come up."""
        if hits == len(ids):
            resident = [block for block_id in ids if (block := self._present.get(block_id)) is not None]
            if len(resident) == hits:
                self._order.remove_many(resident)
                return cast(list[Node], resident)
        run: list[Node] = []
        for start in range(0, hits, PIECE_BLOCKS):
            places = range(start, min(start + PIECE_BLOCKS, hits))
            missing = [place for place in places if ids[place] not in self._present]
            taken = self._take(ids, places, len(missing))
            self.read_blocks += taken
            self.below.hit(ids[place] for place in missing[:taken])
            end = missing[taken] if taken < len(missing) else places.stop
            kept = [block for block_id in ids[start:end] if (block := self._present.get(block_id)) is not None]
            if kept:
                self._order.remove_many(kept)
            for place in missing[:taken]:
                block = self._present[ids[place]] = Block(block_id=ids[place])
                self._order.from_below(block)
            run += [self._present[block_id] for block_id in ids[start:end]]
            if end < places.stop:
                break
        return run

    def _missing(self, ids: Ids, places: Sequence[int]) -> list[int]:
        present, below = self._present, self.below.present
        return [place for place in places if ids[place] not in present and ids[place] not in below]

    def _take(self, ids: Ids, places: Sequence[int], count: int) -> int:
        taken = super()._take(ids, places, count)
        self.short_blocks += count - taken
        return taken

    def _victims(self, count: int) -> Iterable[Node]:
        """In line goes only what is below, or may not go there."""
        self.short_blocks += count
        if self._waits:
            self._drop([cast(Block, node) for node in islice(self._order, count)])
            return ()
        return takewhile(lambda node: not self._must_write(cast(Block, node)), islice(self._order, count))

    def _must_write(self, block: Block) -> bool:
        return block.block_id not in self.below and self._admits(block.block_id)

    def _admits(self, block_id: Hashable) -> bool:
        return self._admission.admits(self._asked.times(block_id), False)

    def _demote(self) -> None:
        """What the mover does until it has come to rest."""
        while True:
            used_bytes = len(self._present) * self._block_bytes
            wanted = self._watermarks.to_move_bytes(used_bytes, self._capacity_bytes, self._active)
            self._active = wanted > 0
            # The first look is the mover's at its order; some orders note that they are looked at.
            coldest_node = next(iter(self._order), None) if wanted else None
            if coldest_node is None or not self._may_leave(coldest_node):
                return
            coldest = islice(self._order, -(-wanted // self._block_bytes))
            step = [cast(Block, node) for node in takewhile(self._may_leave, coldest)]
            need_be_lost = self._watermarks.reached(used_bytes, self._capacity_bytes)
            if not self._drop(step, refused_too=need_be_lost):
                self._active = False
                return

    def _may_leave(self, node: Node) -> bool:
        return not self._order.keeps(node)

    def _drop(self, step: Sequence[Block], *, refused_too: bool = True) -> int:
        """Take blocks out of DRAM; what is not below yet goes there if it is admitted. How many went."""
        below, asks, times, admits = self.below.present, self._asks, self._asked.times, self._admission.admits
        clean, dirty, admitted = [], [], []
        for block in step:  # one pass, for every block of a trace comes by here
            block_id = block.block_id
            if block_id in below:
                clean.append(block)
            elif not asks or admits(times(block_id), False):
                dirty.append(block)
                admitted.append(block_id)
            elif refused_too:
                dirty.append(block)
        if clean:
            self._evict(clean)
        if dirty:
            self._evict(dirty)
        self.below.append(admitted)
        self.written_blocks += len(admitted)
        self.refused_blocks += len(dirty) - len(admitted)
        return len(clean) + len(dirty)
