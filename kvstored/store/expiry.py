"""Blocks that end: never served after their time, and their slots given back in the background.

Before a call looks at a space in which blocks end, it compares the time with the earliest end there; only
when something is due does it look at the blocks that it asks for, one by one. The rest goes in a sweep, in
pieces. NVMe looks after itself (`tiers.end_sweep`): each copy knows its own end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from math import inf
from typing import Final

from kvstored.catalog.catalog import Entry, Space
from kvstored.catalog.history import Reason
from kvstored.lifetime import STEPS_PER_S, EndClock, Expiry, Lifetime, capped, expiry_of, step_down
from kvstored.store.parts import Parts
from kvstored.store.removal import Removals, Why

SWEEP_EVERY_S: Final = 1.0
PIECE_BLOCKS: Final = 512
PIECE_SPACES: Final = 1024
SLIDE_SHARE: Final = 4  # a copy on NVMe learns of uses that prolong a block by more than this part of its TTL
_log = logging.getLogger(__name__)
ENDED: Final = Why(Reason.EXPIRED, "its TTL or its tenant's maximum age was over")


class Expiries:
    """Knows when blocks in DRAM end, and ends them."""

    def __init__(self, parts: Parts, removals: Removals) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._removals = removals
        self._clock = EndClock(parts.clock)
        self._due = asyncio.Event()
        self._ages = {tenant.name: tenant.max_age_s or 0.0 for tenant in parts.tenants}
        self._changes: set[asyncio.Task[None]] = set()
        self._catalog.on_look = self._drop_ended
        self._catalog.on_use = self._used
        self._catalog.now_s = self._clock.now_s
        self._catalog.max_age_of = self.max_age_of
        if parts.below is not None:
            parts.below.tier.limit_ages(self.max_age_of, self._clock.now_s)
        parts.tenants.watch(self._tenant_changed)

    # ---- what puts ask for ----

    def of_put(self, space: Space, lifetime: Lifetime | None) -> Expiry | None:
        """When blocks end that are put now. Raises InvalidArgument."""
        if lifetime is not None:
            lifetime.check()
        return expiry_of(lifetime, space.max_age_s, self._clock.now_s())

    # ---- looks and uses ----

    def _drop_ended(self, space: Space, hashes: Sequence[bytes]) -> None:
        """Those of the blocks that have ended are not there any more; the others that are due are swept soon."""
        assert space.timers is not None, "only where blocks end"
        now_s = self._clock.now_s()
        if space.timers.first_s > now_s:
            return
        self._due.set()
        asked = (space.entries.get(hash_) for hash_ in dict.fromkeys(hashes))
        self._end([entry for entry in asked if entry is not None and 0 < entry.expires_s <= now_s])

    def _end(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._removals.forget(entries, ENDED)
            self._parts.counters["expired_blocks"] += len(entries)

    def _used(self, entries: Sequence[Entry]) -> None:
        """Blocks with a sliding end were used."""
        now_s = self._clock.now_s()
        for entry in entries:
            expiry = entry.expiry
            if expiry is None or not expiry.sliding_s:
                continue
            expires_s = step_down(min(now_s + expiry.sliding_s, expiry.limit_s or inf))
            if expires_s > entry.expires_s:
                entry.expires_s = expires_s
                if entry.below and expires_s - entry.step / STEPS_PER_S > expiry.sliding_s / SLIDE_SHARE:
                    entry.below = False  # so that it is offered to NVMe again, whose copy ends later then

    # ---- the sweep ----

    async def run(self) -> None:
        """Sweep now and then, and when a look met something due, until cancelled."""
        while True:
            try:
                await asyncio.wait_for(self._due.wait(), SWEEP_EVERY_S)
            except TimeoutError:
                pass
            self._due.clear()
            try:
                await self.sweep()
            except Exception:  # room must go on coming back
                _log.exception("sweeping blocks that have ended")

    async def sweep(self) -> None:
        """End everything that is due, in pieces."""
        for number, space in enumerate(list(self._catalog.timed), 1):
            timers = space.timers
            while timers is not None and timers.first_s <= (now_s := self._clock.now_s()):
                ended, moved = timers.due(now_s, PIECE_BLOCKS)
                self._end(ended)
                for entry in moved:
                    assert entry.expiry is not None, "it ends"
                    self._parts.dram.records.move_end(entry.slot, entry.expiry.at(entry.expires_s))
                    entry.below = False  # its copy there ends by now
                await asyncio.sleep(0)
            if timers is None or timers.first_s == inf:
                self._catalog.timed.pop(space, None)
            if not number % PIECE_SPACES:
                await asyncio.sleep(0)

    # ---- the maximum age of a tenant ----

    def max_age_of(self, tenant: str) -> float:
        """In seconds; 0: none."""
        known = self._parts.tenants.get(tenant)
        return (known.max_age_s or 0.0) if known is not None else 0.0

    def _tenant_changed(self, name: str) -> None:
        max_age_s = self.max_age_of(name)
        if max_age_s == self._ages.get(name, 0.0):
            return
        self._ages[name] = max_age_s
        spaces = self._catalog.tenant_spaces(name)
        for space in spaces:
            space.max_age_s = max_age_s
        if self._parts.below is not None:
            self._parts.below.tier.limit_ages(self.max_age_of, self._clock.now_s)
        if max_age_s:
            task = asyncio.ensure_future(self._cap(spaces, max_age_s))
            self._changes.add(task)
            task.add_done_callback(self._changes.discard)

    async def _cap(self, spaces: Sequence[Space], max_age_s: float) -> None:
        """What is there already becomes no older either."""
        dram = self._parts.dram
        for space in spaces:
            hashes = list(space.entries)
            for start in range(0, len(hashes), PIECE_BLOCKS):
                for hash_ in hashes[start : start + PIECE_BLOCKS]:
                    entry = space.entries.get(hash_)
                    end_s = dram.stored_s(entry.slot) + max_age_s if entry is not None else 0.0
                    if entry is not None and not 0 < entry.expires_s <= end_s:
                        self._catalog.end_at(entry, capped(entry.expiry, end_s))
                        assert entry.expiry is not None, "capped"
                        dram.records.move_end(entry.slot, entry.expiry)
                await asyncio.sleep(0)
