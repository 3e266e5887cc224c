"""The DRAM tier: populated memfd segments, cut into slots per tenant and slot size.

This is where memory comes and goes; which slot is whose is the `SegmentPool`'s. Memory
changes tenants in two steps: `retire` (nothing uses it, its holders are asked to let go), then
`dispose` (its bytes are given back, a new segment takes its place).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from kvstored.device import memory
from kvstored.device.keeper import Keeper, NoKeeper
from kvstored.errors import DeviceError, KVStoredError
from kvstored.keys import Namespace
from kvstored.lifetime import Expiry
from kvstored.tiers.adoption import Adopter, Adoption
from kvstored.tiers.kept import Kept
from kvstored.tiers.lease_ledger import LeaseLedger
from kvstored.tiers.pool import SegmentPool
from kvstored.tiers.provision import (
    DramConfig,
    check_descriptors,
    check_locked,
    make_all,
    properties,
    renew,
    segment_sizes,
    shortcomings,
)
from kvstored.tiers.segment import INDEX_BITS, INDEX_MASK, Segment
from kvstored.tiers.slots import SlotRecords
from kvstored.tiers.threads import Calls

__all__ = ["DramConfig", "DramTier", "Segment"]

WIPE_BYTES: Final = 4 << 20  # zeroed in one thread call


class Records:
    """The slot records of all segments, by slot number (see `SlotRecords`)."""

    def __init__(self, segments: dict[int, Segment]) -> None:
        self._segments = segments

    def _of(self, slot: int) -> SlotRecords:
        return self._segments[slot >> INDEX_BITS].records

    def begin(
        self, slot: int, size_bytes: int, digest: bytes, hash_: bytes, parent: bytes, expiry: Expiry | None = None
    ) -> int:
        """A block is being written to the slot; returns the slot's new generation."""
        return self._of(slot).begin(slot & INDEX_MASK, size_bytes, digest, hash_, parent, expiry)

    def move_end(self, slot: int, expiry: Expiry) -> None:
        """Note another end of the block in the slot, for the next daemon."""
        self._of(slot).move_end(slot & INDEX_MASK, expiry)

    def expiry(self, slot: int) -> Expiry | None:
        """When the block in the slot ends, as it was noted last."""
        return self._of(slot).expiry(slot & INDEX_MASK)

    def commit(self, slot: int, content_hash: bytes) -> None:
        """The block's bytes are in the slot."""
        self._of(slot).commit(slot & INDEX_MASK, content_hash)

    def clear(self, slot: int) -> None:
        """The slot holds no block any more (`DramTier.free` does this too)."""
        self._of(slot).clear(slot & INDEX_MASK)

    def rank(self, slot: int, place: int) -> None:
        """Note where the block stands in its eviction order, for the next daemon."""
        self._of(slot).rank(slot & INDEX_MASK, place)

    def generation(self, slot: int) -> int:
        """Differs between any two blocks that ever were in the slot."""
        return self._of(slot).generation(slot & INDEX_MASK)

    def content_hash(self, slot: int) -> bytes:
        """Of the block in the slot; zeros where it is not hashed yet."""
        return self._of(slot).content_hash(slot & INDEX_MASK)

    def heads(self, runs: Iterable[tuple[int, int]]) -> bytes:
        """The first 32 bytes of each record, as leases carry them (`kvstored_proto.frames.HEAD`).

        `runs`: first slot and number of slots side by side.
        """
        return b"".join([self._of(first).heads(first & INDEX_MASK, count) for first, count in runs])


class DramTier(SegmentPool):
    """Owns the memory. Calls that are no coroutines are plain state changes."""

    def __init__(
        self, config: DramConfig, keeper: Keeper | None = None, tenants: Collection[str] | None = None
    ) -> None:
        """`keeper` keeps the memory beyond the process. Of what it kept, that of `tenants` comes back (None: all)."""
        self._config = config
        sizes = segment_sizes(config)
        super().__init__(sum(sizes))
        self._largest_bytes = max(sizes)
        self.records = Records(self._segments)
        self.warnings: list[str] = []
        self.adoption = Adoption()
        self._keeper = keeper or NoKeeper()
        self._whose = tenants
        self._kept: Kept | None = None
        self._last_id = 0
        self.calls = Calls()
        self._replacements: dict[asyncio.Task[None], Segment] = {}  # with the segment whose bytes are given back

    async def open(self) -> None:
        """Take over what an earlier process left; make, populate and lock the other segments, in parallel.

        Raises ConfigError where the machine has not that much memory or refuses a page kind or
        lock that the configuration requires, DeviceError where memory cannot be had otherwise.
        """
        try:
            await self._make()
        except BaseException:
            await self.close()
            raise

    async def _make(self) -> None:
        kept = self._kept = await asyncio.to_thread(self._take_over)
        sizes = segment_sizes(self._config, self.adoption.size_bytes)
        check_descriptors(len(self.adoption.segments) + len(sizes))
        made = await make_all(sizes, self._config, self._last_id + 1)
        self._last_id += len(made)
        for segment in made:
            self.add(segment)
        self._largest_bytes = max(segment.size_bytes for segment in self._segments.values())
        check_locked(self._config, list(self._segments.values()))
        await asyncio.to_thread(kept.add, made)
        self.warnings += shortcomings(self._config, list(self._segments.values()))
        if kept.unkept_segments:
            self.warnings.append(
                f"dram: {kept.unkept_segments} segments will not survive a restart: the descriptor store is full "
                "(systemd: raise FileDescriptorStoreMax, two a segment and four more; kvstored --supervise: ulimit -n)"
            )

    def _take_over(self) -> Kept:
        kept, self.adoption = Adopter(self._keeper, self._config, self._whose).take_over(self.capacity_bytes)
        taken = self.adoption.taken()
        for segment in self.adoption.segments:
            self.adopt(segment, taken[segment.segment_id])
        self._last_id = kept.last_segment_id
        return kept

    async def close(self) -> None:
        """Unmap everything; nothing may use an address of the tier any more. What is kept stays so."""
        await asyncio.gather(*self._replacements, return_exceptions=True)
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        if self._kept is not None:
            self._kept.close()

    # ---- what outlives the process ----

    @property
    def boot(self) -> int:
        """How often a daemon has started on this memory; 0 where nobody keeps it."""
        return self._kept.boot if self._kept is not None else 0

    @property
    def ledger(self) -> LeaseLedger | None:
        """Where leases are noted for the next daemon; None where nobody keeps it."""
        return self._kept.ledger if self._kept is not None else None

    def namespaces(self) -> list[Namespace]:
        """Those that were noted, as an earlier process left them."""
        return self._kept.namespaces if self._kept is not None else []

    async def remember_namespaces(self, namespaces: Sequence[Namespace]) -> None:
        """Note namespaces for the next daemon, before blocks of them are stored."""
        if self._kept is not None and not self._kept.knows(namespaces):
            await asyncio.to_thread(self._kept.remember, namespaces)

    async def forget_namespaces(self, tenant: str) -> None:
        """Note none of a tenant's for the next daemon: nothing of it is stored."""
        if self._kept is not None:
            await asyncio.to_thread(self._kept.forget_namespaces, tenant)

    def epochs(self) -> bytes:
        """Those that an earlier process noted, packed; empty: none."""
        return self._kept.epochs if self._kept is not None else b""

    async def remember_epochs(self, packed: bytes) -> None:
        """Note for the next daemon which epochs count. Raises DeviceError."""
        if self._kept is not None and not await asyncio.to_thread(self._kept.remember_epochs, packed):
            raise DeviceError("dram: the descriptor store is full: after a restart, earlier epochs may count again")

    @property
    def largest_slot_bytes(self) -> int:
        """Blocks over this size never fit."""
        return self._largest_bytes

    def properties(self) -> dict[str, str]:
        """For status: what the memory is made of and whether it is locked."""
        found = properties(list(self._segments.values()))
        if self._config.places:
            found["numa_nodes"] = ", ".join(map(str, self._config.places))
        if self._kept is not None and self._kept.active:
            found["kept"] = "partly" if self._kept.unkept_segments else "yes"
            found["start"] = str(self._kept.boot)
            found["adopted_segments"] = str(len(self.adoption.segments))
            found["dropped_blocks"] = ", ".join(f"{n} {why}" for why, n in self.adoption.dropped.items()) or "0"
        return found

    def view(self, slot: int, size_bytes: int) -> memoryview:
        """The first bytes of a slot as a writable buffer; only for as long as the slot is held."""
        assert size_bytes <= self.class_of(slot), "inside of the slot"
        return memory.view(self.address(slot), size_bytes, writable=True)

    def relocate(self, source: int, target: int, size_bytes: int, key: tuple[bytes, bytes, bytes]) -> None:
        """Move a readable block that nobody uses to another slot: bytes and record; the source is free then.

        `key`: its namespace's digest, hash and parent.
        """
        memory.copy(self.address(target), self.address(source), self.class_of(source))
        self.records.begin(target, size_bytes, *key, self.records.expiry(source))
        self.records.commit(target, self.records.content_hash(source))
        self.free(source)

    def segment_fd(self, segment_id: int) -> int:
        """A read-only descriptor of the segment; it stays the tier's. Raises DeviceError."""
        return self._segments[segment_id].fd()

    def writable_fd(self, segment_id: int) -> int:
        """A descriptor of the segment for the daemon's own processes; it stays the tier's."""
        return self._segments[segment_id].memory_fd

    def is_taken(self, slot: int) -> bool:
        """Whether there is such a slot, in use."""
        segment = self._segments.get(slot >> INDEX_BITS)
        return segment is not None and segment.is_taken(slot & INDEX_MASK)

    def segment_bytes(self, segment_id: int) -> int:
        """Its size."""
        return self._segments[segment_id].size_bytes

    def expose(self, segment_id: int) -> None:
        """Note that a session was given the segment's descriptor."""
        self._segments[segment_id].exposed = True

    def is_exposed(self, segment_id: int) -> bool:
        """Whether any session ever was given the segment's descriptor."""
        return self._segments[segment_id].exposed

    async def zero(self, slots: Sequence[int]) -> None:
        """Make zeros of slots that nobody else uses; a caller that is cancelled waits for the thread."""
        places = [(self.address(slot), self.class_of(slot)) for slot in slots]
        await self.calls.to_its_end(asyncio.to_thread(memory.zero_many, places))

    async def wipe_free(
        self, tenant: str, told: Callable[[int], None], before: Callable[[int], None] = lambda segment_id: None
    ) -> int:
        """Make zeros of all free memory of a tenant's segments; returns the bytes.

        One segment at a time, so that a put that comes meanwhile finds room in others, or what is wiped already:
        never a slot with old bytes, from when `before` was called with the segment. What is retired is zeroed when
        its holders have let go of it, not here.
        """
        wiped = 0
        for segment in self.segments(tenant):
            before(segment.segment_id)
            slots = self.take_old(segment.segment_id, segment.old_slots)
            count = max(1, WIPE_BYTES // segment.slot_bytes)
            try:
                while slots:
                    await self.zero(slots[:count])
                    self.give_back_old(done := slots[:count])
                    del slots[:count]
                    wiped += len(done) * segment.slot_bytes
                    told(len(done) * segment.slot_bytes)
            finally:
                self.give_back_old(slots)
            if segment.recut and not segment.retired:
                wiped += segment.zero_tail()
            await asyncio.sleep(0)
        return wiped

    async def dispose(self, segment_id: int) -> None:
        """Give a retired segment's bytes back and put a new segment in its place.

        No holder may be left. Goes on when the caller is cancelled. Raises DeviceError where
        no new memory comes; the tier then lives with less, counted as retired.
        """
        assert self._segments[segment_id].retired, "only what is retired is disposed of"
        segment = self._segments.pop(segment_id)
        task = asyncio.create_task(self._replace(segment))
        self._replacements[task] = segment
        task.add_done_callback(self._replacements.pop)
        await asyncio.shield(task)

    def retired(self, tenant: str) -> list[int]:
        """See `SegmentPool.retired`: until their bytes are given back, whoever does that."""
        given_back = [s.segment_id for s in self._replacements.values() if s.tenant == tenant]
        return super().retired(tenant) + given_back

    async def _replace(self, segment: Segment) -> None:
        self._last_id += 1
        try:
            made = await asyncio.to_thread(self._renewed, segment, self._last_id)
        except KVStoredError as error:
            self.warnings.append(f"dram: {segment.size_bytes} bytes are lost until a restart: {error}")
            raise DeviceError(str(error)) from error
        self.add(made)
        self._retired_bytes -= segment.size_bytes

    def _renewed(self, segment: Segment, segment_id: int) -> Segment:
        assert self._kept is not None, "opened"
        self._kept.remove(segment.segment_id)
        made = renew(segment, segment_id, self._config)
        self._kept.add([made])
        return made
