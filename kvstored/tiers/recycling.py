"""The life of extents: made ready for a tenant, sealed when full, recycled when room is needed.

The order of recycling is what keeps a reader from ever seeing bytes under a wrong key: readers
are gone; index entries deleted and the generation raised, durably; the footer erased, durably;
only then new bytes.
"""

from __future__ import annotations

import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple, TypeAlias

from kvstored.clock import Clock
from kvstored.errors import DeviceError
from kvstored.tiers.deadline import DeviceCalls
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.formats import (
    DIGEST_BYTES,
    TRAILER_BYTES,
    ExtentFlags,
    ExtentRow,
    Header,
    State,
    footer_bytes,
    unpack_headers,
)
from kvstored.tiers.index import Index
from kvstored.tiers.one_extent import Extent
from kvstored.tiers.runs import Mover
from kvstored.tiers.threads import VolumeThreads
from kvstored.tiers.trailer import Trailer, pack_footer, unpack_trailer
from kvstored.tiers.wear_file import WearFile

_log = logging.getLogger(__name__)

OnEvicted: TypeAlias = Callable[[str, bytes, list[bytes]], None]
"""Told which records are gone: tenant, namespace digest, hashes."""


PAGE_RECORDS: Final = 4096  # of the index, read in one go


def ignore(_tenant: str, _digest: bytes, _hashes: list[bytes]) -> None:
    """Nobody wants to know which records are gone."""


class Notices(NamedTuple):
    """Who is told of records that are gone."""

    evicted: OnEvicted  # their extent was recycled
    dropped: OnEvicted  # their bytes were wrong or unreadable


class Recycler:
    """Takes the extents of one volume from one state to the next. Its calls raise DeviceError."""

    def __init__(
        self,
        directory: VolumeDirectory,
        table: ExtentTable,
        index: Index,
        mover: Mover,
        threads: VolumeThreads,
        calls: DeviceCalls,
        counts: Counter[str],
        on_evicted: OnEvicted,
        clock: Clock,
        wear: WearFile,
    ) -> None:
        self._directory = directory
        self._table = table
        self._index = index
        self._mover = mover
        self._threads = threads
        self._calls = calls
        self._counts = counts
        self._on_evicted = on_evicted
        self._clock = clock
        self._wear = wear

    async def make_ready(self, tenant: str, *, sealed: bool) -> bool:
        """Open an extent for the tenant's blocks, encrypted or not, recycling one if need be. False: none is left."""
        extent = self._table.take_free()
        if extent is None:
            extent = self._table.victim(tenant)
            if extent is None:
                return False
            await self._recycle(extent)
        try:
            if not sealed and self._directory.sealed and extent.flags & ExtentFlags.PURE:
                await self._calls.call(self._threads.index_writer, self._index.stain, extent.number)
            await self._erase(extent.number)
        except DeviceError:
            self._table.give_back(extent)
            raise
        self._table.open(extent, tenant, sealed=sealed)
        return True

    async def recycle_oldest(self, tenant: str) -> bool:
        """Make the oldest extent of a tenant free. False: it has none, or all are in use."""
        extent = self._table.oldest_of(tenant)
        if extent is None:
            return False
        await self._recycle(extent)
        self._table.give_back(extent)
        await self._calls.call(self._threads.stores, self._erase_footer, extent.number)
        return True

    async def seal_full(self) -> None:
        """Write the footers of full extents that nobody writes to any more."""
        # Asked anew each time: another store may seal one while this one waits.
        while sealable := self._table.sealable():
            extent = sealable[0]
            sequence = self._table.seal(extent)
            try:
                await self._seal(extent, sequence)
            except DeviceError:
                self._table.seal_failed(extent)
                raise
            self._table.sealed(extent, sequence)

    async def shrink(self) -> None:
        """Give up extents, oldest first, until there are no more than the capacity allows."""
        while self._table.excess:
            extent = self._table.surplus()
            if extent is None:
                break
            if extent.state is not State.FREE:
                await self._recycle(extent)
            # The file first: one with a footer that no row knows says that the index is an old one (`footers`).
            await self._calls.call(self._threads.stores, self._remove_file, extent.number)
            await self._calls.call(self._threads.index_writer, self._index.forget, extent.number)
            self._table.forget(extent)

    async def _seal(self, extent: Extent, sequence: int) -> None:
        kept = await self._calls.call(self._threads.index_writer, self._index.kept, extent.number, extent.generation)
        headers, ends = [raw for raw, _ in kept], [record.expiry for _, record in kept]
        row = ExtentRow(extent.number, extent.generation, extent.tenant, State.SEALED, sequence, flags=extent.flags)
        footer = pack_footer(row, self._directory.identity, b"".join(headers), len(headers), ends)
        offset = self._table.extent_bytes - len(footer)
        assert offset >= extent.append_bytes, "the footer would overwrite blocks"
        await self._calls.call(self._threads.stores, self._mover.write_at, extent.number, offset, footer)
        self._wear.wrote(len(footer), "footers")
        await self._calls.call(self._threads.index_writer, self._wear.measured(self._index.seal), row)
        self._counts["sealed_extents"] += 1

    async def _recycle(self, extent: Extent, keys: list[bytes] | None = None) -> None:
        sealed, generation = extent.state is State.SEALED, extent.generation
        self._table.recycle(extent)
        if keys is None:
            keys = await self._keys(extent.number, generation, sealed=sealed)
            await self._record(extent.number, generation, keys)
        recycle = self._index.recycle
        removed, delta = await self._calls.call(
            self._threads.index_writer, recycle, extent.number, extent.generation, keys
        )
        self._table.recycled(extent, delta)
        self._counts["recycled_extents"] += 1
        self._counts["evicted_blocks"] += len(removed)
        report(self._on_evicted, extent.tenant, removed)

    async def _record(self, number: int, generation: int, keys: Iterable[bytes]) -> None:
        """Write down what is about to be evicted; that it cannot be is no reason not to make room."""
        here = await self._calls.call(self._threads.index_reader, self._lying_in, number, generation, keys)
        try:
            note = self._directory.evictions.note
            written = await self._calls.call(self._threads.stores, note, here, self._clock.wall())
            self._wear.wrote(written, "other")
        except DeviceError as error:
            _log.warning("%s: evictions are not on record: %s", self._directory.path, error)

    async def empty(self, numbers: Collection[int]) -> None:
        """Make extents free that nobody uses, and everything in them void; the index is read once for all."""
        keys: defaultdict[int, list[bytes]] = defaultdict(list)
        after, more = b"", bool(numbers)
        while more:
            page = await self._calls.call(self._threads.index_reader, self._index.page, b"", after, PAGE_RECORDS)
            for key, record in page:
                if record.location.extent in numbers:
                    keys[record.location.extent].append(key)
            more = len(page) == PAGE_RECORDS
            after = page[-1][0] if page else b""
        for number in numbers:
            extent = self._table.get(number)
            if extent is not None and extent.idle and extent.state not in (State.FREE, State.RECYCLING):
                await self._recycle(extent, keys[number])
                self._table.give_back(extent)
                # At once: an index made anew from footers must not bring back what was deleted with the rest.
                await self._erase(number)

    async def keys_of(self, number: int) -> list[bytes]:
        """Keys of the records that may lie in an extent; none where it is not known or its footer is damaged."""
        extent = self._table.get(number)
        if extent is None or extent.state in (State.FREE, State.RECYCLING):
            return []
        return await self._keys(number, extent.generation, sealed=extent.state is State.SEALED)

    async def clear(self, extent: Extent) -> None:
        """Recycle an extent in which nothing is alive, for who makes it free or ready afterwards."""
        await self._recycle(extent, [])

    async def headers(self, extent: Extent) -> list[Header]:
        """The records that its footer or journal names; none where the footer is damaged."""
        if extent.state is State.SEALED:
            return await self._calls.call(
                self._threads.stores, self._headers_in_footer, extent.number, extent.generation
            )
        raw = await self._calls.call(self._threads.index_writer, self._index.headers, extent.number, extent.generation)
        return [header for header, _ in unpack_headers(b"".join(raw))]

    async def _keys(self, number: int, generation: int, *, sealed: bool) -> list[bytes]:
        if sealed:
            return await self._calls.call(self._threads.stores, self._keys_in_footer, number, generation)
        headers = await self._calls.call(self._threads.index_writer, self._index.headers, number, generation)
        return _keys(b"".join(headers))

    async def keys_that_end(self, extent: Extent, *, all_of_them: bool) -> list[bytes]:
        """Keys of the records that may end, or of `all_of_them`, as far as footer or journal name them."""
        if extent.state is State.SEALED and not all_of_them:
            read = self._trailer
            trailer = await self._calls.call(self._threads.stores, read, extent.number, extent.generation)
            if trailer is not None and not trailer.ends:
                return []
        return await self.keys_of(extent.number)

    async def _erase(self, number: int) -> None:
        self._wear.wrote(await self._calls.call(self._threads.stores, self._erase_footer, number), "footers")

    # --- in threads ---

    def _lying_in(self, extent: int, generation: int, keys: Iterable[bytes]) -> list[bytes]:
        """Those of the keys whose entry is in this very extent: the others were deleted or written again since."""
        by_digest: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for key in keys:
            by_digest[key[:DIGEST_BYTES]].append(key[DIGEST_BYTES:])
        here: list[bytes] = []
        for digest, hashes in by_digest.items():
            records = self._index.find(digest, hashes, prefix=False)
            for hash_, record in zip(hashes, records, strict=True):
                place = None if record is None else record.location
                if place is not None and (place.extent, place.generation) == (extent, generation):
                    here.append(digest + hash_)
        return here

    def _keys_in_footer(self, extent: int, generation: int) -> list[bytes]:
        """Keys of a sealed extent's records; none where its footer is damaged (the index is searched then)."""
        return [header.digest + header.hash for header in self._headers_in_footer(extent, generation)]

    def _headers_in_footer(self, extent: int, generation: int) -> list[Header]:
        end, trailer = self._table.extent_bytes, self._trailer(extent, generation)
        try:
            if trailer is None or not trailer.header_bytes:  # all of its records were deleted before it was sealed
                return []
            headers = self._mover.read_at(extent, end - footer_bytes(trailer.header_bytes), trailer.header_bytes)
        except DeviceError:
            return []
        intact = zlib.crc32(headers) == trailer.headers_crc
        return [header for header, _ in unpack_headers(headers)] if intact else []

    def _trailer(self, extent: int, generation: int) -> Trailer | None:
        try:
            data = self._mover.read_at(extent, self._table.extent_bytes - TRAILER_BYTES, TRAILER_BYTES)
        except DeviceError:
            return None
        trailer = unpack_trailer(data)
        ours = trailer is not None and trailer[1:4] == (self._directory.identity, extent, generation)
        return trailer if ours else None

    def _erase_footer(self, extent: int) -> int:
        """Nothing found in this extent from here on is from before; returns the bytes that it wrote."""
        self._mover.forgive(extent)
        offset = self._table.extent_bytes - TRAILER_BYTES
        there = self._directory.device.exists(self._mover.path(extent))
        if there and self._mover.read_at(extent, offset, TRAILER_BYTES):
            self._mover.write_at(extent, offset, bytes(TRAILER_BYTES))
            return TRAILER_BYTES
        return 0

    def _remove_file(self, extent: int) -> None:
        path = self._mover.path(extent)
        self._directory.files.discard(path)
        self._directory.device.remove(path)


def report(told: OnEvicted, tenant: str, keys: Iterable[bytes]) -> None:
    """Tell of records that are gone, one call for each namespace."""
    by_digest: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for key in keys:
        by_digest[key[:DIGEST_BYTES]].append(key[DIGEST_BYTES:])
    for digest, hashes in by_digest.items():
        told(tenant, digest, hashes)


def _keys(headers: bytes) -> list[bytes]:
    return [header.digest + header.hash for header, _ in unpack_headers(headers)]
