"""What a removed tenant leaves behind is purged: no byte of it stays; then what is remembered of it is forgotten.

In the background, since it may be millions of blocks. Where a device fails it is tried again, and after a
restart gone on with: the name is on record as leaving until nothing of it is left, and until then no other
tenant may have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kvstored.background import cancel_all
from kvstored.catalog.hinting import Hinting
from kvstored.errors import KVStoredError
from kvstored.purge.purge import LOOK_S, RETIRED_WAIT_S
from kvstored.purge.purges import Purges
from kvstored.purge.receipts import COMPLETE, Receipt, Selection
from kvstored.store.parts import Parts

RETRY_S: Final = 5.0
RETRY_MAX_S: Final = 600.0
BY: Final = "(the tenant was removed)"  # no tenant has such a name

Left = Callable[[str], Awaitable[None]]


class Departures:
    """The tenants that are leaving. `left` puts on record that nothing of one is there any more."""

    def __init__(self, parts: Parts, purges: Purges, hinting: Hinting, left: Left) -> None:
        self._parts = parts
        self._hinting = hinting
        self._purges = purges
        self._left = left
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped = False

    def begin(self, name: str) -> None:
        """Take away what a tenant has; its sessions have ended. Nothing where that is under way, or after `stop`."""
        if name not in self._tasks and not self._stopped:
            task = self._tasks[name] = asyncio.create_task(self._take_away(name))
            task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def stop(self) -> None:
        """The daemon stops: the next one goes on with it."""
        self._stopped = True
        await cancel_all(self._tasks.values())

    async def _take_away(self, name: str) -> None:
        wait_s = RETRY_S
        while True:
            try:
                if (await self._purged(name)).state == COMPLETE and await self._memory_given_up(name):
                    await self._forget(name)
                    await self._left(name)
                    return
            except KVStoredError:  # too many purges wait, or the file of tenants cannot be written
                pass
            self._parts.counters["departures_delayed"] += 1
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)

    async def _purged(self, name: str) -> Receipt:
        """One more attempt, on the same receipt: one that is left unfinished would be begun again with any tenant."""
        selection = Selection(tenant=name)
        receipt = next(
            (r for r in self._purges.receipts.all() if r.unfinished and (r.by, r.selection) == (BY, selection)), None
        )
        if receipt is None:
            receipt = await self._purges.start(selection, BY, 0.0)
        else:
            self._purges.again(receipt)
        await self._purges.ended(receipt.purge_id)
        return receipt

    async def _memory_given_up(self, name: str) -> bool:
        """Whether no memory is the tenant's any more. Clients of it may have it mapped still, for good: another
        tenant, though of the same name, is to have other memory. One segment after the other, so that nobody waits
        for all of them.
        """
        dram, clock = self._parts.dram, self._parts.clock
        while idle := [segment for segment in dram.segments(name) if not segment.used_slots]:
            self._parts.room.retire(idle[0].segment_id)
            end_s = clock.monotonic() + RETIRED_WAIT_S
            while dram.retired(name) and clock.monotonic() < end_s:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
        return not dram.segments(name) and not dram.retired(name)

    async def _forget(self, name: str) -> None:
        """Its namespaces, and whatever else is remembered of it. Raises DeviceError where a drive keeps them."""
        parts = self._parts
        if parts.below is not None:
            await parts.below.tier.forget_namespaces(name)
        await parts.dram.forget_namespaces(name)
        for space in parts.catalog.tenant_spaces(name):
            parts.catalog.drop(space)
        for key in [key for key in parts.catalog.orders if key[0] == name]:
            del parts.catalog.orders[key]
        self._hinting.forget(name)
        parts.stats.pop(name, None)
        parts.history.forget(name)
        parts.turns.pop(name, None)
