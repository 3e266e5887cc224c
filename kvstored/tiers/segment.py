"""One segment of the DRAM tier: a memfd cut into slots of one size for one tenant."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import Final

from kvstored.device.memory import Mapping
from kvstored.tiers.slots import SlotRecords

# A slot's number is its segment's id and its index there: both are found without a table.
INDEX_BITS: Final = 20
INDEX_MASK: Final = (1 << INDEX_BITS) - 1
# The last index stays unused: so the numbers of two segments' slots never follow one another.
SLOTS_MAX: Final = INDEX_MASK

_VACANT: Final = object()


class Segment:
    """Slots, their owners and their records. Plain state; the tier keeps the account.

    `tenant` is empty and `slot_bytes` 0 until the segment is first cut. Ids are never reused:
    memory that comes back after a retirement is a new segment. It owns its mapping and records.
    """

    __slots__ = (
        "_fd",
        "_freed",
        "_mapping",
        "_owners",
        "_taken_s",
        "_untouched",
        "address",
        "exposed",
        "locked",
        "records",
        "recut",
        "retired",
        "segment_id",
        "size_bytes",
        "slot_bytes",
        "slots",
        "tenant",
        "used_slots",
    )

    def __init__(self, segment_id: int, mapping: Mapping, records: SlotRecords, *, locked: bool) -> None:
        self.segment_id = segment_id
        self.address = mapping.address
        self.size_bytes = mapping.size_bytes
        self.locked = locked
        self.tenant = ""
        self.slot_bytes = 0
        self.slots = 0
        self.used_slots = 0
        self.exposed = False
        self.retired = False
        self.recut = False  # bytes of an earlier division may lie where no slot of this one was taken yet
        self.records = records
        self._mapping = mapping
        self._fd = -1
        self._owners: list[object] = []
        self._taken_s = array("I")  # when each slot was taken last, wall clock; 0: by an earlier process
        self._freed = array("I")  # indices that were given back, the latest last
        self._untouched = 0  # all indices from here on were never taken

    @property
    def free_slots(self) -> int:
        """How many slots can be taken."""
        return self.slots - self.used_slots

    @property
    def dead_bytes(self) -> int:
        """The tail that is too short for a slot."""
        return self.size_bytes - self.slots * self.slot_bytes if self.slots else 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots taken."""
        return self.used_slots * self.slot_bytes

    @property
    def pages(self) -> str:
        """The kind of its pages: hugetlb, thp or 4k."""
        return self._mapping.pages

    def fd(self) -> int:
        """A read-only descriptor of the memory, to be handed to clients; it stays the segment's."""
        if self._fd < 0:
            self._fd = self._mapping.read_only_fd()
        return self._fd

    def cut(self, tenant: str, slot_bytes: int) -> None:
        """Divide an unused segment into slots of a size for a tenant."""
        assert not self.used_slots, "nobody's slots are cut anew"
        assert self.tenant in ("", tenant), "a segment serves one tenant in its life"
        slots = min(self.size_bytes // slot_bytes, SLOTS_MAX)
        assert slots, "a slot fits"
        self.recut = self.slots > 0
        self.records.cut(tenant, slots, slot_bytes)
        self.tenant, self.slot_bytes, self.slots = tenant, slot_bytes, slots
        self._owners = [_VACANT] * slots
        self._taken_s = array("I", bytes(4 * slots))
        self._freed = array("I")
        self._untouched = 0

    def adopt(self, taken: Sequence[int]) -> None:
        """Take over the division that its records tell of, with these slots in use (ascending)."""
        self.tenant, self.slot_bytes, self.slots = self.records.tenant, self.records.slot_bytes, self.records.slots
        self.exposed = True  # a client of the earlier process may have it mapped still
        self.recut = True  # or of the same one: what it held is not known here
        self._owners = [_VACANT] * self.slots
        self._taken_s = array("I", bytes(4 * self.slots))
        for index in taken:
            self._owners[index] = None
        self._untouched = taken[-1] + 1 if taken else 0
        self._freed = array("I", [i for i in range(self._untouched - 1, -1, -1) if self._owners[i] is _VACANT])
        self.used_slots = len(taken)

    def take(self, count: int, wall_s: int) -> list[int]:
        """Numbers of up to `count` free slots, ascending and side by side as far as possible."""
        first, freed, owners = self._untouched, self._freed, self._owners
        fresh = min(count, self.slots - first)
        indices = list(range(first, first + fresh))
        self._untouched += fresh
        reused = min(count - fresh, len(freed))
        if reused:
            indices += freed[len(freed) - reused :]
            del freed[len(freed) - reused :]
            indices.sort()
        taken_s = self._taken_s
        for index in indices:
            owners[index] = None
            taken_s[index] = wall_s
        self.used_slots += len(indices)
        base = self.segment_id << INDEX_BITS
        return [base | index for index in indices]

    def taken_s(self, index: int) -> int:
        """When the slot was taken (wall clock); 0: by an earlier process."""
        return self._taken_s[index]

    def note_taken(self, index: int, wall_s: int) -> None:
        """The block in the slot was stored earlier than the slot was taken."""
        self._taken_s[index] = wall_s

    @property
    def old_slots(self) -> int:
        """How many free slots may hold bytes of blocks that are gone."""
        return len(self._freed) + (self.slots - self._untouched if self.recut else 0)

    def take_old(self, count: int) -> list[int]:
        """Numbers of up to `count` free slots that may hold old bytes, those first that were free longest."""
        indices = self._freed[:count].tolist()
        del self._freed[:count]
        if self.recut:
            first = self._untouched
            self._untouched = min(self.slots, first + count - len(indices))
            indices += range(first, self._untouched)
        for index in indices:
            self._owners[index] = None
        self.used_slots += len(indices)
        return [self.segment_id << INDEX_BITS | index for index in indices]

    def zero_tail(self) -> int:
        """Make zeros of the tail that is too short for a slot; returns its bytes."""
        if self.dead_bytes:
            self._mapping.zero(self.slots * self.slot_bytes, self.dead_bytes)
        return self.dead_bytes

    def give_back(self, index: int) -> None:
        """Free a slot; its record says so before anything else can happen to its bytes."""
        assert self._owners[index] is not _VACANT, "a slot is freed once"
        self.records.clear(index)
        self._owners[index] = _VACANT
        self._freed.append(index)
        self.used_slots -= 1

    def bind(self, index: int, owner: object) -> None:
        """Note whose the slot is."""
        assert self._owners[index] is not _VACANT, "a free slot has no owner"
        self._owners[index] = owner

    def owner(self, index: int) -> object | None:
        """What `bind` noted; None for a free slot."""
        found = self._owners[index]
        return None if found is _VACANT else found

    def is_taken(self, index: int) -> bool:
        """Whether there is such a slot, in use."""
        return index < self.slots and self._owners[index] is not _VACANT

    def occupants(self) -> list[object]:
        """The owners of all slots that have one."""
        return [owner for owner in self._owners if owner is not _VACANT and owner is not None]

    def taken(self) -> Sequence[int]:
        """Indices of all slots in use, for the audit."""
        return [index for index, owner in enumerate(self._owners) if owner is not _VACANT]

    def detach(self) -> Mapping:
        """Let go of the memory but keep it mapped: for a new segment over the same bytes."""
        self.records.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.address = 0
        return self._mapping

    def punch(self) -> None:
        """Give its bytes back to the kernel: zeros for whoever has it mapped. Raises DeviceError."""
        self._mapping.punch()

    def lock(self) -> None:
        """Keep its memory from being swapped; `locked` says whether that is allowed."""
        self.locked = self._mapping.lock()

    @property
    def memory_fd(self) -> int:
        """The writable descriptor of the memory, for who keeps it; it stays the segment's."""
        return self._mapping.fd

    def close(self) -> None:
        """Unmap; nothing may use an address of it any more."""
        self.detach().close()
