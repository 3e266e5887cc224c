"""Lowered limits: what a tenant has beyond them goes in the background, in batches, its coldest blocks first.

Nothing new is given to it meanwhile, so that its use only falls. What is leased goes when it is released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Final, cast

from kvstored.catalog.catalog import READY, Entry
from kvstored.catalog.history import Reason
from kvstored.store.parts import Parts

BATCH_BLOCKS: Final = 512
LOOK_EVERY_S: Final = 10.0  # a path of NVMe that was away comes back with what it had
AGAIN_S: Final = 0.5  # where nothing more could go at present
RULE: Final = "its tenant's limit was lowered"


class Trimming:
    """Brings tenants within their limits. `run` it beside serving."""

    def __init__(self, parts: Parts, look: Callable[[], object] = lambda: None) -> None:
        """`look` is called at each look, before anything goes."""
        self._parts = parts
        self._look = look
        self._wake = asyncio.Event()
        self._wake.set()  # what an earlier process left may be over a limit that was lowered since
        parts.tenants.watch(lambda _name: self._wake.set())

    async def run(self) -> None:
        """Trim until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_EVERY_S)
            self._wake.clear()
            self._look()
            while await self.step():  # noqa: ASYNC110 - a turn for others, not a wait for anything
                await asyncio.sleep(0)
            if self.over():
                await asyncio.sleep(AGAIN_S)
                self._wake.set()

    def over(self) -> list[str]:
        """Tenants that have more in DRAM than they may."""
        used = self._parts.dram.used_bytes_by_tenant()
        return [name for name, bytes_ in used.items() if self._parts.room.allotments.excess(name, bytes_)]

    async def step(self) -> bool:
        """One batch of each tenant that is over a limit; whether anything went."""
        went = False
        for name in self.over():
            went |= await self._trim_dram(name)
        below = self._parts.below
        for name in list(below.tier.tenant_usage()) if below is not None else ():
            went |= below is not None and await below.tier.trim(name)
        return went

    async def _trim_dram(self, tenant: str) -> bool:
        """Evict a batch of the coldest; what is only in DRAM goes below first where it may."""
        parts, room = self._parts, self._parts.room
        for (owner, size), order in list(parts.catalog.orders.items()):
            excess = room.allotments.excess(tenant, parts.dram.used_bytes_of(tenant))
            count = min(BATCH_BLOCKS, -(-excess // size))
            coldest = [cast(Entry, node) for node in islice(order, count)] if owner == tenant and count else []
            if not coldest:
                continue
            if parts.below is not None and room.must_demote(tenant):
                dirty = [entry for entry in coldest if not entry.below]
                parts.catalog.hold(dirty)
                await parts.below.mover.write(dirty)
                excess = room.allotments.excess(tenant, parts.dram.used_bytes_of(tenant))
                idle = [entry for entry in coldest if entry.state == READY and not entry.holds]
                coldest = idle[: -(-excess // size)]
            room.evict(coldest, RULE, Reason.QUOTA)
            return bool(coldest)
        return False
