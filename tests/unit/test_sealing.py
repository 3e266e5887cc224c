"""Sealing: several stores look for full extents at once, and each is sealed once."""

import asyncio

from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.formats import State
from kvstored.tiers.recycling import Recycler


class SlowRecycler(Recycler):
    def __init__(self, table):
        self._table = table
        self.sealed = []

    async def _seal(self, extent, sequence):
        self.sealed.append((extent.number, sequence))
        await asyncio.sleep(0)


async def test_two_stores_do_not_seal_one_extent():
    table = ExtentTable(64 << 10, 4)
    for _ in range(3):
        extent = table.take_free()
        table.open(extent, "t")
        table.fill(extent.number)
    recycler = SlowRecycler(table)
    await asyncio.gather(recycler.seal_full(), recycler.seal_full())
    assert sorted(recycler.sealed) == [(1, 1), (2, 2), (3, 3)]
    assert [table.get(number).state for number in (1, 2, 3)] == [State.SEALED] * 3


def test_an_extent_that_is_made_ready_is_neither_free_nor_open():
    table = ExtentTable(64 << 10, 4)
    extent = table.take_free()
    table.audit()
    table.open(extent, "t")
    table.audit()
