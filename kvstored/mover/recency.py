"""The eviction order over restarts: noted in the slot records from time to time, in the background.

A kill loses what changed since; blocks that were in no order yet come back as the warmest. Each
order is walked from its cold end, a piece at a time with a pause between, so that it costs the
loop a few per cent at most and the calls that touch blocks nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice
from typing import Final, cast

from kvstored.catalog.catalog import READY, Catalog, Entry
from kvstored.policy.eviction import EvictionOrder, Node
from kvstored.tiers.dram import DramTier

PIECE_BLOCKS: Final = 2048
PAUSE_S: Final = 0.1  # after each piece
EVERY_S: Final = 2.0  # from one walk to the next, where blocks were used


class Recency:
    """Notes where each block stands."""

    def __init__(self, catalog: Catalog, dram: DramTier) -> None:
        self._catalog = catalog
        self._dram = dram

    async def run(self) -> None:
        """Note all orders again and again, until cancelled; does nothing where nobody keeps the memory."""
        noted = -1
        while self._dram.boot:
            uses = self._catalog.uses
            if uses != noted:
                for order in list(self._catalog.orders.values()):
                    await self._walk(order)
                noted = uses
            await asyncio.sleep(EVERY_S)

    async def _walk(self, order: EvictionOrder) -> None:
        # Used meanwhile, the order may show less of itself; the next walk is soon enough.
        places = zip(range(1, len(order) + 1), order.drained(), strict=False)
        while self._piece(places):  # noqa: ASYNC110 - a pause, not a wait for anything
            await asyncio.sleep(PAUSE_S)

    def _piece(self, places: Iterator[tuple[int, Node]]) -> bool:
        rank, noted = self._dram.records.rank, 0
        for place, node in islice(places, PIECE_BLOCKS):
            entry = cast(Entry, node)
            if entry.state == READY:
                rank(entry.slot, place)
            noted += 1
        return noted == PIECE_BLOCKS

    async def note_all(self) -> None:
        """Note every order as it is now: before an orderly stop, when nothing uses blocks any more."""
        for order in list(self._catalog.orders.values()) if self._dram.boot else ():
            places = zip(range(1, len(order) + 1), order.drained(), strict=False)
            while self._piece(places):  # noqa: ASYNC110 - a pause, not a wait for anything
                await asyncio.sleep(0)
