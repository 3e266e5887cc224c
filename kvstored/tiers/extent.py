"""Extents in memory: who owns which, where the next block goes, and the account of a volume's bytes.

State only: no I/O and no await, used on the event loop alone. An extent belongs to one tenant
and is written from its start to its end, the rest being kept for the footer:

    FREE -> OPEN -> FULL -> SEALED -> RECYCLING -> FREE ...

FULL takes no more blocks but its footer is not written yet. Anything without readers and
writers may be recycled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from kvstored.keys import slot_bytes
from kvstored.tiers.base import Location, Record, Store, Usage
from kvstored.tiers.formats import ExtentFlags, ExtentRow, Placed, State, footer_bytes, header_bytes
from kvstored.tiers.one_extent import GENERATION_FIRST, Extent, oldest_or_empty, recount

Delta = Mapping[int, tuple[int, int]]
"""What a transaction changed: extent -> (bytes, blocks) more or less alive."""


class ExtentTable:
    """The extents of one volume, at most `limit` of them, and their account."""

    def __init__(self, extent_bytes: int, limit: int, rows: Iterable[ExtentRow] = ()) -> None:
        self.extent_bytes = extent_bytes
        self.limit = limit
        self.placed_bytes = 0  # ever, since the volume was opened
        # Set by the tier: which of the extents that could go is recycled for a tenant. They come oldest first.
        self.choose: Callable[[str, Sequence[Extent]], Extent | None] = lambda tenant, those: oldest_or_empty(those)
        self._extents = {row.extent: Extent(row) for row in rows}
        self._free = [e for e in self._extents.values() if e.state is State.FREE]
        self._open: dict[str, Extent] = {}
        self._full: dict[int, Extent] = {}
        self._sealed: dict[int, Extent] = {}  # in the order of their sealing
        self._live_bytes = self._live_blocks = self._writing_bytes = 0
        self._tenants: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._sequence = max((e.sequence for e in self._extents.values()), default=0)
        for extent in sorted(self._extents.values(), key=lambda e: (e.sequence, -e.append_bytes)):
            self._adopt(extent)

    def _adopt(self, extent: Extent) -> None:
        self._count(extent, extent.live_bytes, extent.live_blocks)
        if extent.state is State.SEALED:
            self._sealed[extent.number] = extent
        elif extent.state is State.OPEN:
            # The one with the most room goes on; after a crash there may be another, which is full.
            other = self._open.setdefault(extent.tenant, extent)
            if other.append_bytes > extent.append_bytes:
                self._open[extent.tenant], extent = extent, other
            if self._open[extent.tenant] is not extent:
                self._fill(extent)

    # --- placing blocks ---

    def place(self, tenant: str, stores: Sequence[Store], *, sealed: bool = False) -> list[Placed]:
        """Give the first blocks a place, one behind the other, as far as the tenant's open extent reaches.

        Where it does not reach to the end, that extent is full and another must be opened. Every
        block must fit into an empty extent. Encrypted blocks (`sealed`) and others do not share one.
        """
        extent = self._open.get(tenant)
        if extent is None:
            return []
        if sealed != bool(extent.flags & ExtentFlags.SEALED):
            self.fill(extent.number)
            return []
        placed: list[Placed] = []
        for store in stores:
            end = extent.append_bytes + slot_bytes(store.size_bytes)
            headers = extent.header_bytes + header_bytes(store, sealed=sealed)
            if end + footer_bytes(headers) > self.extent_bytes:
                self.fill(extent.number)
                break
            placed.append(Placed(extent.number, extent.generation, extent.append_bytes, store, extent.flags))
            extent.append_bytes, extent.header_bytes = end, headers
        bytes_ = sum(slot_bytes(p.store.size_bytes) for p in placed)
        self.placed_bytes += bytes_
        self._write(extent, bytes_)
        return placed

    def open_extent(self, tenant: str) -> Extent | None:
        """Where the tenant's blocks go at present."""
        return self._open.get(tenant)

    def settle(self, placed: Sequence[Placed], delta: Delta) -> None:
        """The writing of these blocks is over; what of it is alive is in `delta`, the rest is dead."""
        for p in placed:
            self._write(self._extents[p.extent], -slot_bytes(p.store.size_bytes))
        self.apply(delta)

    def apply(self, delta: Delta) -> None:
        """Take over what a transaction of the index changed."""
        for number, (bytes_, blocks) in delta.items():
            extent = self._extents[number]
            extent.live_bytes += bytes_
            extent.live_blocks += blocks
            self._count(extent, bytes_, blocks)

    def fill(self, number: int) -> None:
        """No more blocks into this extent."""
        extent = self._extents[number]
        if self._open.get(extent.tenant) is extent:
            del self._open[extent.tenant]
            self._fill(extent)

    def _fill(self, extent: Extent) -> None:
        extent.state = State.FULL
        self._full[extent.number] = extent

    # --- from one state to the next ---

    def take_free(self) -> Extent | None:
        """An extent without records: a used one if there is one, since it is the fastest to write, or a new one."""
        if self._free:
            extent = self._free.pop()
        elif len(self._extents) >= self.limit:
            return None
        else:
            number = max(self._extents, default=0) + 1
            extent = self._extents[number] = Extent(ExtentRow(number, GENERATION_FIRST, flags=ExtentFlags.PURE))
            extent.clean = True
        extent.state = State.RECYCLING  # of no use until it is open
        return extent

    def open(self, extent: Extent, tenant: str, *, sealed: bool = False) -> None:
        """Make a free extent the one that the tenant's blocks, encrypted or not, go to."""
        assert tenant not in self._open, "an extent is open already"
        assert not extent.live_bytes, "opened with live records in it"
        extent.state, extent.tenant = State.OPEN, tenant
        extent.append_bytes = extent.header_bytes = extent.sequence = 0
        extent.begin(sealed=sealed)
        self._open[tenant] = extent

    def claim(self, extent: Extent) -> None:
        """Take this very extent, a free one, out of use until `give_back`."""
        self._free.remove(extent)
        extent.state = State.RECYCLING

    def give_back(self, extent: Extent) -> None:
        """An extent that `take_free`, `claim` or `recycled` gave is not needed after all."""
        extent.state = State.FREE
        self._free.append(extent)

    def sealable(self) -> list[Extent]:
        """Full extents that nobody writes to or seals."""
        return [e for e in self._full.values() if e.sealable and not e.writing_bytes and not e.sealing]

    def seal(self, extent: Extent) -> int:
        """Begin to seal: the sequence number that it gets."""
        extent.sealing = True
        self._sequence += 1
        return self._sequence

    def sealed(self, extent: Extent, sequence: int) -> None:
        """The footer is durable."""
        extent.sealing = False
        extent.state, extent.sequence = State.SEALED, sequence
        self._sealed[extent.number] = self._full.pop(extent.number)

    def seal_failed(self, extent: Extent) -> None:
        """It stays full, and is recycled without a footer when its turn comes."""
        extent.sealing = False
        extent.sealable = False

    def retry_seals(self) -> None:
        """The device takes writes again: footers that could not be written are tried once more."""
        for extent in self._full.values():
            extent.sealable = True

    def close_open(self) -> None:
        """Take no more blocks into any open extent: what was last written to it is in doubt."""
        for extent in list(self._open.values()):
            self.fill(extent.number)

    def stop_growing(self) -> None:
        """The file system has no room for more extents: the capacity is what there is."""
        self.limit = min(self.limit, len(self._extents))

    def grow_to(self, limit: int) -> None:
        """There is room again for so many extents."""
        self.limit = max(self.limit, limit)

    @property
    def free_extents(self) -> int:
        """How many extents can be had without recycling one."""
        return self.limit - len(self._extents) + len(self._free)

    @property
    def excess(self) -> int:
        """How many extents there are beyond the limit."""
        return max(0, len(self._extents) - self.limit)

    def surplus(self) -> Extent | None:
        """The extent to give up first, or None while all are in use."""
        return self._free.pop() if self._free else self.victim("")

    def victim(self, tenant: str) -> Extent | None:
        """The extent to recycle for this tenant, or None: of what nobody uses the one that `choose` takes.

        Sealed ones are offered first, the oldest at their head, then full ones, then what other tenants have open.
        """
        others = (extent for extent in self._open.values() if extent.tenant != tenant)
        idle = [extent for extent in (*self._sealed.values(), *self._full.values(), *others) if extent.idle]
        return self.choose(tenant, idle)

    def oldest_of(self, tenant: str) -> Extent | None:
        """The oldest extent with live blocks of a tenant that nobody uses, the one that is open last."""
        those = (*self._sealed.values(), *self._full.values(), *self._open.values())
        return next((e for e in those if e.tenant == tenant and e.idle and e.live_blocks), None)

    @property
    def extents(self) -> Collection[Extent]:
        """All of them, in any state."""
        return self._extents.values()

    def recycle(self, extent: Extent) -> None:
        """Begin to recycle: from here on every record in it is void."""
        assert extent.idle, "recycled with readers or writers"
        self._sealed.pop(extent.number, None)
        self._full.pop(extent.number, None)
        if self._open.get(extent.tenant) is extent:
            del self._open[extent.tenant]
        extent.state = State.RECYCLING
        extent.generation += 1

    def recycled(self, extent: Extent, delta: Delta) -> None:
        """The index knows that its records are gone."""
        self.apply(delta)
        assert not extent.live_bytes, "recycled with live records in it"
        extent.clean, extent.hits = False, None
        extent.append_bytes = extent.header_bytes = 0
        extent.sealable = True

    def forget(self, extent: Extent) -> None:
        """The extent is no more (the volume shrank)."""
        del self._extents[extent.number]

    # --- records ---

    def owner(self, record: Record) -> str | None:
        """The tenant of a record, or None where it is void."""
        extent = self._current(record.location)
        return extent.tenant if extent else None

    def pin(self, record: Record) -> None:
        """Keep the extent of a valid record from being recycled."""
        self._extents[record.location.extent].pins += 1

    def unpin(self, record: Record) -> None:
        """Undo one `pin`."""
        extent = self._extents[record.location.extent]
        assert extent.pins > 0, "unpinned more often than pinned"
        extent.pins -= 1

    def stained(self, tenant: str) -> list[int]:
        """Extents of the tenant that have, or may have, held other than encrypted blocks since their file was made."""
        mine = (extent for extent in self._extents.values() if extent.tenant == tenant)
        return sorted(extent.number for extent in mine if not extent.flags & ExtentFlags.PURE)

    @property
    def pinned(self) -> bool:
        """Whether any extent is pinned."""
        return any(extent.pins for extent in self._extents.values())

    def get(self, number: int) -> Extent | None:
        """An extent by its number."""
        return self._extents.get(number)

    def numbers(self) -> list[int]:
        """Numbers of all extents."""
        return sorted(self._extents)

    def with_records(self) -> list[int]:
        """Numbers of all extents that have records."""
        return sorted(number for number, extent in self._extents.items() if extent.live_blocks)

    def _current(self, location: Location) -> Extent | None:
        extent = self._extents.get(location.extent)
        return extent if extent and extent.generation == location.generation else None

    # --- the account ---

    def usage(self) -> Usage:
        """The account, from running totals."""
        capacity = self.limit * self.extent_bytes
        used = self._live_bytes + self._writing_bytes
        free = self.free_extents * self.extent_bytes
        free += sum(self.extent_bytes - e.append_bytes for e in self._open.values())
        dead = capacity - used - free
        assert dead >= 0, f"more used than there is: {used} used, {free} free of {capacity}"
        return Usage(capacity, used, dead, 0, free, self._live_blocks)

    def audit(self) -> None:
        """Recount everything extent by extent and compare with the running totals (DESIGN invariant 4)."""
        recount(self._extents.values(), self.usage(), self.extent_bytes)

    def tenant_usage(self) -> dict[str, tuple[int, int]]:
        """Per tenant: live bytes and blocks."""
        return {tenant: (bytes_, blocks) for tenant, (bytes_, blocks) in self._tenants.items() if blocks}

    def live_bytes_of(self, tenant: str) -> int:
        """Bytes of a tenant's live records."""
        return self._tenants[tenant][0] if tenant in self._tenants else 0

    def _write(self, extent: Extent, bytes_: int) -> None:
        extent.writing_bytes += bytes_
        self._writing_bytes += bytes_

    def _count(self, extent: Extent, bytes_: int, blocks: int) -> None:
        self._live_bytes += bytes_
        self._live_blocks += blocks
        total = self._tenants[extent.tenant]
        total[0] += bytes_
        total[1] += blocks
