"""Tombstones: which blocks were deleted, so that an index made anew from footers leaves them out.

A file of entries of 128 bytes, appended to and synced before a delete is acknowledged, each with
a CRC of its own. An entry names the very place that the block had; it is of no use any more when
that extent has been recycled and its footer erased, and goes when the file is written anew.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvstored.device.file import ALIGN_BYTES, File, FileDevice, NoSpace
from kvstored.errors import DeviceError
from kvstored.tiers.formats import INTACT_CRC, ExtentRow, State

ENTRY_BYTES: Final = 128
SLACK_BYTES: Final = 1 << 20
_BLOCK: Final = 1  # what an entry is about; later ones may be about more than one block
_MOVED: Final = 2  # older versions pass over it
# kind, bytes of the key, zero, extent, generation, offset
_ENTRY: Final = struct.Struct("<BBHIIQ")
_BODY_BYTES: Final = ENTRY_BYTES - 4
_log = logging.getLogger(__name__)


class Tombstone(NamedTuple):
    """A block that was deleted, and where it lay."""

    key: bytes
    extent: int
    generation: int
    offset: int
    moved: bool = False  # it is about to be found elsewhere: if it is deleted there, it is not to be found here either


def pack_tombstone(tombstone: Tombstone) -> bytes:
    """One entry."""
    place = (tombstone.extent, tombstone.generation, tombstone.offset)
    kind = _MOVED if tombstone.moved else _BLOCK
    body = (_ENTRY.pack(kind, len(tombstone.key), 0, *place) + tombstone.key).ljust(_BODY_BYTES, b"\0")
    return body + struct.pack("<I", zlib.crc32(body))


def unpack_tombstones(data: bytes) -> tuple[list[Tombstone], int]:
    """The entries of a file, and how many of them are damaged and were passed over."""
    found: list[Tombstone] = []
    damaged = 0
    for at in range(0, len(data), ENTRY_BYTES):
        entry = data[at : at + ENTRY_BYTES]
        if not any(entry):
            continue  # what pads the last page
        if zlib.crc32(entry) != INTACT_CRC or entry[0] not in (_BLOCK, _MOVED):
            damaged += 1
            continue
        _, length, _, extent, generation, offset = _ENTRY.unpack_from(entry)
        key, moved = entry[_ENTRY.size : _ENTRY.size + length], entry[0] == _MOVED
        found.append(Tombstone(key, extent, generation, offset, moved))
    return found, damaged


def read_tombstones(device: FileDevice, path: Path) -> tuple[list[Tombstone], int, bytes]:
    """The entries of a file, how many are damaged or unreadable, and its bytes. Raises DeviceError."""
    try:
        data = device.read_whole(path) or b""
    except DeviceError:
        data = _read_pages(device, path)
    return *unpack_tombstones(data), data


def _read_pages(device: FileDevice, path: Path) -> bytes:
    """What can be read of a file with a bad sector; the rest passes for damaged entries."""
    pages: list[bytes] = []
    file = device.open(path, direct=False, make=False)
    try:
        for offset in range(0, device.size_bytes(file), ALIGN_BYTES):
            try:
                pages.append(device.read_bytes(file, offset, ALIGN_BYTES))
            except DeviceError:
                pages.append(b"\xff" * ALIGN_BYTES)
    finally:
        device.close(file)
    if all(page[0] == 0xFF for page in pages):  # not a bad sector: the device
        raise DeviceError(f"{path} cannot be read")
    return b"".join(pages)


class Tombstones:
    """The file of one volume; used by one thread at a time."""

    def __init__(self, device: FileDevice, path: Path) -> None:
        self._device = device
        self._path = path
        self._file: File | None = None
        self._bytes = 0
        self._kept_bytes = 0
        self._tail = b""

    @property
    def overdue(self) -> bool:
        """Whether more of the file is of no use than is worth keeping."""
        return self._bytes > 2 * self._kept_bytes + SLACK_BYTES

    def open(self, rows: Iterable[ExtentRow]) -> None:
        """Take over the file; raises DeviceError."""
        found, damaged, data = read_tombstones(self._device, self._path)
        if damaged:
            _log.warning("%s: %d damaged entries are passed over", self._path, damaged)
        kept = _still_needed(found, rows)
        whole = len(data) % ALIGN_BYTES == 0
        if damaged or not whole or len(kept) < len(found):
            with suppress(NoSpace):  # then it stays as it is, for now
                self._rewrite(kept)
                return
        self._note_size(data[: len(data) - len(data) % ENTRY_BYTES], len(kept))

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._device.close(self._file)
            self._file = None

    def add(self, tombstones: Sequence[Tombstone]) -> None:
        """Write entries, durably; raises DeviceError: then none of them counts."""
        if not tombstones:
            return
        if self._file is None:
            self._file = self._device.open(self._path, direct=False)
        fresh = b"".join(map(pack_tombstone, tombstones))
        data = self._tail + fresh
        self._device.write_bytes(self._file, self._bytes - len(self._tail), data)
        self._device.sync(self._file)
        self._bytes += len(fresh)
        self._kept_bytes += len(fresh)
        self._tail = data[len(data) - len(data) % ALIGN_BYTES :]

    def forget(self, rows: Iterable[ExtentRow]) -> None:
        """Write the file anew without the entries that nobody needs; a failure leaves it as it is."""
        with suppress(DeviceError):
            found, _, _ = read_tombstones(self._device, self._path)
            self._rewrite(_still_needed(found, rows))

    def _rewrite(self, kept: Sequence[Tombstone]) -> None:
        data = b"".join(map(pack_tombstone, kept))
        self.close()
        self._device.replace(self._path, data.ljust(-(-len(data) // ALIGN_BYTES) * ALIGN_BYTES, b"\0"))
        self._note_size(data, len(kept))

    def _note_size(self, data: bytes, kept: int) -> None:
        # The last page may hold zeros behind its entries: the next ones go there.
        last = len(data)
        while last and not any(data[last - ENTRY_BYTES : last]):
            last -= ENTRY_BYTES
        self._bytes, self._kept_bytes = last, kept * ENTRY_BYTES
        self._tail = data[last - last % ALIGN_BYTES : last]


def _still_needed(tombstones: Iterable[Tombstone], rows: Iterable[ExtentRow]) -> list[Tombstone]:
    """Those whose extent may still have the footer that names the block.

    Where a block was moved from such an extent, and deleted where it lay then, it stays deleted.
    """
    current: Mapping[int, ExtentRow] = {row.extent: row for row in rows}
    found = list(dict.fromkeys(tombstones))
    kept = [t for t in found if _may_matter(t, current.get(t.extent))]
    moved = {t.key for t in kept if t.moved}
    if moved and len(kept) < len(found):
        lost = {t.key for t in set(found).difference(kept) if not t.moved and t.key in moved}
        kept = [t._replace(moved=t.moved and t.key not in lost) for t in kept]
    return kept


def _may_matter(tombstone: Tombstone, row: ExtentRow | None) -> bool:
    # A free extent's footer may not be erased yet: it is when the extent is opened.
    return row is not None and (row.generation == tombstone.generation or row.state is State.FREE)
