"""Room in DRAM: slots for new blocks, taken from what is free or from what is least worth keeping.

Plain state changes, no I/O. Where a lower tier takes blocks, one that it does not have yet is
never dropped for room: it must be demoted first (the mover's work), and `take` answers with
fewer slots meanwhile.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

from kvstored.catalog import Catalog, Entry, Space
from kvstored.clock import Clock
from kvstored.history import Gone, History
from kvstored.keys import slot_bytes
from kvstored.policy.quota import Quota
from kvstored.tiers.dram import DramTier, Segment

UNLIMITED: Final = Quota()
CANDIDATES_MAX: Final = 16  # stale segments that are looked at, block by block, for one that can go
EMPTIED: Final = -1  # older than any use


class Room:
    """Hands out slots and takes them back; the only caller of the DRAM tier's allocation."""

    def __init__(
        self,
        catalog: Catalog,
        dram: DramTier,
        clock: Clock,
        history: History,
        counters: Counter[str],
        quotas: Mapping[str, Quota],
    ) -> None:
        self._catalog = catalog
        self._dram = dram
        self._clock = clock
        self._history = history
        self._counters = counters
        self._quotas = quotas
        self.must_demote: Callable[[], bool] = lambda: False  # set by the mover
        self.on_retired: Callable[[int], None] = lambda segment_id: None  # set by the store
        # Set by the store: ends leases whose release clients have posted, some at a time; False: there were none.
        self.take_posted: Callable[[], bool] = lambda: False

    # ---- taking ----

    def take(self, tenant: str, size_bytes: int, count: int) -> list[int]:
        """Up to `count` slots for blocks of this size, evicting what is colder."""
        size = slot_bytes(size_bytes)
        slots: list[int] = []
        if not self.could_ever_fit(tenant, size):
            return slots  # nothing that it could evict would help
        while len(slots) < count:
            wanted = count - len(slots)
            allowed = self._allowed(tenant, size, wanted)
            taken = self._dram.allocate(tenant, size, allowed) if allowed else []
            slots += taken
            made = taken or self._make(tenant, size, wanted, at_limit=not allowed)
            if not made and not self.take_posted():
                break
        return slots

    def _allowed(self, tenant: str, size: int, count: int) -> int:
        used_bytes, _ = self._dram.tenant_usage().get(tenant, (0, 0))
        return self._quotas.get(tenant, UNLIMITED).room(used_bytes, size * count) // size

    def _make(self, tenant: str, size: int, count: int, *, at_limit: bool) -> bool:
        """Evict for new blocks: at its limit a tenant pays with its own."""
        if not at_limit:
            return self._reclaim(tenant, size) or self._evict_coldest(tenant, size, count) > 0
        sizes = [size, *(other for owner, other in self._catalog.orders if owner == tenant and other != size)]
        return any(self._evict_coldest(tenant, one, -(-count * size // one)) for one in sizes)

    def could_ever_fit(self, tenant: str, size_bytes: int) -> bool:
        """Whether the tier, emptied, has a slot of this size for the tenant."""
        size = slot_bytes(size_bytes)
        quota = self._quotas.get(tenant, UNLIMITED)
        return size <= self._dram.largest_slot_bytes and quota.room(0, size) >= size

    def _evict_coldest(self, tenant: str, size: int, count: int) -> int:
        """Evict up to `count` blocks of the tenant's order, coldest first; returns how many."""
        order = self._catalog.order(tenant, size)
        victims: list[Entry] = []
        must_demote = self.must_demote()
        for node in itertools.islice(order, count):
            entry = cast(Entry, node)
            if must_demote and not entry.below:
                break
            victims.append(entry)
        self.evict(victims, "room for new blocks")
        return len(victims)

    def evict(self, entries: Sequence[Entry], rule: str) -> None:
        """Drop blocks from DRAM; those that are not below are gone, and it is noted why."""
        lost = Gone("evicted", rule, self._clock.wall())
        self._catalog.evict(entries)
        for entry in entries:
            if entry.below:
                self._counters["evicted_clean_blocks"] += 1
            else:
                self._counters["evicted_lost_blocks"] += 1
                self._history.note(entry.pool.space.digest, (entry.hash,), lost)
            self.forget(entry)

    # ---- entering and leaving ----

    def enter(self, space: Space, hash_: bytes, parent: bytes, slot: int, size_bytes: int, state: int) -> Entry:
        """Give a slot to a block that is being written or promoted; the caller holds it once."""
        entry = self._catalog.reserve(space, hash_, parent, slot, size_bytes, state)
        self._dram.bind(slot, entry)
        self._dram.records.begin(slot, size_bytes, space.digest, hash_, parent)
        return entry

    def publish(self, entry: Entry, content_hash: bytes) -> bool:
        """Make a block readable whose bytes are in its slot. False: it was forgotten meanwhile."""
        if not self._catalog.publish(entry):
            return False
        self._dram.records.commit(entry.slot, content_hash)
        return True

    def forget(self, entry: Entry) -> None:
        """Take a block's key away and, as soon as nothing holds it, its slot."""
        slot = self._catalog.forget(entry)
        if slot is not None:
            self._dram.free(slot)
        else:  # a restarted daemon must not find it either, whoever still reads the slot
            self._dram.records.clear(entry.slot)

    def unhold(self, entries: list[Entry], *, used: bool = False) -> None:
        """End one hold of each block, given in chain order; `used` says that a client had it."""
        for slot in self._catalog.unhold(entries, used=used):
            self._dram.free(slot)

    # ---- whole segments, when sizes or tenants change ----

    def _reclaim(self, tenant: str, size: int) -> bool:
        """Empty the segment of another size or tenant whose last use is older than that of all of ours.

        Nothing in it is hot then, so nothing needs to move: its blocks are evicted. True where
        room may have come of it.
        """
        segment = self.stale_segment(tenant, size)
        if segment is None:
            return False
        entries = self.occupants(segment)
        if self.must_demote() and not all(entry.below for entry in entries):
            return False
        self.evict(entries, "its segment went to blocks of another size or tenant")
        return self._release(segment, tenant)

    def _release(self, segment: Segment, tenant: str) -> bool:
        assert not segment.used_slots, "a reclaimed segment is empty"
        self._counters["segments_reclaimed"] += 1
        self._catalog.segment_used.pop(segment.segment_id, None)
        if segment.tenant == tenant:
            return True  # the tier gives it another slot size by itself
        self._dram.retire(segment.segment_id)
        self.on_retired(segment.segment_id)
        return False  # a fresh one takes its place when every holder has let go

    def stale_segment(self, tenant: str, size: int) -> Segment | None:
        """The segment to give up for blocks of this size: one that another tenant emptied, or one less worth
        than all that the size has. Where blocks in it are held, the next is taken."""
        if not self._catalog.orders.keys() - {(tenant, size)}:
            return None
        used = self._catalog.segment_used
        # One at a time changes tenants: the successor of the last one is still to come.
        foreign_too = not self._dram.usage().retired_bytes
        ours_oldest = float("inf")
        others: list[tuple[int, Segment]] = []
        for segment in self._dram.segments():
            if segment.tenant == tenant and segment.slot_bytes == size:
                # Without a last use it is being filled for the first time, and newer than anything.
                ours_oldest = min(ours_oldest, used.get(segment.segment_id, ours_oldest))
            elif segment.tenant and segment.size_bytes >= size and (foreign_too or segment.tenant == tenant):
                if segment.used_slots:
                    others.append((used.get(segment.segment_id, 0), segment))
                elif segment.tenant != tenant:
                    others.append((EMPTIED, segment))
        stale = sorted((tick, s.segment_id, s) for tick, s in others if tick < ours_oldest)
        return next((segment for _, _, segment in stale[:CANDIDATES_MAX] if self._movable(segment)), None)

    def _movable(self, segment: Segment) -> bool:
        occupants = self.occupants(segment)
        return len(occupants) == segment.used_slots and all(not entry.holds for entry in occupants)

    def occupants(self, segment: Segment) -> list[Entry]:
        """The blocks in a segment."""
        return [cast(Entry, owner) for owner in self._dram.occupants(segment.segment_id) if owner is not None]
