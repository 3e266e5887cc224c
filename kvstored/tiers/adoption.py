"""Taking over the DRAM tier's memory from an earlier process.

Blocks for as long as it takes to map, lock and read all records: for a thread. What does not
fit (another format, damaged, more than the capacity, a tenant that is gone) is dropped and
counted; it never stops the start.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from kvstored.device.inherited import InheritedMapping
from kvstored.device.keeper import Keeper
from kvstored.errors import CorruptData, DeviceError
from kvstored.keys import BLOCK_BYTES_MAX, SLOT_ALIGN_BYTES
from kvstored.tiers.kept import LEDGER, MEMORY, RECORDS, REGISTRY, Kept, name_of, parse_name
from kvstored.tiers.lease_ledger import LeaseLedger, NotedLease, NotedSession
from kvstored.tiers.provision import DramConfig
from kvstored.tiers.registry import Registry
from kvstored.tiers.segment import INDEX_BITS, INDEX_MASK, Segment
from kvstored.tiers.slots import Found, SlotRecords

_THREADS_MAX: Final = 4
Kind = TypeVar("Kind")


class Adoption(msgspec.Struct):
    """What was taken over and what was not."""

    segments: list[Segment] = []
    found: dict[int, list[Found]] = {}  # by segment id: the blocks in it, not verified yet
    dropped: Counter[str] = msgspec.field(default_factory=Counter)  # blocks, by reason
    notes: list[str] = []  # sentences for the log
    sessions: list[tuple[int, NotedSession]] = []  # that the earlier process had, by their places in the ledger
    leases: list[NotedLease] = []

    def taken(self) -> dict[int, list[int]]:
        """The slots in use per segment, ascending: with a block in them, or with somebody who may read them still."""
        taken = {s.segment_id: [found.slot for found in self.found[s.segment_id]] for s in self.segments}
        slots = {segment.segment_id: segment.records.slots for segment in self.segments}
        leased: defaultdict[int, set[int]] = defaultdict(set)
        for first, count in (run for lease in self.leases for run in lease.runs):
            index, size = first & INDEX_MASK, slots.get(first >> INDEX_BITS, 0)
            leased[first >> INDEX_BITS].update(range(min(index, size), min(index + count, size)))
        for segment_id in leased.keys() & taken.keys():
            taken[segment_id] = sorted(leased[segment_id].union(taken[segment_id]))
        return taken

    @property
    def size_bytes(self) -> int:
        """Memory that was taken over."""
        return sum(segment.size_bytes for segment in self.segments)


def nobody_writes(segment_id: int) -> bool:
    """Whether something of the earlier daemon may still write to a segment: its threads ended with it."""
    return False


class Adopter:
    """Sorts what a keeper kept; `take_over` gives the tier's `Kept` and what was adopted."""

    def __init__(
        self,
        keeper: Keeper,
        config: DramConfig,
        tenants: Collection[str] | None,
        still_in_use: Callable[[int], bool] = nobody_writes,
    ) -> None:
        """`tenants`: whose memory may be taken over (None: anybody's). A segment that is `still_in_use` is not."""
        self._keeper = keeper
        self._config = config
        self._tenants = tenants
        self._still_in_use = still_in_use
        self._fds = keeper.inherited()
        self._adoption = Adoption()

    def take_over(self, capacity_bytes: int) -> tuple[Kept, Adoption]:
        """Raises DeviceError only where there is no memory for a new registry."""
        numbers: dict[str, set[int]] = {REGISTRY: set(), LEDGER: set(), MEMORY: set(), RECORDS: set()}
        for kind, number in map(parse_name, self._fds):
            if kind:
                numbers[kind].add(number)
        registry, registry_number = self._newest(REGISTRY, numbers[REGISTRY], Registry.adopt)
        ledger = None
        if registry is not None:
            ledger, _ = self._newest(LEDGER, numbers[LEDGER], LeaseLedger.adopt)
            if ledger is not None:
                self._adoption.sessions, self._adoption.leases = ledger.noted()
            self._choose([s for i in registry.segments if (s := self._segment(registry, i))], capacity_bytes)
        for name in self._fds:  # what nobody took
            os.close(self._fds[name])
            self._keeper.drop(name)
        number = max(numbers[REGISTRY], default=0) if registry is None else registry_number
        kept = Kept(self._keeper, registry, number, ledger, max(numbers[MEMORY], default=0))
        for segment_id in set(kept.segment_ids) - {s.segment_id for s in self._adoption.segments}:
            kept.remove(segment_id)
        return kept, self._adoption

    def _newest(self, kind: str, numbers: set[int], adopt: Callable[[int], Kind]) -> tuple[Kind | None, int]:
        for number in sorted(numbers, reverse=True):
            try:
                return adopt(self._fds.pop(name_of(kind, number))), number
            except DeviceError as error:
                self._note(f"what is kept as {name_of(kind, number)} is of no use: {error}")
                self._keeper.drop(name_of(kind, number))
        return None, 0

    def _note(self, sentence: str) -> None:
        self._adoption.notes.append(sentence)

    def _segment(self, registry: Registry, segment_id: int) -> Segment | None:
        """One segment with its records, if it is whole and may be taken over; its blocks go to `found`."""
        names = [name_of(MEMORY, segment_id), name_of(RECORDS, segment_id)]
        if any(name not in self._fds for name in names):
            return None  # it was being made or given up
        memory_fd, records_fd = (self._fds.pop(name) for name in names)
        segment = None
        try:
            mapping = InheritedMapping(memory_fd, pages=registry.segments[segment_id])
        except DeviceError as error:
            os.close(records_fd)
            self._note(f"segment {segment_id} is dropped: {error}")
            return None
        try:
            records = SlotRecords.adopt(records_fd, mapping.size_bytes, segment_id)
            segment = Segment(segment_id, mapping, records, locked=False)
            self._check(segment)
        except DeviceError as error:
            self._note(f"segment {segment_id} is dropped: {error}")
            segment.close() if segment is not None else mapping.close()
            return None
        self._read(segment)
        return segment

    def _check(self, segment: Segment) -> None:
        if self._still_in_use(segment.segment_id):
            raise DeviceError("something of the earlier daemon may still write to it")
        size, slots = segment.records.slot_bytes, segment.records.slots
        if slots and (size % SLOT_ALIGN_BYTES or not size or slots * size > segment.size_bytes):
            raise CorruptData(f"{slots} slots of {size} bytes in {segment.size_bytes}")
        if slots and self._tenants is not None and segment.records.tenant not in self._tenants:
            found, _ = segment.records.scan()
            self._adoption.dropped["tenant_unknown"] += len(found)
            segment.punch()  # clients that have it mapped would keep its bytes alive, though they are purged
            raise CorruptData("its tenant is not configured any more")

    def _read(self, segment: Segment) -> None:
        found, dropped = segment.records.scan()
        self._adoption.found[segment.segment_id] = found
        self._adoption.dropped.update(dropped)

    def _larger_bytes(self, segments: list[Segment]) -> int:
        """What is left free for one segment of a larger size that is set now: larger blocks are to fit."""
        largest_bytes = max((segment.size_bytes for segment in segments), default=0)
        return self._config.segment_bytes if largest_bytes < min(self._config.segment_bytes, BLOCK_BYTES_MAX) else 0

    def _choose(self, segments: list[Segment], capacity_bytes: int) -> None:
        """Those that hold most, as far as the capacity goes; what is left over is unmapped."""
        found = self._adoption.found
        left = capacity_bytes - self._larger_bytes(segments)
        for segment in sorted(segments, key=lambda s: (-len(found[s.segment_id]) * s.records.slot_bytes, s.segment_id)):
            lacks_pages = self._config.huge_pages == "require" and segment.pages == "4k"
            if segment.size_bytes > left or lacks_pages:
                blocks = len(found.pop(segment.segment_id))
                self._adoption.dropped["page_kind" if lacks_pages else "capacity"] += blocks
                self._note(f"segment {segment.segment_id} is dropped: it does not fit the configuration")
                segment.close()
                continue
            left -= segment.size_bytes
            self._adoption.segments.append(segment)
        self._adoption.segments.sort(key=lambda segment: segment.segment_id)
        if self._config.lock != "never":
            with ThreadPoolExecutor(_THREADS_MAX, "kvstored-lock") as executor:
                list(executor.map(Segment.lock, self._adoption.segments))
