"""Whose memory goes to whom: which segment is given up for new blocks, and what becomes of the blocks in it.

Tenants above their share give up first, the one most above it before all others; then memory that lies
idle, whoever has it; a tenant within its guarantee loses no block. What it has in a segment that another
tenant is entitled to is moved to its other segments. Plans only, plain state; `room` carries them out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import msgspec

from kvstored.catalog.catalog import READY, Catalog, Entry
from kvstored.policy.quota import Allotments, Loser
from kvstored.tiers.dram import DramTier, Segment

CANDIDATES_MAX: Final = 16  # segments of one owner that are looked at, block by block, for one that can go


class Reclaim(msgspec.Struct):
    """A segment to give up: what is evicted first, from it or to make room elsewhere, and whether the rest moves."""

    segment: Segment
    evict: list[Entry]
    moves: bool = False


class Reclaimer:
    """Plans reclaims of segments."""

    def __init__(self, catalog: Catalog, dram: DramTier, allotments: Allotments) -> None:
        self._catalog = catalog
        self._dram = dram
        self._allotments = allotments
        self.held = False
        """Whether the last plan passed over memory of others only because blocks in it are held at this moment."""

    def plan(self, tenant: str, size: int) -> Reclaim | None:
        """The segment to give up for blocks of this size of the tenant; None where it has to pay itself.

        Where blocks in a segment are held, another is taken.
        """
        self.held = False
        if not self._allotments.guarded and not self._catalog.orders.keys() - {(tenant, size)}:
            return None  # nobody else has a block that could go
        # One at a time changes tenants: the successor of the last one is still to come.
        foreign_too = not self._dram.usage().retired_bytes
        used = self._dram.used_bytes_by_tenant()
        segments = [segment for segment in self._dram.segments() if segment.tenant and segment.size_bytes >= size]
        if foreign_too:
            found = self._empty(tenant, segments) or self._by_share(tenant, size, used, segments)
            if found is not None:
                return found
        return self._idle(tenant, size, used, segments, foreign_too=foreign_too)

    def _empty(self, tenant: str, segments: Sequence[Segment]) -> Reclaim | None:
        empty = (segment for segment in segments if segment.tenant != tenant and not segment.used_slots)
        segment = min(empty, key=lambda segment: segment.segment_id, default=None)
        return None if segment is None else Reclaim(segment, [])

    # ---- by share ----

    def _by_share(self, tenant: str, size: int, used: Mapping[str, int], segments: Sequence[Segment]) -> Reclaim | None:
        losers = self._allotments.losers(tenant, used, size)
        entitled = self._allotments.entitled(tenant, used.get(tenant, 0), size)
        for loser in losers:
            theirs = [segment for segment in segments if segment.tenant == loser.tenant]
            found = self._whole(loser, theirs) or (self._packed(loser, theirs) if entitled else None)
            if found is not None:
                return found
        if not entitled:
            return None
        # All within their guarantees, or what is above it cannot go: one has more segments than its blocks need,
        # the tenant itself before others. What it holds of its own is nothing that it need wait for.
        held = self.held
        own = [s for s in segments if s.tenant == tenant and s.slot_bytes != size and s.used_slots]
        if (found := self._packed(Loser(tenant, 0), own)) is not None:
            return found
        self.held = held
        for name in sorted(used.keys() - {tenant} - {loser.tenant for loser in losers}):
            found = self._packed(Loser(name, 0), [segment for segment in segments if segment.tenant == name])
            if found is not None:
                return found
        return None

    def _whole(self, loser: Loser, theirs: Sequence[Segment]) -> Reclaim | None:
        """Their segment that was used last the longest ago, where they may lose all that is in one."""
        last_use = self._catalog.segment_used
        fitting = [segment for segment in theirs if segment.used_bytes <= loser.bytes]
        fitting.sort(key=lambda segment: (last_use.get(segment.segment_id, 0), segment.segment_id))
        unpinned = self._unpinned(fitting)[:CANDIDATES_MAX]
        segment = next((s for s in unpinned if not self._fixed(s) and self._free_to_go(s)), None)
        return None if segment is None else Reclaim(segment, self.occupants(segment))

    def _packed(self, loser: Loser, theirs: Sequence[Segment]) -> Reclaim | None:
        """A segment of theirs whose blocks have room in their others, once the coldest are evicted as far as may be."""
        free: dict[int, int] = {}
        for segment in theirs:
            free[segment.slot_bytes] = free.get(segment.slot_bytes, 0) + segment.free_slots
        emptiest = sorted(theirs, key=lambda segment: (segment.used_bytes, segment.segment_id))

        def short(segment: Segment) -> int:
            """Blocks in it that have no room in the others."""
            return max(0, segment.used_slots - (free[segment.slot_bytes] - segment.free_slots))

        fitting = [segment for segment in emptiest if short(segment) * segment.slot_bytes <= loser.bytes]
        for segment in filter(self._free_to_go, self._unpinned(fitting)[:CANDIDATES_MAX]):
            order = self._catalog.order(loser.tenant, segment.slot_bytes)
            coldest = [cast(Entry, node) for node in itertools.islice(order, short(segment))]
            if len(coldest) == short(segment):
                return Reclaim(segment, coldest, moves=True)
            self.held = True  # what is in no order is in use
        return None

    def _unpinned(self, theirs: Sequence[Segment]) -> list[Segment]:
        """Those in which nothing is leased, whatever their number: leases of some must not hide the others."""
        pinned = self._catalog.pinned
        found = [segment for segment in theirs if segment.segment_id not in pinned.get(segment.tenant, ())]
        self.held = self.held or len(found) < len(theirs)
        return found

    def _free_to_go(self, segment: Segment) -> bool:
        movable = self._movable(segment)
        self.held = self.held or not movable
        return movable

    # ---- by last use ----

    def _idle(
        self, tenant: str, size: int, used: Mapping[str, int], segments: Sequence[Segment], *, foreign_too: bool
    ) -> Reclaim | None:
        """A segment whose last use is older than that of all of ours: nothing in it is hot."""
        last_use = self._catalog.segment_used
        ours_oldest = float("inf")
        others: list[tuple[int, Segment]] = []
        for segment in segments:
            if segment.tenant == tenant and segment.slot_bytes == size:
                # Without a last use it is being filled for the first time, and newer than anything.
                ours_oldest = min(ours_oldest, last_use.get(segment.segment_id, ours_oldest))
            elif segment.used_slots and (segment.tenant == tenant or (foreign_too and self._may_go(segment, used))):
                others.append((last_use.get(segment.segment_id, 0), segment))
        stale = sorted((tick, s.segment_id, s) for tick, s in others if tick < ours_oldest)
        segment_found = next((s for _, _, s in stale[:CANDIDATES_MAX] if self._movable(s) and not self._fixed(s)), None)
        return None if segment_found is None else Reclaim(segment_found, self.occupants(segment_found))

    def _may_go(self, segment: Segment, used: Mapping[str, int]) -> bool:
        owner = segment.tenant
        return segment.used_bytes <= self._allotments.of(owner).spare(used[owner])

    def _movable(self, segment: Segment) -> bool:
        occupants = self.occupants(segment)
        return len(occupants) == segment.used_slots and all(
            not entry.holds and entry.state == READY for entry in occupants
        )

    def _fixed(self, segment: Segment) -> bool:
        """Whether a block in it is pinned by a hint: it may be moved, but not evicted with the rest."""
        return any(entry.pool.order.fixed(entry) for entry in self.occupants(segment))

    def occupants(self, segment: Segment) -> list[Entry]:
        """The blocks in a segment."""
        return [cast(Entry, owner) for owner in self._dram.occupants(segment.segment_id) if owner is not None]

    # ---- who is to demote ----

    def thin_out(self) -> dict[str, int]:
        """Of whom blocks may leave before anybody asks, and how many bytes: see `Allotments.thin_out`."""
        return self._allotments.thin_out(self._dram.used_bytes_by_tenant())


class Claim:
    """Memory that a tenant is entitled to and that is on its way: nobody else's until it has it."""

    LASTS_S: Final = 2.0  # after it was last asked for

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._tenant = ""
        self._until_s = 0.0

    def make(self, tenant: str) -> None:
        """The next segment that is free is this tenant's; another's claim stands until it lapses."""
        if self._tenant in ("", tenant) or self._now_s() > self._until_s:
            self._tenant, self._until_s = tenant, self._now_s() + self.LASTS_S

    def met(self, tenant: str) -> None:
        """The tenant has got room."""
        if self._tenant == tenant:
            self._tenant = ""

    def excludes(self, tenant: str) -> bool:
        """Whether a free segment is claimed by somebody else."""
        return self._tenant not in ("", tenant) and self._now_s() <= self._until_s
