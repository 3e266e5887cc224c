"""Predicted next turns: what a conversation will ask for next comes up before it does.

`policy.Turns` says which chain is expected when. What of it is on NVMe is read into room that is free: nothing
is evicted for it, no quota passed, and DRAM is filled no further than a step below the high watermark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

from kvstored.background import cancel_all
from kvstored.catalog import prefetched
from kvstored.catalog.catalog import Entry, Space
from kvstored.keys import slot_bytes
from kvstored.mover.jobs import PREDICTED, Found, Job
from kvstored.mover.promoter import PIECE_BLOCKS
from kvstored.policy.turns import Foretold, Turns
from kvstored.store.parts import Below, Parts


class Predictions:
    """The expected turns of all tenants, each remembered apart."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._below = parts.below
        self._turns = parts.turns
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when it is due
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def on(self) -> bool:
        """Whether anything is predicted at all."""
        return self._parts.predicts and self._below is not None

    # ---- what happened ----

    def got(self, spaces: Sequence[Space], hashes: Sequence[bytes], held: int) -> None:
        """A get of a chain, of which the leading `held` blocks were leased."""
        now_s = self._parts.clock.monotonic()
        for space in spaces:
            self._turns[space.tenant].got(space.namespace.digest, hashes, held, now_s)

    def put(self, space: Space, entries: Sequence[Entry]) -> None:
        """Blocks were stored; what does not lie in one row says nothing."""
        if any(child.parent != parent.hash for parent, child in pairwise(entries)):
            return
        turns, now_s = self._turns[space.tenant], self._parts.clock.monotonic()
        turns.put(space.namespace.digest, entries[0].parent, [entry.hash for entry in entries], now_s)
        self._arm(turns, now_s)

    def ended(self, space: Space, hashes: Sequence[bytes]) -> None:
        """It is said that this chain will not go on."""
        self._turns[space.tenant].ended(space.namespace.digest, hashes)

    # ---- what is to come ----

    def _arm(self, turns: Turns, now_s: float) -> None:
        """Look when the next turn of these is due, if nothing is due before."""
        at_s = turns.next_s
        if at_s is None or self._stopped or (self._timer is not None and self._timer_s <= at_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = at_s
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at_s - now_s), self._begin)

    def _begin(self) -> None:
        self._timer = None
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._look_and_arm())

    async def _look_and_arm(self) -> None:
        try:
            await self.look()
        finally:
            now_s = self._parts.clock.monotonic()
            for turns in self._turns.values():
                self._arm(turns, now_s)

    async def look(self) -> None:
        """Bring up what is due."""
        if self._below is None:
            return
        now_s = self._parts.clock.monotonic()
        for foretold in [each for turns in list(self._turns.values()) for each in turns.due(now_s)]:
            space = self._parts.catalog.spaces.get(foretold.place)  # type: ignore[call-overload]
            if space is not None and not self._stopped:
                await self._bring(self._below, space, foretold)

    async def _bring(self, below: Below, space: Space, foretold: Foretold) -> None:
        """As a prefetch, but only as far as there is room for it, and for nobody's session."""
        job = Job(PREDICTED, foretold.until_s, prefetched.PREDICTED)
        hashes: list[bytes] = list(foretold.ids)  # type: ignore[arg-type]
        job.planning = True
        try:
            for start in range(0, len(hashes), PIECE_BLOCKS):
                piece = hashes[start : start + PIECE_BLOCKS]
                found = await below.promoter.find([space], piece)
                fits = _fitting(space, piece, found[0], below.mover.spare_bytes)
                plan = below.promoter.plan([space], piece[:fits], found, job)
                if plan.cut or len(plan.runs[0]) < len(piece) or self._stopped:
                    break
        finally:
            job.planning = False
            job.settle()
        self._parts.counters["predicted_turns"] += 1
        self._parts.counters["predicted_blocks"] += job.total_blocks

    async def stop(self) -> None:
        """Predict nothing any more; what is being read is read to its end."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await cancel_all([self._task])


def _fitting(space: Space, hashes: Sequence[bytes], found: Found, spare_bytes: int) -> int:
    """How many leading blocks are in DRAM or may come there without taking more than is to spare."""
    for index, hash_ in enumerate(hashes):
        if hash_ not in space.entries and hash_ in found:
            spare_bytes -= slot_bytes(found[hash_].size_bytes)
            if spare_bytes < 0:
                return index
    return len(hashes)
