"""In which order a flush writes what is only in DRAM: the most valuable first, parents before children.

Time may be short (a drain, a stop). What is leased is in use now and goes first; then the warm end of
the eviction orders, the orders in turns; then the rest, the newest first. A block whose parent is not
stored is useless, so each is preceded by those of its ancestors that are only in DRAM too.

Nothing here awaits, but between two steps anything may change: whoever writes them looks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, cast

from kvstored.catalog.catalog import READY, Catalog, Entry
from kvstored.policy.eviction import EvictionOrder

STEP_BYTES_MAX: Final = 64 << 20
STEP_BLOCKS_MAX: Final = 2048  # of small blocks: a step is planned in one go
SCAN_BLOCKS: Final = 8192  # looked at in one go
WALK_BLOCKS_MAX: Final = 65_536  # of an order, in one go: a larger one counts as cold, newest first
SLICE_BLOCKS: Final = 256  # of each order in its turn


def hottest_first(catalog: Catalog, in_use: Iterable[Entry] = ()) -> Iterator[list[Entry]]:
    """All blocks that are only in DRAM, a step at a time; empty steps where many in a row need nothing."""
    steps = _Steps(catalog)
    yield from steps.cut(iter(list(in_use)))
    yield from steps.cut(_warm(catalog))
    for space in list(catalog.spaces.values()):
        yield from steps.cut(reversed(list(space.entries.values())))


def _warm(catalog: Catalog) -> Iterator[Entry]:
    """The orders from their warm ends, in turns."""
    walks = [reversed(_coldest_first(order)) for order in list(catalog.orders.values())]
    while walks:
        for walk in list(walks):
            part = list(islice(walk, SLICE_BLOCKS))
            yield from part
            if len(part) < SLICE_BLOCKS:
                walks.remove(walk)


def _coldest_first(order: EvictionOrder) -> list[Entry]:
    return cast(list[Entry], list(order.drained())) if len(order) <= WALK_BLOCKS_MAX else []


def needs_writing(entry: Entry) -> bool:
    """Whether a block is readable and only in DRAM."""
    return entry.state == READY and not entry.below


class _Steps:
    """Cuts a walk over blocks into steps, and leaves out what was in an earlier one."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._seen: set[Entry] = set()

    def cut(self, entries: Iterator[Entry]) -> Iterator[list[Entry]]:
        """Steps of what needs writing, each block after its ancestors."""
        step: list[Entry] = []
        room_bytes = STEP_BYTES_MAX
        for number, entry in enumerate(entries, 1):
            for each in self._with_parents(entry):
                step.append(each)
                room_bytes -= each.pool.slot_bytes
            if room_bytes <= 0 or len(step) >= STEP_BLOCKS_MAX or not number % SCAN_BLOCKS:
                yield step
                step, room_bytes = [], STEP_BYTES_MAX
        yield step

    def _with_parents(self, entry: Entry | None) -> list[Entry]:
        """The block, where it is new here and needs writing, after its ancestors that do; no more than a step."""
        chain: list[Entry] = []
        while entry is not None and entry not in self._seen and needs_writing(entry) and len(chain) < STEP_BLOCKS_MAX:
            self._seen.add(entry)
            chain.append(entry)
            entry = entry.pool.space.entries.get(entry.parent) if entry.parent else None
        return chain[::-1]
