"""Room in DRAM: slots for new blocks, taken from what is free or from what is least worth keeping.

A tenant for which room within its guarantee is on its way waits for it (`take` gives fewer slots); else who
finds nobody above its share pays with its own blocks. Plain state changes, no I/O. Where a lower tier takes
blocks, one that it does not have yet is never dropped for room: it must be demoted first (the mover's work),
and `take` answers with fewer slots meanwhile.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

from kvstored.catalog.catalog import Catalog, Entry, Space
from kvstored.catalog.history import AT_LIMIT, ROOM_MADE, History, Reason
from kvstored.catalog.leases import Lease
from kvstored.catalog.prefetched import PrefetchAccount
from kvstored.catalog.reclaim import Claim, Reclaim, Reclaimer
from kvstored.clock import Clock
from kvstored.keys import slot_bytes
from kvstored.lifetime import Expiry
from kvstored.policy.quota import Allotments
from kvstored.tiers.dram import DramTier

MOVE_BYTES_PER_CALL: Final = 4 << 20  # copied in one go for a segment that changes tenants: about half a millisecond
MADE, COMING, NOTHING = range(3)  # room: it is there; it is on its way; none comes of others


class Room:
    """Hands out slots and takes them back; the only caller of the DRAM tier's allocation."""

    def __init__(
        self,
        catalog: Catalog,
        dram: DramTier,
        clock: Clock,
        history: History,
        counters: Counter[str],
        allotments: Allotments,
    ) -> None:
        self._catalog = catalog
        self._dram = dram
        self._clock = clock
        self._history = history
        self._counters = counters
        self.allotments = allotments
        self.prefetched = PrefetchAccount(counters)
        self.reclaimer = Reclaimer(catalog, dram, allotments)
        self._claim = Claim(clock.monotonic)
        dram.keep_time(clock.wall)
        # Set by the mover: whether a tenant's blocks go below before they may be dropped.
        self.must_demote: Callable[[str], bool] = lambda tenant: False
        self.refusal: Callable[[Entry], str] = lambda entry: ""  # set by the mover: why a block may not go below
        self.refusals: Mapping[str, str] = {}  # each of them -> what it is counted as
        self.taken_bytes = 0  # of slots, ever: what the mover's forecast goes by
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
            taken = self._allocate(tenant, size, allowed) if allowed else []
            slots += taken
            self.taken_bytes += size * len(taken)
            made = taken or self._make(tenant, size, wanted, at_limit=not allowed)
            if not made and not self.take_posted():
                break
        return slots

    def take_free(self, tenant: str, size_bytes: int, count: int) -> list[int]:
        """Up to `count` slots that cost nobody anything."""
        size = slot_bytes(size_bytes)
        allowed = self._allowed(tenant, size, count) if self.could_ever_fit(tenant, size) else 0
        slots = self._allocate(tenant, size, allowed) if allowed else []
        self.taken_bytes += size * len(slots)
        return slots

    def _allowed(self, tenant: str, size: int, count: int) -> int:
        return self.allotments.room(tenant, self._dram.used_bytes_of(tenant), size * count) // size

    def _allocate(self, tenant: str, size: int, count: int) -> list[int]:
        if not self.allotments.guarded:
            return self._dram.allocate(tenant, size, count)
        taken = self._dram.allocate(tenant, size, count, fresh=not self._claim.excludes(tenant))
        if taken:
            self._claim.met(tenant)
        return taken

    def _make(self, tenant: str, size: int, count: int, *, at_limit: bool) -> bool:
        """Evict for new blocks: at its limit a tenant pays with its own."""
        if at_limit:
            sizes = self._own_sizes(tenant, size)
            return any(self._evict_coldest(tenant, one, -(-count * size // one), AT_LIMIT) for one in sizes)
        entitled = self.allotments.entitled(tenant, self._dram.used_bytes_of(tenant), size)
        room = self._reclaim(tenant, size)
        if entitled and room != MADE:
            self._claim.make(tenant)
            if room == COMING or self._passing():
                return False
        return room == MADE or self._evict_coldest(tenant, size, count) > 0

    def _passing(self) -> bool:
        """Whether nothing of others goes now, as was just planned, but will: it is on its way, or held for a moment."""
        return self._dram.usage().retired_bytes > 0 or self.reclaimer.held

    def could_ever_fit(self, tenant: str, size_bytes: int) -> bool:
        """Whether the tier, emptied, has a slot of this size for the tenant."""
        size = slot_bytes(size_bytes)
        return size <= self._dram.largest_slot_bytes and self.allotments.room(tenant, 0, size) >= size

    def _evict_coldest(self, tenant: str, size: int, count: int, rule: str = ROOM_MADE) -> int:
        """Evict up to `count` blocks of the tenant's order, coldest first; returns how many."""
        order = self._catalog.order(tenant, size)
        victims: list[Entry] = []
        must_demote = self.must_demote(tenant)
        for node in itertools.islice(order, count):
            entry = cast(Entry, node)
            if must_demote and not entry.below and not self.refusal(entry):
                break
            victims.append(entry)
        self._evict_inline(victims, size, rule)
        return len(victims)

    def _evict_inline(self, entries: Sequence[Entry], size: int, rule: str) -> None:
        """Evict while somebody waits for the room, which demotion in time would have spared."""
        self._counters["evictions_inline_blocks"] += len(entries)
        self._counters["evictions_inline_bytes"] += len(entries) * size
        self.evict(entries, rule, Reason.QUOTA if rule is AT_LIMIT else Reason.EVICTED)

    def evict(self, entries: Sequence[Entry], rule: str, reason: Reason = Reason.EVICTED) -> None:
        """Drop blocks from DRAM; those that are not below are gone, and it is noted why.

        Where what the gate refuses goes, that it does is the rule.
        """
        entries = [entry for entry in entries if not entry.pool.order.fixed(entry)]  # pinned since they were chosen
        refuses = self.must_demote("") and reason in (Reason.EVICTED, Reason.QUOTA)
        self._catalog.evict(entries)
        lost: defaultdict[tuple[Space, str], list[bytes]] = defaultdict(list)
        for entry in entries:
            if not entry.below:
                why = (self.refusal(entry) if refuses else "") or rule
                lost[entry.pool.space, why].append(entry.hash)
                if counter := self.refusals.get(why):
                    self._counters[f"{counter}_bytes"] += entry.pool.slot_bytes
            self.forget(entry)
        for (space, why), hashes in lost.items():
            self._history.note(space, hashes, reason, why)
            if counter := self.refusals.get(why):
                self._counters[f"{counter}_blocks"] += len(hashes)
        lost_blocks = sum(map(len, lost.values()))
        self._counters["evicted_lost_blocks"] += lost_blocks
        self._counters["evicted_clean_blocks"] += len(entries) - lost_blocks

    def sparing(self, entries: list[Entry], asker: str) -> list[Entry]:
        """Those of the blocks that may go for the asker without taking what is guaranteed to other tenants."""
        if not self.allotments.guarded:
            return entries
        spare = {name: self.allotments.spare(name, used) for name, used in self._dram.used_bytes_by_tenant().items()}
        kept: list[Entry] = []
        for entry in entries:
            tenant = entry.pool.space.tenant
            if tenant == asker or spare[tenant] >= entry.pool.slot_bytes:
                spare[tenant] -= entry.pool.slot_bytes
                kept.append(entry)
        return kept

    # ---- entering and leaving ----

    def enter(
        self,
        space: Space,
        hash_: bytes,
        parent: bytes,
        slot: int,
        size_bytes: int,
        state: int,
        expiry: Expiry | None = None,
    ) -> Entry:
        """Give a slot to a block that is being written or promoted; the caller holds it once."""
        entry = self._catalog.reserve(space, hash_, parent, slot, size_bytes, state, expiry)
        self._dram.bind(slot, entry)
        self._dram.records.begin(slot, size_bytes, space.digest, hash_, parent, expiry)
        return entry

    def publish(self, entry: Entry, content_hash: bytes) -> bool:
        """Make a block readable whose bytes are in its slot. False: it was forgotten meanwhile."""
        if not self._catalog.publish(entry):
            return False
        self._dram.records.commit(entry.slot, content_hash)
        return True

    def forget(self, entry: Entry) -> None:
        """Take a block's key away and, as soon as nothing holds it, its slot."""
        space = entry.pool.space
        if space.prefetched:
            self.prefetched.gone(space, entry)
        slot = self._catalog.forget(entry)
        if slot is not None:
            self._dram.free(slot)
        else:  # a restarted daemon must not find it either, whoever still reads the slot
            self._dram.records.clear(entry.slot)

    def unhold(self, entries: list[Entry], *, used: bool = False) -> None:
        """End one hold of each block, given in chain order; `used` says that a client had it."""
        for slot in self._catalog.unhold(entries, used=used):
            self._dram.free(slot)

    def unlease(self, lease: Lease) -> None:
        """End the lease's hold of its blocks, which a client had."""
        for slot in self._catalog.unlease(lease.entries, {slot >> 20 for slot, _ in lease.runs}):
            self._dram.free(slot)

    # ---- whole segments, when sizes or tenants change ----

    def to_demote(self, tenant: str, size: int, count: int) -> list[Entry] | None:
        """What must be below before room for so many blocks can be made as `take` does it.

        None: the coldest of the tenant's own of this size.
        """
        allowed = self._allowed(tenant, size, count)
        if not allowed:
            return self._own_coldest(tenant, size, count)
        if self._dram.available(tenant, size) >= count == allowed:
            return []  # it came meanwhile
        plan = self.reclaimer.plan(tenant, size)
        if plan is not None:
            return [entry for entry in plan.evict if not entry.below]
        # As in `_make`: who is within its guarantee waits for the segment that is on its way, and pays nothing itself.
        entitled = self.allotments.entitled(tenant, self._dram.used_bytes_of(tenant), size)
        return [] if entitled and self._passing() else None

    def _own_coldest(self, tenant: str, size: int, count: int) -> list[Entry]:
        for one in self._own_sizes(tenant, size):
            coldest = itertools.islice(self._catalog.order(tenant, one), -(-count * size // one))
            if found := [cast(Entry, node) for node in coldest]:
                return [entry for entry in found if not entry.below]
        return []

    def _own_sizes(self, tenant: str, size: int) -> list[int]:
        return [size, *(other for owner, other in self._catalog.orders if owner == tenant and other != size)]

    def _reclaim(self, tenant: str, size: int) -> int:
        """Empty the segment that is to be given up for these blocks: what came of it."""
        plan = self.reclaimer.plan(tenant, size)
        if plan is None:
            return NOTHING
        segment = plan.segment
        if self.must_demote(segment.tenant) and not all(entry.below or self.refusal(entry) for entry in plan.evict):
            return COMING
        self._evict_inline(
            plan.evict, segment.slot_bytes, "its segment in DRAM went to blocks of another size or tenant"
        )
        if plan.moves:
            self._move_out(plan)
        if segment.used_slots:
            return COMING
        self._counters["segments_reclaimed"] += 1
        if segment.tenant == tenant:
            self._catalog.segment_used.pop(segment.segment_id, None)
            return MADE  # the tier gives it another slot size by itself
        self.retire(segment.segment_id)
        return COMING

    def retire(self, segment_id: int) -> None:
        """Take a segment in which nothing is used out of service.

        A fresh one, which is nobody's, takes its place when every holder has let go.
        """
        self._catalog.segment_used.pop(segment_id, None)
        self._dram.retire(segment_id)
        self.on_retired(segment_id)

    def _move_out(self, plan: Reclaim) -> None:
        """Copy blocks to other segments of their tenant, some at a time: whoever needs the room asks again."""
        segment = plan.segment
        self._dram.fill_last(segment.segment_id)
        count = max(1, MOVE_BYTES_PER_CALL // segment.slot_bytes)
        for entry in self.reclaimer.occupants(segment)[:count]:
            (slot,) = self._dram.allocate(segment.tenant, segment.slot_bytes, 1, fresh=False)
            assert slot >> 20 != segment.segment_id, "planned with room elsewhere"
            old, entry.slot = entry.slot, slot
            entry.pool.space.known = None
            self._dram.moved(old, slot)
            self._dram.bind(slot, entry)
            self._dram.relocate(old, slot, entry.size_bytes, (entry.pool.space.digest, entry.hash, entry.parent))
            self._counters["relocated_blocks"] += 1
