"""Another eviction policy while the daemon serves: all orders are replaced, in pieces.

Each order becomes a `policy.change.Change` at once, which both old and new stand behind; then its blocks are
moved, some at a time, and at the end the new one takes its place. Blocks that are held stand in no order, so
they are looked at slot by slot, once when the old orders are empty and once when the new ones are full.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from kvstored.catalog.catalog import Catalog, Entry, Space
from kvstored.errors import FailedPrecondition, InvalidArgument
from kvstored.policy.change import Change
from kvstored.policy.eviction import EvictionOrder
from kvstored.policy.hinted import Hinted
from kvstored.policy.orders import ORDERS, OrderSettings
from kvstored.tiers.dram import DramTier

PIECE_BLOCKS: Final = 1024  # moved in one go: a millisecond or two
PIECE_SPACES: Final = 256
PIECE_SLOTS: Final = 4096


class Reordering:
    """Changes the eviction policy. `settings` are those in force, or coming into force."""

    def __init__(self, catalog: Catalog, dram: DramTier, settings: OrderSettings) -> None:
        self._catalog = catalog
        self._dram = dram
        self.settings = settings
        self._task: asyncio.Task[None] | None = None

    @property
    def changing(self) -> bool:
        """Whether blocks are still being moved."""
        return self._task is not None and not self._task.done()

    def set_eviction(self, name: str) -> bool:
        """`begin` with another order by its name and the same parameters; raises InvalidArgument for an unknown one."""
        if name not in ORDERS:
            raise InvalidArgument(f"there is no such eviction: it must be one of {', '.join(sorted(ORDERS))}")
        return self.begin(msgspec.structs.replace(self.settings, name=name))

    def begin(self, settings: OrderSettings) -> bool:
        """Change to this policy in the background; False: it is in force already.

        Raises FailedPrecondition while another change is under way.
        """
        if self.changing:
            raise FailedPrecondition(f"the change to {self.settings.name} is still under way: ask again soon")
        if settings == self.settings:
            return False
        self.settings = self._catalog.new_order = settings
        self._catalog.changing = True
        self._task = asyncio.get_running_loop().create_task(self._change(settings))
        return True

    async def ended(self) -> None:
        """Wait for the change that is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task.result()

    async def _change(self, settings: OrderSettings) -> None:
        orders, changes = self._catalog.orders, dict[EvictionOrder, EvictionOrder]()
        moving, targets = list[Change](), dict[EvictionOrder, EvictionOrder]()
        for pool, order in list(orders.items()):
            new = settings()
            change = Change(order.inner if isinstance(order, Hinted) else order, new)
            targets[change] = new
            moving.append(change)
            if isinstance(order, Hinted):  # hints stay as they are, in front of another order
                order.inner = change
            else:
                orders[pool] = changes[order] = change
        # Nothing is moved before every block comes and goes by the changes alone.
        await self._point(changes)
        await self._move(change.empty_old for change in moving)
        await self._look()
        await self._move(change.fill_new for change in moving)
        await self._look()
        for pool, order in list(orders.items()):
            if isinstance(order, Hinted):
                order.inner = targets.get(order.inner, order.inner)
            else:
                orders[pool] = targets.get(order, order)
        await self._point(targets)
        self._catalog.changing = False

    async def _move(self, steps: Iterable[Callable[[int], bool]]) -> None:
        for step in steps:
            while step(PIECE_BLOCKS):  # noqa: ASYNC110 - a turn for others, not a wait for anything
                await asyncio.sleep(0)

    async def _point(self, targets: Mapping[EvictionOrder, EvictionOrder]) -> None:
        """Have all pools use other orders; again until none was left, for spaces begin new epochs meanwhile."""
        pointed = True
        while pointed:
            pointed = False
            for number, space in enumerate(self._all_spaces(), 1):
                for pool in space.pools.values():
                    if pool.order in targets:
                        pool.order = targets[pool.order]
                        pointed = True
                if not number % PIECE_SPACES:
                    await asyncio.sleep(0)

    def _all_spaces(self) -> Iterator[Space]:
        yield from list(self._catalog.spaces.values())
        yield from list(self._catalog.retired)  # as they are by then

    async def _look(self) -> None:
        """Have every change see each block that is held."""
        for segment_id in [segment.segment_id for segment in self._dram.segments()]:
            if not self._dram.in_service(segment_id):
                continue
            for number, entry in enumerate(self._dram.occupants(segment_id), 1):
                if isinstance(entry, Entry):
                    order = entry.pool.order
                    order = order.inner if isinstance(order, Hinted) else order
                    if isinstance(order, Change):
                        order.look(entry)
                if not number % PIECE_SLOTS:
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
