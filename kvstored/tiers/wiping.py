"""Bytes made zeros: all that an extent's file holds and that no record keeps alive.

Deleting takes a key away and leaves the bytes: in dead records, behind the end of what was written, in free
extents that will be used again. A purge makes zeros of all of these. Whose bytes lie in a part that no record of an
extent's own generation covers is not known (the extent may have served somebody else before), so those parts are
wiped in every extent, once: `Extent.clean` remembers it for as long as the volume is open.

Footers and the index go on naming what was deleted: keys, not bytes. What they name stays away by its tombstone,
and where an extent has nothing alive its footer is wiped with the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from kvstored.errors import DeviceError
from kvstored.keys import slot_bytes
from kvstored.tiers.base import Health, Location, Told, Wiped
from kvstored.tiers.formats import DIGEST_BYTES, ExtentFlags, Header, State, footer_bytes, join_header
from kvstored.tiers.one_extent import Extent
from kvstored.tiers.recovery import VolumePath
from kvstored.tiers.recycling import PAGE_RECORDS
from kvstored.tiers.threads import Calls
from kvstored.tiers.volume import Volume

PIECE_BYTES: Final = 16 << 20  # in one call to the device: far from any deadline, and others have their turn
LOOK_S: Final = 0.005
READERS_WAIT_S: Final = 2.0  # for reads of what is deleted already; they find that its hash is wrong then

Range = tuple[int, int]


async def wipe_paths(
    paths: Sequence[VolumePath], tenants: Collection[str], calls: Calls, told: Told, erased: Collection[str] = ()
) -> Wiped:
    """See `LowerTier.wipe`: extent after extent; a caller that is cancelled waits for the one under way."""
    wiped = Wiped()
    extents = [(path, path.volume, n) for path in paths if path.volume for n in path.volume.table.numbers()]
    wiped.left += [f"{path.path}: it is not open" for path in paths if path.volume is None]
    noise = set(tenants) <= set(erased)
    for done, (path, volume, number) in enumerate(extents, 1):
        if path.volume is volume:
            part = await calls.to_its_end(ExtentWiper(volume, noise=noise).wipe(number, tenants))
            wiped.size_bytes += part.size_bytes
            wiped.left += part.left
        else:
            wiped.left.append(f"extent {number} of {path.path}: the path was opened anew meanwhile")
        told(done, len(extents), wiped.size_bytes)
    return wiped


class ExtentWiper:
    """Wipes the extents of one open volume, one at a time.

    `noise`: what is encrypted of the tenants cannot be read any more, so that a pure extent holds nothing of theirs.
    """

    def __init__(self, volume: Volume, *, noise: bool = False) -> None:
        self._volume = volume
        self._noise = noise
        self._table = volume.table

    async def wipe(self, number: int, tenants: Collection[str]) -> Wiped:
        """Wipe one extent: of these tenants every dead byte, of others what may be older than their own records."""
        extent = self._table.get(number)
        wiped = Wiped()
        if extent is None:
            return wiped
        if self._volume.health is not Health.OK:
            wiped.left.append(f"{self._name(number)}: the path is {self._volume.health}")
            return wiped
        try:
            with self._volume.use():
                wiped.size_bytes = await self._wipe(extent, tenants)
        except DeviceError as error:
            self._volume.write_failed(error)
            wiped.left.append(f"{self._name(number)}: {error}")
        return wiped

    def _name(self, number: int) -> str:
        return f"extent {number} of {self._volume.directory.path}"

    async def _wipe(self, extent: Extent, tenants: Collection[str]) -> int:
        # Nothing is placed, recycled or made ready while the lock is held.
        async with self._volume.reserving:
            while (extent.writing_bytes or extent.sealing) and self._volume.health is Health.OK:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
            if self._noise and extent.flags & ExtentFlags.PURE:
                return 0
            ours = extent.tenant in tenants
            if extent.state is State.FREE:
                return 0 if extent.clean else await self._wipe_free(extent)
            if extent.state is State.RECYCLING:
                raise DeviceError("it is between two states until the path is opened anew")
            if extent.clean and not ours:
                return 0
            if ours:
                await self._readers_gone(extent)
                if extent.idle and not extent.live_blocks:
                    return await self._empty(extent)
            return await self._wipe_gaps(extent, live_only=ours)

    async def _readers_gone(self, extent: Extent) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + READERS_WAIT_S
        while extent.pins and loop.time() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    async def _wipe_free(self, extent: Extent) -> int:
        self._table.claim(extent)
        try:
            wiped = await self._zero(extent, [(0, self._table.extent_bytes)])
            extent.clean = True
        finally:
            self._table.give_back(extent)
        return wiped

    async def _empty(self, extent: Extent) -> int:
        """Nothing in it is alive: recycled first, so that no row names what is wiped, then zeros up to its end."""
        try:
            await self._volume.recycler.clear(extent)
        except DeviceError as error:
            self._volume.doubt(error)
            raise
        self._table.give_back(extent)
        return await self._wipe_free(extent)

    # --- extents with something alive ---

    async def _wipe_gaps(self, extent: Extent, *, live_only: bool) -> int:
        sealed = extent.state is State.SEALED
        extent.sealing = not sealed  # its footer must not be written meanwhile
        try:
            headers = await self._volume.recycler.headers(extent)
            footer = footer_bytes(sum(len(join_header(header)) for header in headers)) if sealed else 0
            kept = await self._kept(extent, headers, live_only=live_only)
            wiped = await self._zero(extent, gaps(kept, self._table.extent_bytes - footer))
            extent.clean = True
        finally:
            extent.sealing = False
        return wiped

    async def _kept(self, extent: Extent, headers: Iterable[Header], *, live_only: bool) -> list[Range]:
        """Where records lie that stay: those that are alive, or all that the extent's own tenant wrote."""
        named = {(h.digest + h.hash, h.offset): h.size_bytes for h in headers}
        alive = await self._alive(extent, [key for key, _ in named])
        if len(alive) < extent.live_blocks:  # a damaged footer: the index itself is asked
            alive = await self._search(extent)
        ranges = [(offset, offset + slot_bytes(size)) for offset, size in alive.items()]
        if not live_only:
            ranges += [(offset, offset + slot_bytes(size)) for (_, offset), size in named.items()]
        return ranges

    async def _alive(self, extent: Extent, keys: Sequence[bytes]) -> dict[int, int]:
        """Offset and size of those keys' records that the index has in this extent."""
        volume, found = self._volume, dict[int, int]()
        for start in range(0, len(keys), PAGE_RECORDS):
            part = keys[start : start + PAGE_RECORDS]
            for digest in dict.fromkeys(key[:DIGEST_BYTES] for key in part):
                hashes = [key[DIGEST_BYTES:] for key in part if key.startswith(digest)]
                find = volume.index.find
                records = await volume.calls.ask(volume.threads.index_reader, find, digest, hashes, prefix=False)
                for record in records:
                    if record is not None and self._lies_in(record.location, extent):
                        found[record.location.offset] = record.size_bytes
        return found

    async def _search(self, extent: Extent) -> dict[int, int]:
        found: dict[int, int] = {}
        after, more = b"", True
        while more:
            page = await self._volume.page(b"", after, PAGE_RECORDS)
            for _, record in page:
                if self._lies_in(record.location, extent):
                    found[record.location.offset] = record.size_bytes
            more = len(page) == PAGE_RECORDS
            after = page[-1][0] if page else b""
        return found

    def _lies_in(self, place: Location, extent: Extent) -> bool:
        return (place.extent, place.generation) == (extent.number, extent.generation)

    async def _zero(self, extent: Extent, ranges: Iterable[Range]) -> int:
        volume, wiped = self._volume, 0
        for start, end in ranges:
            for at in range(start, end, PIECE_BYTES):
                zero = volume.mover.zero
                stop = min(at + PIECE_BYTES, end)
                wiped += await volume.calls.call(volume.threads.scrub, zero, extent.number, at, stop)
        volume.wear.wrote(wiped, "other")
        volume.counts["wiped_bytes"] += wiped
        return wiped


def gaps(kept: Iterable[Range], end: int) -> list[Range]:
    """What lies between the ranges, from 0 to `end`."""
    found: list[Range] = []
    at = 0
    for start, stop in sorted(kept):
        if start > at:
            found.append((at, min(start, end)))
        at = max(at, stop)
    if at < end:
        found.append((at, end))
    return found
