"""Which segment serves whom: slots per tenant and slot size, and the account of the DRAM tier.

Plain state over segments, without memory calls of its own. Slot numbers are
`segment id << 20 | index`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvstored.keys import slot_bytes
from kvstored.tiers.base import Usage
from kvstored.tiers.segment import INDEX_BITS, INDEX_MASK, Segment


class SegmentPool:
    """Hands out slots and takes them back, each call in a time that does not depend on how many there are.

    A segment serves one tenant in its life, because a client that was given its descriptor
    keeps seeing its bytes. Memory changes tenants only through `retire`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._segments: dict[int, Segment] = {}
        # Which segments have free slots, per tenant and slot size; which are without any used
        # slot, per tenant ("" for those never cut). Dicts serve as ordered sets, by segment id.
        self._open: dict[tuple[str, int], dict[int, Segment]] = {}
        self._unused: dict[str, dict[int, Segment]] = {"": {}}
        self._used_bytes = self._dead_bytes = self._retired_bytes = self._blocks = 0
        self._tenants: dict[str, tuple[int, int]] = {}
        self._wiping: Counter[str] = Counter()  # bytes of free slots that are taken to be wiped, in the above
        self.wall: Callable[[], float] = lambda: 0.0  # set by who has a clock
        self.since_s = 0.0  # when it was: what was there before was stored before

    # ---- slots ----

    def allocate(self, tenant: str, size_bytes: int, count: int, *, fresh: bool = True) -> list[int]:
        """Up to `count` slots for blocks of a size; fewer where nothing is free.

        From segments of the tenant and slot size, then from others of the tenant that nothing
        uses, then, if `fresh`, from segments that never were anybody's.
        """
        size = slot_bytes(size_bytes)
        slots: list[int] = []
        while len(slots) < count:
            segment = self._open_segment(tenant, size, fresh=fresh)
            if segment is None:
                break
            slots += self._take(segment, count - len(slots))
        return slots

    def _open_segment(self, tenant: str, size: int, *, fresh: bool) -> Segment | None:
        for segment in self._open.get((tenant, size), {}).values():
            return segment
        return self._cut_unused(tenant, size, (tenant, "") if fresh else (tenant,))

    def _cut_unused(self, tenant: str, size: int, owners: Sequence[str]) -> Segment | None:
        for owner in owners:
            for segment in self._unused.get(owner, {}).values():
                if segment.size_bytes >= size:
                    self._cut(segment, tenant, size)
                    return segment
        return None

    def _cut(self, segment: Segment, tenant: str, size: int) -> None:
        before = (segment.tenant, segment.slot_bytes, segment.dead_bytes)
        segment.cut(tenant, size)
        self._open.get(before[:2], {}).pop(segment.segment_id, None)
        self._unused[before[0]].pop(segment.segment_id)
        self._dead_bytes += segment.dead_bytes - before[2]
        self._unused.setdefault(tenant, {})[segment.segment_id] = segment
        self._open.setdefault((tenant, size), {})[segment.segment_id] = segment

    def take_old(self, segment_id: int, count: int) -> list[int]:
        """Take up to `count` free slots of one segment that may hold old bytes, to be wiped: then `give_back_old`.

        They are nobody's blocks, and count for no limit.
        """
        segment = self._segments.get(segment_id)
        if segment is None or segment.retired or not segment.old_slots:
            return []
        slots = self._take(segment, count, old=True)
        self._wiping[segment.tenant] += len(slots) * segment.slot_bytes
        return slots

    def give_back_old(self, slots: Sequence[int]) -> None:
        """What `take_old` took is free again."""
        for slot in slots:
            segment = self._segments[slot >> INDEX_BITS]
            self._wiping[segment.tenant] -= segment.slot_bytes
            self.free(slot)

    def _take(self, segment: Segment, count: int, *, old: bool = False) -> list[int]:
        if not segment.used_slots:
            del self._unused[segment.tenant][segment.segment_id]
        slots = segment.take_old(count) if old else segment.take(count, int(self.wall()))
        if not segment.free_slots:
            del self._open[segment.tenant, segment.slot_bytes][segment.segment_id]
        self._charge(segment, len(slots))
        return slots

    def free(self, slot: int) -> None:
        """Take a slot back; its record says so before its bytes can change."""
        segment = self._segments[slot >> INDEX_BITS]
        if not segment.free_slots:
            self._open[segment.tenant, segment.slot_bytes][segment.segment_id] = segment
        segment.give_back(slot & INDEX_MASK)
        if not segment.used_slots:
            self._unused[segment.tenant][segment.segment_id] = segment
        self._charge(segment, -1)

    def _charge(self, segment: Segment, blocks: int) -> None:
        change = blocks * segment.slot_bytes
        self._used_bytes += change
        self._blocks += blocks
        used, count = self._tenants.get(segment.tenant, (0, 0))
        self._tenants[segment.tenant] = (used + change, count + blocks)

    def available(self, tenant: str, size_bytes: int) -> int:
        """How many slots `allocate` would give now."""
        size = slot_bytes(size_bytes)
        slots = sum(segment.free_slots for segment in self._open.get((tenant, size), {}).values())
        for owner in (tenant, ""):
            for segment in self._unused.get(owner, {}).values():
                if segment.slot_bytes != size:
                    slots += segment.size_bytes // size
        return slots

    def class_of(self, slot: int) -> int:
        """The slot's size in bytes."""
        return self._segments[slot >> INDEX_BITS].slot_bytes

    def address(self, slot: int) -> int:
        """Where the slot lies in this process."""
        segment = self._segments[slot >> INDEX_BITS]
        return segment.address + (slot & INDEX_MASK) * segment.slot_bytes

    def place(self, slot: int) -> tuple[int, int]:
        """Where a client finds the slot: segment id and offset in bytes."""
        segment_id = slot >> INDEX_BITS
        return segment_id, (slot & INDEX_MASK) * self._segments[segment_id].slot_bytes

    def keep_time(self, wall: Callable[[], float]) -> None:
        """Note from here on when slots are taken."""
        self.wall, self.since_s = wall, wall()

    def stored_s(self, slot: int) -> float:
        """When the block in a slot was stored, at the latest (wall clock)."""
        return self._segments[slot >> INDEX_BITS].taken_s(slot & INDEX_MASK) or self.since_s

    def is_adopted(self, slot: int) -> bool:
        """Whether an earlier process put the block there: when is not known."""
        return not self._segments[slot >> INDEX_BITS].taken_s(slot & INDEX_MASK)

    def moved(self, old: int, new: int) -> None:
        """The block in a slot is in another one now, and as old as it was."""
        taken_s = self._segments[old >> INDEX_BITS].taken_s(old & INDEX_MASK)
        self._segments[new >> INDEX_BITS].note_taken(new & INDEX_MASK, taken_s)

    def bind(self, slot: int, owner: object) -> None:
        """Note what the slot holds, for `owner` and `occupants`; forgotten when the slot is freed."""
        self._segments[slot >> INDEX_BITS].bind(slot & INDEX_MASK, owner)

    def owner(self, slot: int) -> object | None:
        """What was bound to the slot."""
        return self._segments[slot >> INDEX_BITS].owner(slot & INDEX_MASK)

    # ---- segments ----

    def fill_last(self, segment_id: int) -> None:
        """Take slots of this segment only where no other of its tenant and slot size has any: it is being emptied."""
        segment = self._segments[segment_id]
        same = self._open.get((segment.tenant, segment.slot_bytes), {})
        if segment_id in same:
            same[segment_id] = same.pop(segment_id)

    def add(self, segment: Segment) -> None:
        """Put a segment that nobody had yet into service."""
        self._segments[segment.segment_id] = segment
        self._unused[""][segment.segment_id] = segment

    def adopt(self, segment: Segment, taken: Sequence[int]) -> None:
        """Put a segment of an earlier process into service, with these slots in use."""
        if not segment.records.slots:
            self.add(segment)
            return
        segment.adopt(taken)
        self._segments[segment.segment_id] = segment
        open_ones = self._open.setdefault((segment.tenant, segment.slot_bytes), {})
        unused = self._unused.setdefault(segment.tenant, {})
        if segment.free_slots:
            open_ones[segment.segment_id] = segment
        if not segment.used_slots:
            unused[segment.segment_id] = segment
        self._dead_bytes += segment.dead_bytes
        self._charge(segment, len(taken))

    def segments(self, tenant: str | None = None) -> list[Segment]:
        """All segments in service, or those of one tenant."""
        return [s for s in self._segments.values() if not s.retired and tenant in (None, s.tenant)]

    def in_service(self, segment_id: int) -> bool:
        """Whether blocks may lie in a segment; its id is not used again."""
        segment = self._segments.get(segment_id)
        return segment is not None and not segment.retired

    def occupants(self, segment_id: int) -> list[object]:
        """What is bound to the slots of a segment; nothing where it is gone."""
        segment = self._segments.get(segment_id)
        return [] if segment is None else segment.occupants()

    def retire(self, segment_id: int) -> None:
        """Take a segment without used slots out of service; its bytes count as retired until disposed of."""
        segment = self._segments[segment_id]
        assert segment.tenant, "a segment that is nobody's has nothing to hide"
        assert not segment.retired, "retired once"
        assert not segment.used_slots, "nothing uses it"
        segment.retired = True
        del self._unused[segment.tenant][segment_id]
        del self._open[segment.tenant, segment.slot_bytes][segment_id]
        self._dead_bytes -= segment.dead_bytes
        self._retired_bytes += segment.size_bytes

    def retired(self, tenant: str) -> list[int]:
        """Ids of a tenant's retired segments that are not disposed of: clients have not let go of them."""
        return [s.segment_id for s in self._segments.values() if s.retired and s.tenant == tenant]

    def is_retired(self, segment_id: int) -> bool:
        """Whether it is retired and not yet disposed of."""
        segment = self._segments.get(segment_id)
        return segment is not None and segment.retired

    # ---- account ----

    def usage(self) -> Usage:
        """The account."""
        free = self.capacity_bytes - self._used_bytes - self._dead_bytes - self._retired_bytes
        return Usage(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self._used_bytes,
            dead_bytes=self._dead_bytes,
            retired_bytes=self._retired_bytes,
            free_bytes=free,
            blocks=self._blocks,
        )

    def tenant_usage(self) -> dict[str, tuple[int, int]]:
        """Per tenant: bytes used and blocks."""
        return dict(self._tenants)

    def used_bytes_of(self, tenant: str) -> int:
        """Bytes of the slots that a tenant has taken: what its limit and its guarantee count."""
        return self._tenants.get(tenant, (0, 0))[0] - self._wiping[tenant]

    def used_bytes_by_tenant(self) -> dict[str, int]:
        """The same of all tenants that have, or had, any."""
        return {tenant: used - self._wiping[tenant] for tenant, (used, _) in self._tenants.items()}

    def misaccounted(self) -> list[str]:
        """Tenants whose account is not what their segments say, a line each; looks at segments alone."""
        counted: dict[str, int] = {}
        for segment in self._segments.values():
            counted[segment.tenant] = counted.get(segment.tenant, 0) + segment.used_bytes
        accounts = {tenant: used for tenant, (used, _) in self._tenants.items()}  # what is being wiped is in both
        names = [name for name in {**counted, **accounts} if counted.get(name, 0) != accounts.get(name, 0)]
        return [f"{n} has {counted.get(n, 0)} bytes of DRAM, its account is {accounts.get(n, 0)}" for n in names]

    def audit(self) -> None:
        """Count everything anew from the segments; AssertionError where the account is wrong."""
        used = dead = in_service = blocks = 0
        tenants: dict[str, list[int]] = {}
        for segment in self._segments.values():
            taken = len(segment.taken())
            assert taken == segment.used_slots, f"segment {segment.segment_id}: {taken} slots are taken"
            blocks += taken
            used += segment.used_bytes
            share = tenants.setdefault(segment.tenant, [0, 0])
            share[0] += segment.used_bytes
            share[1] += taken
            if not segment.retired:
                in_service += segment.size_bytes
                dead += segment.dead_bytes
                self._audit_membership(segment)
        assert (used, dead, blocks) == (self._used_bytes, self._dead_bytes, self._blocks), "used, dead or blocks differ"
        assert in_service + self._retired_bytes == self.capacity_bytes, "retired is what is not in service"
        assert self.usage().free_bytes >= 0, "more in use than there is"
        assert self.usage().balanced(), "the account adds up"
        for tenant, account in self._tenants.items():
            assert list(account) == tenants.get(tenant, [0, 0]), f"the share of {tenant} differs"

    def _audit_membership(self, segment: Segment) -> None:
        listed_open = segment.segment_id in self._open.get((segment.tenant, segment.slot_bytes), {})
        assert listed_open == bool(segment.free_slots), "listed as having free slots if it has"
        listed_unused = segment.segment_id in self._unused.get(segment.tenant, {})
        assert listed_unused == (not segment.used_slots), "listed as unused if it is"
