"""What leaves DRAM next and why: the watermarks, the forecast, or room that somebody waits for.

State only, no await: the mover writes what `plan` returns. Blocks that are below already are dropped on the way.
What the gate refuses would be lost, and gives room in line without a wait: it goes for who waits, and a step of it
at the high mark, but not to get from there to the low one, nor by the forecast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple, cast

from kvstored.catalog.catalog import Catalog, Entry
from kvstored.catalog.room import Room
from kvstored.clock import Clock
from kvstored.mover.flush_order import STEP_BLOCKS_MAX, STEP_BYTES_MAX
from kvstored.policy.eviction import EvictionOrder
from kvstored.policy.forecast import Forecast
from kvstored.policy.watermarks import Watermarks
from kvstored.tiers.dram import DramTier

WATERMARK: Final = "demotions_watermark"  # causes, as their counters are called
FORECAST: Final = "demotions_forecast"
DEMAND: Final = "demotions_demand"


class Step(NamedTuple):
    """Blocks to write, the coldest first and held, and what for; `more`: others were dropped, so look again."""

    entries: list[Entry]
    cause: str
    more: bool = False
    asker: str = ""  # the tenant that waits for the room: all others keep what is guaranteed to them
    spares: bool = False  # what may not go below stays in DRAM for now


class Demotion:
    """Picks blocks step by step. `freed` is called where some were dropped."""

    def __init__(
        self,
        catalog: Catalog,
        room: Room,
        dram: DramTier,
        clock: Clock,
        counters: Counter[str],
        watermarks: Watermarks,
        forecast: Forecast | None,
        freed: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._room = room
        self._dram = dram
        self._clock = clock
        self._counters = counters
        self._watermarks = watermarks
        self._forecast = forecast
        self._freed = freed
        self._active = False  # between the high and the low watermark
        self._look_again_bytes = 0  # of room taken by then: the forecast's next look, where the last one was in vain
        self.demands: dict[tuple[str, int], int] = {}

    @property
    def spare_bytes(self) -> int:
        """What of DRAM may be filled ahead of time; nothing while room is being made."""
        if self._active or self.demands:
            return 0
        usage = self._dram.usage()
        return self._watermarks.spare_bytes(usage.used_bytes + usage.dead_bytes, usage.capacity_bytes)

    def plan(self) -> Step:
        """The next step; without entries and `more`, there is nothing to do."""
        usage = self._dram.usage()
        occupied, capacity_bytes = usage.used_bytes + usage.dead_bytes, usage.capacity_bytes
        if self._forecast is not None:
            self._forecast.taken(self._room.taken_bytes, self._clock.monotonic())
        while self.demands:
            (asker, size), count = self.demands.popitem()
            if entries := self._for_demand((asker, size), count):
                return Step(entries, DEMAND, asker=asker)
        cause, wanted = WATERMARK, self._watermarks.to_move_bytes(occupied, capacity_bytes, self._active)
        self._active = wanted > 0
        if not wanted:
            cause, wanted = FORECAST, self._ahead_bytes(occupied, capacity_bytes)
        order, allowed = self._coldest_order() if wanted else (None, 0)
        if order is None:
            return Step([], cause)
        spares = not self._watermarks.reached(occupied, capacity_bytes)
        entries, dropped = self._coldest(order, min(wanted, allowed), cause, spares=spares)
        if not entries and not dropped:
            self._active = False
            self._look_again_bytes = self._room.taken_bytes + wanted
        return Step(entries, cause, more=dropped > 0, spares=spares)

    def _ahead_bytes(self, occupied: int, capacity_bytes: int) -> int:
        if self._forecast is None or self._room.taken_bytes < self._look_again_bytes:
            return 0
        batch_bytes = min(STEP_BYTES_MAX, self._watermarks.batch_bytes(capacity_bytes))
        coming_bytes = self._forecast.coming_bytes(batch_bytes, self._clock.monotonic())
        return self._watermarks.ahead_bytes(occupied, capacity_bytes, coming_bytes) if coming_bytes else 0

    def _coldest_order(self) -> tuple[EvictionOrder | None, int]:
        """The order whose next block is coldest, by the last use of its segment: orders have no common clock.

        Of tenants above their share, or else above what is guaranteed to them; with how many bytes it may lose.
        """
        used, able = self._catalog.segment_used, self._room.reclaimer.thin_out()
        coldest, oldest, allowed = None, float("inf"), 0
        for (tenant, size), order in self._catalog.orders.items():
            spare = able.get(tenant, 0) // size * size
            node = next(iter(order), None) if spare and self._room.must_demote(tenant) else None
            if (
                node is not None
                and not order.keeps(node)
                and (tick := used.get(cast(Entry, node).slot >> 20, 0)) < oldest
            ):
                coldest, oldest, allowed = order, tick, spare
        return coldest, allowed

    def _coldest(
        self, order: EvictionOrder, wanted_bytes: int, cause: str, *, spares: bool = False
    ) -> tuple[list[Entry], int]:
        """Up to `wanted_bytes` from the cold end: dirty blocks, held; clean ones are dropped at once and counted.

        What is spared is among the wanted bytes, since it is as good as free.
        """
        wanted_bytes = min(wanted_bytes, STEP_BYTES_MAX)
        dirty: list[Entry] = []
        clean: list[Entry] = []
        for node in islice(order, STEP_BLOCKS_MAX):
            entry = cast(Entry, node)
            if cause is not DEMAND and order.keeps(entry):  # nobody waits for its room
                break
            if entry.below:
                clean.append(entry)
            elif not (spares and self._room.refusal(entry)):
                dirty.append(entry)
            wanted_bytes -= entry.pool.slot_bytes
            if wanted_bytes <= 0:  # before the order is asked for another, which some note
                break
        if clean:
            self.count(clean, cause)
            self._room.evict(clean, "demoted earlier")
            self._freed()
        self._catalog.hold(dirty, leaving=True)
        return dirty, len(clean)

    def _for_demand(self, pool: tuple[str, int], count: int) -> list[Entry]:
        """What has to be below before room for so many slots can be taken; the same order as `Room.take`'s."""
        tenant, size = pool
        entries = self._room.to_demote(tenant, size, count)
        if entries is None:
            if not self._room.must_demote(tenant):
                return []
            dirty, _ = self._coldest(self._catalog.order(tenant, size), count * size, DEMAND)
            return dirty
        if entries:
            entries = entries[: max(1, min(STEP_BLOCKS_MAX, STEP_BYTES_MAX // entries[0].pool.slot_bytes))]
        self._catalog.hold(entries)
        return entries

    def count(self, entries: Sequence[Entry], cause: str) -> None:
        """Blocks leave DRAM for this cause."""
        self._counters[f"{cause}_blocks"] += len(entries)
        self._counters[f"{cause}_bytes"] += sum(entry.pool.slot_bytes for entry in entries)

    def took(self, size_bytes: int, seconds: float) -> None:
        """A step wrote so many bytes in so long."""
        if self._forecast is not None:
            self._forecast.demoted(size_bytes, seconds)
