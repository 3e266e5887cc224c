"""Hints: what clients say of blocks that are in DRAM, and how long it holds.

A hint is about a chain: pins and priorities hold for what the blocks hang on too, as far as it is in DRAM. None
of them survives the block's eviction or a restart. Purges, deletes, ends and epoch bumps win over all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import Final, cast

import msgspec

from kvstored.catalog.catalog import READY, Entry, Space
from kvstored.catalog.hinting import Hinting
from kvstored.catalog.leases import Session
from kvstored.errors import InvalidArgument
from kvstored.keys import BLOCKS_PER_CALL_MAX
from kvstored.lifetime import Expiry, Lifetime, capped
from kvstored.policy.hints import HARD, PRIORITY_MAX, Hint
from kvstored.store.parts import Parts

PIN_MAX_S: Final = 86_400.0
CONTINUES_S: Final = 60.0  # so soon a chain that goes on is asked for again
PIECE_BLOCKS: Final = 512  # in one go
SWEEP_EVERY_S: Final = 1.0


class Wish(msgspec.Struct, frozen=True):
    """What a client says of a chain. Times are from now; 0, None or False: nothing is said."""

    priority: int | None = None
    ttl_s: float = 0.0
    soft_pin_s: float = 0.0
    hard_pin_s: float = 0.0
    continues: bool = False
    final: bool = False
    unpin: bool = False

    def check(self) -> None:
        """Raises InvalidArgument."""
        if self.priority is not None and not -PRIORITY_MAX <= self.priority <= PRIORITY_MAX:
            raise InvalidArgument(f"priority is {self.priority}: it must be -{PRIORITY_MAX} to {PRIORITY_MAX}")
        if max(self.soft_pin_s, self.hard_pin_s) > PIN_MAX_S:
            raise InvalidArgument(f"a pin lasts {PIN_MAX_S:.0f} s at most: pin again before it ends")
        if self.ttl_s:
            Lifetime(self.ttl_s).check()
        if (self.final or self.unpin) and (self.soft_pin_s or self.hard_pin_s or self.continues):
            raise InvalidArgument("final and unpin exclude pins and continues: they say the opposite")


class HintResult(msgspec.Struct):
    """`blocks` were in DRAM, with what they hang on; the hint has an effect on `applied` of them."""

    blocks: int = 0
    applied: int = 0
    hard_pinned_bytes: int = 0  # of the tenant, by now


class PinCounts(msgspec.Struct):
    """Hinted blocks of one namespace."""

    space: Space
    hard_blocks: int = 0
    hard_bytes: int = 0
    soft_blocks: int = 0
    soft_bytes: int = 0
    final_blocks: int = 0
    preferred_blocks: int = 0  # with a priority other than 0
    longest_s: float = 0.0  # until the last of its pins ends


class Hints:
    """Takes hints, and ends them."""

    def __init__(self, parts: Parts, end_of: Callable[[Space, Lifetime | None], Expiry | None]) -> None:
        self._parts = parts
        self._end_of = end_of
        self.hinting = Hinting(parts.catalog)
        # Set by the store, where it wants to know: a chain is said not to go on.
        self.on_final: Callable[[Space, Sequence[bytes]], None] | None = None
        # How much a tenant may pin hard; a simulation has no tenants to say it.
        self.hard_limit_of: Callable[[str], int] = self._hard_limit

    def _hard_limit(self, tenant: str) -> int:
        known = self._parts.tenants.get(tenant)
        return known.hard_pin_bytes if known is not None else 0

    # ---- taking ----

    async def hint(self, session: Session, space: Space, hashes: Sequence[bytes], wish: Wish) -> HintResult:
        """Take a hint about consecutive blocks of a chain. Raises InvalidArgument or PermissionDenied."""
        session.check_may_write()
        wish.check()
        space.drop_ended(hashes)
        if wish.final and self.on_final is not None:
            self.on_final(space, hashes)
        run = self._ready(space, hashes)
        own = {entry.hash for entry in run}
        if run and not wish.final:
            run = [*self._ready_above(space, run[0]), *run]
        result = HintResult(len(run))
        digest, run_hashes = space.digest, [entry.hash for entry in run]
        allowed = self._hard_places(space.tenant, run, wish)
        # The tail first, so that all of a chain stand in their order as if it was one call.
        for start in reversed(range(0, len(run_hashes), PIECE_BLOCKS)):
            if space.digest != digest:
                break  # an epoch has passed
            piece = self._ready(space, run_hashes[start : start + PIECE_BLOCKS])
            result.applied += self._apply(piece, wish, allowed - start)
            if wish.ttl_s:
                self._prolong(space, [entry for entry in piece if entry.hash in own], wish.ttl_s)
            await asyncio.sleep(0)
        self._parts.counters["hinted_blocks"] += result.applied
        result.hard_pinned_bytes = self.hinting.hard_bytes(space.tenant)
        return result

    def _ready(self, space: Space, hashes: Sequence[bytes]) -> list[Entry]:
        found = (space.entries.get(hash_) for hash_ in dict.fromkeys(hashes))
        return [entry for entry in found if entry is not None and entry.state == READY]

    def _ready_above(self, space: Space, first: Entry) -> list[Entry]:
        above = space.ancestors(first.parent, BLOCKS_PER_CALL_MAX)
        return [entry for entry in above if entry.state == READY]

    def _hard_places(self, tenant: str, run: Sequence[Entry], wish: Wish) -> int:
        """How many leading blocks may be pinned hard."""
        return _fitting(run, self.hard_limit_of(tenant) - self.hinting.hard_bytes(tenant)) if wish.hard_pin_s else 0

    def _apply(self, piece: Sequence[Entry], wish: Wish, hard_places: int) -> int:
        """Say it to the orders; returns on how many it has an effect."""
        if wish.priority is not None or wish.continues:
            for entry in piece:
                entry.hint = wish.continues or (wish.priority or 0) > 0
        elif wish.final:
            for entry in piece:
                entry.hint = False
        return sum(self._apply_to(group, wish, hard_places) for group in _by_pool(piece))

    def _apply_to(self, entries: Sequence[Entry], wish: Wish, hard_places: int) -> int:
        """The same in one pool, with all that there is to say."""
        tenant = entries[0].pool.space.tenant
        hinted = self.hinting.of(tenant, entries[0].pool.slot_bytes)
        if hinted is None:
            return 0
        now_s, applied = self._parts.clock.monotonic(), 0
        if wish.unpin:
            hinted.unpin(entries)
        if wish.priority is not None:
            hinted.prefer(entries, wish.priority)
        if wish.unpin or wish.priority is not None or wish.ttl_s:
            applied = len(entries)
        if soft_s := max(wish.soft_pin_s, CONTINUES_S if wish.continues else 0.0):
            applied = max(applied, hinted.pin(entries, now_s + soft_s))
        if hard_places > 0:
            left_bytes = self.hard_limit_of(tenant) - self.hinting.hard_bytes(tenant)
            fitting = entries[: min(hard_places, _fitting(entries, left_bytes))]
            applied = max(applied, hinted.pin(fitting, now_s + wish.hard_pin_s, hard=True))
        return hinted.end(entries) if wish.final else applied

    def _prolong(self, space: Space, entries: Sequence[Entry], ttl_s: float) -> None:
        """Blocks that end at a time end later, if that is later; no older than their tenant's may become."""
        expiry = self._end_of(space, Lifetime(ttl_s))
        for entry in entries:
            known = entry.expiry
            if expiry is None or known is None or known.sliding_s:
                continue
            age_end_s = self._parts.dram.stored_s(entry.slot) + space.max_age_s if space.max_age_s else 0.0
            later = capped(expiry, age_end_s)
            if later is not None and later.expires_s > entry.expires_s:
                self._parts.catalog.end_at(entry, later)
                self._parts.dram.records.move_end(entry.slot, later)
                entry.below = False  # offered to NVMe again, whose copy ends later then

    # ---- ending ----

    async def run(self) -> None:
        """End pins whose time is over, and those beyond a limit that was lowered, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            await self.sweep()

    async def sweep(self) -> None:
        """End everything that is due, in pieces."""
        for tenant, size, hinted in self.hinting:
            while hinted.sweep(self._parts.clock.monotonic(), PIECE_BLOCKS):  # noqa: ASYNC110 - a turn for others
                await asyncio.sleep(0)
            over_bytes = self.hinting.hard_bytes(tenant) - self.hard_limit_of(tenant)
            if over_bytes > 0:  # it was lowered
                pinned = (node for node, hint in list(hinted.known.items()) if hint.place == HARD)
                hinted.unpin(islice(pinned, -(-over_bytes // size)))

    # ---- for people ----

    async def listed(self, tenant: str | None) -> list[PinCounts]:
        """Hinted blocks by namespace, of one tenant or of all."""
        counts: dict[Space, PinCounts] = {}
        now_s = self._parts.clock.monotonic()
        for owner, size, hinted in self.hinting:
            if tenant not in (None, owner):
                continue
            for number, (node, hint) in enumerate(list(hinted.known.items()), 1):
                space = cast(Entry, node).pool.space
                _count(counts.setdefault(space, PinCounts(space)), hint, size, now_s)
                if not number % PIECE_BLOCKS:
                    await asyncio.sleep(0)
        return list(counts.values())


def _count(counts: PinCounts, hint: Hint, size: int, now_s: float) -> None:
    if hint.hard_until_s:
        counts.hard_blocks += 1
        counts.hard_bytes += size
    elif hint.soft_until_s:
        counts.soft_blocks += 1
        counts.soft_bytes += size
    counts.final_blocks += hint.final
    counts.preferred_blocks += hint.priority != 0
    counts.longest_s = max(counts.longest_s, hint.hard_until_s - now_s, hint.soft_until_s - now_s)


def _by_pool(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries by their pool, each group in chain order."""

    def number(entry: Entry) -> int:
        return entry.pool.slot_bytes

    return [list(group) for _, group in groupby(sorted(entries, key=number), number)]


def _fitting(entries: Sequence[Entry], room_bytes: int) -> int:
    """How many leading blocks fit into the room, those that are pinned already for nothing."""
    for number, entry in enumerate(entries):
        room_bytes -= 0 if entry.pool.order.fixed(entry) else entry.pool.slot_bytes
        if room_bytes < 0:
            return number
    return len(entries)
