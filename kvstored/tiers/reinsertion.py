"""Blocks that were read since they were written go on living when their extent is recycled.

When a tenant's log has begun its last free extent, the one that will be recycled next is looked at: those of its
blocks that were hit are written again, into the extent that is open, as far as that and a share of an extent
reach. This is done ahead and beside the stores: each of them is found at every moment, in the one place or the
other, and no store waits for it. An entry is changed by compare-and-set, so what was deleted or replaced meanwhile
stays so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvstored.device.buffer import AlignedBuffer
from kvstored.errors import DeviceError
from kvstored.keys import in_pieces, slot_bytes
from kvstored.tiers.base import Health, Record, Store
from kvstored.tiers.formats import DIGEST_BYTES, Header, Placed, footer_bytes
from kvstored.tiers.one_extent import Extent
from kvstored.tiers.runs import Read
from kvstored.tiers.sealing import Lock
from kvstored.tiers.volume_io import locks_for, read_each, with_seals

if TYPE_CHECKING:
    from kvstored.tiers.volume import Volume

PIECE_BYTES: Final = 8 << 20  # read, and written again, in one go
PIECE_BLOCKS: Final = 512
BUDGET_SHARE_MIN: Final = 0.25  # of a day's budget of writes: with less left, stores need it more
_log = logging.getLogger(__name__)
Entry = tuple[bytes, Record]


class Reinsertion:
    """Writes hit blocks of one volume again, one extent at a time."""

    def __init__(self, volume: Volume, share: float) -> None:
        self._volume = volume
        self._share = share  # of an extent, at most; 0: nothing is written again
        self._task: asyncio.Task[None] | None = None
        # Set by the opener: how many bytes more the tenant may have for the moment, and that it has them no more.
        self.claim: Callable[[str, int], int] = lambda tenant, size_bytes: size_bytes
        self.settle: Callable[[str, int], None] = lambda tenant, size_bytes: None
        self._kept: list[AlignedBuffer] = []  # that a thread may still be at, which its device does not let go of

    def began(self, tenant: str) -> None:
        """The tenant's blocks go to another extent from now on: look at the one that is to be recycled next."""
        if self._share and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run(tenant))

    async def stop(self) -> None:
        """Begin nothing more, and wait for what is under way."""
        self._share = 0.0
        await self.ended()

    async def ended(self) -> None:
        """Wait for what is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, tenant: str) -> None:
        volume = self._volume
        with volume.use():
            volume.counts["reinserting"] += 1
            try:
                await self._reinsert(tenant)
            except DeviceError as error:
                volume.doubt(error)
            except Exception:  # stores must go on
                _log.exception("writing hit blocks of %s again", volume.directory.path)
            finally:
                volume.counts["reinserting"] -= 1

    async def _reinsert(self, tenant: str) -> None:
        volume, table = self._volume, self._volume.table
        if table.free_extents or volume.health is not Health.OK or (extent := table.victim(tenant)) is None:
            return
        if extent.hits is None or not self._may_write():
            return
        generation, owner = extent.generation, extent.tenant
        hit = [header for header in await volume.recycler.headers(extent) if extent.was_hit(header.offset)]
        left_bytes = int(self._share * extent.append_bytes)
        hit.sort(key=lambda header: header.offset)
        for piece in in_pieces(hit, lambda header: header.size_bytes, PIECE_BYTES, PIECE_BLOCKS):
            if (extent.generation, volume.health) != (generation, Health.OK) or not self._may_write():
                return
            entries = await self._living(extent, piece)
            claimed_bytes = self.claim(owner, sum(slot_bytes(record.size_bytes) for _, record in entries))
            try:
                fitting = _fitting(entries, min(left_bytes, claimed_bytes, self._room_bytes(owner)))
                written_bytes = await self._write_again(owner, fitting) if fitting else 0
            finally:
                self.settle(owner, claimed_bytes)
            left_bytes -= written_bytes
            if len(fitting) < len(entries) or not written_bytes:
                break
        if extent.generation == generation:
            extent.hits = None  # what is hit from now on came too late for this time

    def hit(self, record: Record) -> None:
        """A valid record was read because somebody wanted it."""
        table = self._volume.table
        if self._share and (extent := table.get(record.location.extent)) is not None:
            extent.hit(record.location.offset, table.extent_bytes)

    def _room_bytes(self, tenant: str) -> int:
        """What the tenant's open extent may still take, headers not counted; 0: none is open."""
        extent, extent_bytes = self._volume.table.open_extent(tenant), self._volume.table.extent_bytes
        return 0 if extent is None else extent_bytes - extent.append_bytes - footer_bytes(extent.header_bytes)

    def _may_write(self) -> bool:
        left = self._volume.wear.meter.left()
        return self._share > 0 and (left is None or left[0] >= BUDGET_SHARE_MIN * left[1])

    async def _living(self, extent: Extent, headers: Sequence[Header]) -> list[Entry]:
        """Those whose entry is in this extent, where its header says."""
        volume, found = self._volume, dict[bytes, Record]()
        for digest in dict.fromkeys(header.digest for header in headers):
            hashes = [header.hash for header in headers if header.digest == digest]
            records = await volume.find(digest, hashes, prefix=False)
            found.update((digest + h, r) for h, r in zip(hashes, records, strict=False) if r is not None)
        entries = [(h, found[h.digest + h.hash]) for h in headers if h.digest + h.hash in found]
        place = (extent.number, extent.generation)
        return [
            (header.digest + header.hash, record)
            for header, record in entries
            if (record.location.extent, record.location.generation) == place and record.location.offset == header.offset
        ]

    async def _write_again(self, tenant: str, entries: Sequence[Entry]) -> int:
        """Read, write, and change the entries; the bytes that were written."""
        volume = self._volume
        entries = [(key, record) for key, record in entries if volume.table.owner(record) == tenant]
        locks = volume.locks_of(entries)
        entries = [(key, record) for key, record in entries if not record.seal or key in locks]
        if not entries:
            return 0
        buffer = AlignedBuffer(sum(slot_bytes(record.size_bytes) for _, record in entries))
        for _, record in entries:
            volume.table.pin(record)
        safe = False
        try:
            outcomes = await volume.calls.call(volume.threads.scrub, self._read, entries, locks, buffer)
            written, safe = await self._store(tenant, _stores(entries, outcomes, buffer))
            return written
        finally:
            for _, record in entries:
                volume.table.unpin(record)
            if safe:
                buffer.close()
            else:
                self._kept.append(buffer)

    def _read(self, entries: Sequence[Entry], locks: Mapping[bytes, Lock], buffer: AlignedBuffer) -> list[Read]:
        """In a thread."""
        return read_each(self._volume.mover, entries, locks, buffer.address, PIECE_BYTES)

    async def _store(self, tenant: str, moved: Sequence[tuple[Record, Store]]) -> tuple[int, bool]:
        """Write blocks into the open extent; the bytes, and whether no thread is at their memory any more."""
        volume, stores = self._volume, [store for _, store in moved]
        locks = locks_for(volume.keys, tenant, stores)
        if locks is None or not stores:
            return 0, True
        with volume.keys.use(tenant):
            async with volume.reserving:
                placed = volume.table.place(tenant, stores, sealed=bool(locks))
            delta: dict[int, tuple[int, int]] = {}
            written: Mapping[int, bytes] = {}
            try:
                written = await volume._write(placed, locks)
                pairs = _durable(moved, placed, written, sealed=bool(locks))
                if pairs:
                    move = volume.wear.measured(volume.index.move)
                    delta = await volume.calls.call(volume.threads.index_writer, move, tenant, pairs)
            finally:
                volume.table.settle(placed, delta)
        volume.end_agenda.note_all((p.extent, p.store.expiry) for _, p in pairs)
        size_bytes = sum(slot_bytes(p.store.size_bytes) for p in placed)
        volume.counts["reinserted_blocks"] += sum(blocks for _, blocks in delta.values() if blocks > 0)
        volume.counts["reinserted_bytes"] += size_bytes
        return size_bytes, len(written) == len(placed)


def _durable(
    moved: Sequence[tuple[Record, Store]], placed: Sequence[Placed], written: Mapping[int, bytes], *, sealed: bool
) -> list[tuple[Record, Placed]]:
    """What each was, and where it is now, of those that are durable there."""
    durable = with_seals(placed, written, sealed=sealed)
    return [(moved[position][0], p) for position, p in zip(sorted(written), durable, strict=True)]


def _stores(entries: Sequence[Entry], outcomes: Sequence[Read], buffer: AlignedBuffer) -> list[tuple[Record, Store]]:
    """Those that were read, as they are to be written."""
    found: list[tuple[Record, Store]] = []
    at = buffer.address
    for (key, record), outcome in zip(entries, outcomes, strict=True):
        if outcome is Read.OK:
            store = Store(
                *(key[:DIGEST_BYTES], key[DIGEST_BYTES:], record.parent, at, record.size_bytes, record.content_hash),
                expiry=record.expiry,
            )
            found.append((record, store))
        at += slot_bytes(record.size_bytes)
    return found


def _fitting(entries: Sequence[Entry], room_bytes: int) -> list[Entry]:
    """As many leading ones as fit."""
    fitting: list[Entry] = []
    for entry in entries:
        room_bytes -= slot_bytes(entry[1].size_bytes)
        if room_bytes < 0:
            break
        fitting.append(entry)
    return fitting
