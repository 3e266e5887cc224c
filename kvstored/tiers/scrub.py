"""Scrub: everything on a volume is read again now and then, at a gentle pace, and what is wrong is dropped.

Extents in which a read found something wrong come first; else a pass takes all extents in turn,
once a day. One piece of a few blocks at a time, into memory of its own, on a thread of its own
that gives way to others; between two pieces it rests until the bytes are within the rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from kvstored.clock import Clock
from kvstored.device.file import AlignedBuffer
from kvstored.errors import DeviceError
from kvstored.keys import in_pieces, slot_bytes
from kvstored.tiers.base import Health, Record
from kvstored.tiers.formats import DIGEST_BYTES
from kvstored.tiers.runs import Read
from kvstored.tiers.sealing import Lock
from kvstored.tiers.volume import Volume
from kvstored.tiers.volume_io import read_each

PIECE_BYTES: Final = 1 << 20
KEYS_PER_SEARCH: Final = 256
FIRST_PASS_S: Final = 60.0  # after opening: others have more to do then
PASS_EVERY_S: Final = 86_400.0
LOOK_S: Final = 1.0  # for suspects, while there is no pass

Entry = tuple[bytes, Record]


class Scrubber:
    """The scrub of one open volume, at most `bytes_per_s`."""

    def __init__(self, volume: Volume, bytes_per_s: int, clock: Clock) -> None:
        self.passed_s = 0.0  # wall clock
        self._volume = volume
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._stopping = asyncio.Event()
        self._next_pass_s = clock.monotonic() + FIRST_PASS_S
        self._pass: list[int] = []  # extents that are still to come in the pass under way
        self.task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """End after the piece under way; await `task` for that."""
        self._stopping.set()

    async def _run(self) -> None:
        while not self._stopping.is_set():
            extent = self._next_extent()
            if extent is None:
                await self._rest(LOOK_S)
            else:
                await self.scrub_extent(extent)
                await asyncio.sleep(0)

    async def _rest(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            pass

    def _next_extent(self) -> int | None:
        volume = self._volume
        if volume.health is not Health.OK:
            return None
        if volume.suspects:
            number = next(iter(volume.suspects))
            del volume.suspects[number]
            return number
        if not self._pass and self._clock.monotonic() >= self._next_pass_s:
            self._next_pass_s = self._clock.monotonic() + PASS_EVERY_S
            self._pass = volume.table.with_records()
            if not self._pass:
                self.passed_s = self._clock.wall()
        return self._pass.pop(0) if self._pass else None

    async def scrub_extent(self, extent: int) -> None:
        """Read all records of an extent and drop those whose bytes are wrong."""
        volume = self._volume
        try:
            keys = await volume.recycler.keys_of(extent)
            for start in range(0, len(keys), KEYS_PER_SEARCH):
                entries = await self._find(extent, keys[start : start + KEYS_PER_SEARCH])
                for piece in in_pieces(entries, lambda entry: entry[1].size_bytes, PIECE_BYTES):
                    if self._stopping.is_set() or volume.health is not Health.OK:
                        return
                    await self._scrub(piece)
        except DeviceError as error:
            volume.turn(Health.READ_ONLY, f"scrubbing: {error}")
            return
        volume.counts["scrubbed_extents"] += 1
        if not self._pass and self._next_pass_s > self._clock.monotonic():
            self.passed_s = self._clock.wall()

    async def _find(self, extent: int, keys: Sequence[bytes]) -> list[Entry]:
        """The entries of these keys that lie in the extent, in the order of their places."""
        volume = self._volume
        found: list[Entry] = []
        for digest in sorted({key[:DIGEST_BYTES] for key in keys}):
            hashes = [key[DIGEST_BYTES:] for key in keys if key.startswith(digest)]
            records = await volume.find(digest, hashes, prefix=False)
            found += [(digest + h, r) for h, r in zip(hashes, records, strict=False) if r is not None]
        here = [(key, record) for key, record in found if record.location.extent == extent]
        return sorted(here, key=lambda entry: entry[1].location.offset)

    async def _scrub(self, piece: Sequence[Entry]) -> None:
        volume, begun_s = self._volume, self._clock.monotonic()
        valid = [(key, record) for key, record in piece if volume.table.owner(record) is not None]
        locks = volume.locks_of(valid)  # what has no key here cannot be checked, and is left alone
        entries = [entry for entry in valid if not entry[1].seal or entry[0] in locks]
        volume.counts["scrub_locked_blocks"] += len(valid) - len(entries)
        size_bytes = sum(slot_bytes(record.size_bytes) for _, record in entries)
        for _, record in entries:
            volume.table.pin(record)
        try:
            if entries:
                outcomes = await volume.calls.call(volume.threads.scrub, self._read, entries, locks, size_bytes)
                bad = [entry for entry, outcome in zip(entries, outcomes, strict=True) if outcome is not Read.OK]
                volume.counts["scrubbed_bytes"] += size_bytes
                volume.counts["scrub_corrupt_blocks"] += sum(outcome is Read.CORRUPT for outcome in outcomes)
                volume.counts["scrub_unreadable_blocks"] += sum(outcome is Read.UNREADABLE for outcome in outcomes)
                if bad and await volume.device_reads(outcomes):
                    await volume.drop(bad)
        finally:
            for _, record in entries:
                volume.table.unpin(record)
        await self._rest(max(0.0, size_bytes / self._bytes_per_s - (self._clock.monotonic() - begun_s)))

    def _read(self, entries: Sequence[Entry], locks: Mapping[bytes, Lock], size_bytes: int) -> list[Read]:
        """In a thread: outcomes in the order of the entries."""
        scratch = AlignedBuffer(size_bytes)
        try:
            return read_each(self._volume.mover, entries, locks, scratch.address, PIECE_BYTES)
        finally:
            scratch.close()
