"""What recycling evicted, on record: so that after a crash a block that is not there is not taken for lost.

A small file of entries, one for each recycled extent, written and synced before its blocks leave
the index. Entries begin at multiples of 4 KiB and carry a CRC: one that is torn or damaged is
passed over. Of each block eight bytes of the hash of its key are kept. When the file has grown
to its limit, its older half goes.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvstored.device.file import ALIGN_BYTES, FileDevice

FILE_BYTES_MAX: Final = 2 << 20  # a quarter of a million blocks
_MAGIC: Final = b"KVEV"
_HASH_BYTES: Final = 8
# magic, CRC of all that follows, when (wall clock), how many hashes
_HEAD: Final = struct.Struct("<4sIdI")
_CRC_END: Final = 8


class Entry(NamedTuple):
    """One recycled extent: when, and the hashes of its keys, one after the other."""

    wall_s: float
    hashes: bytes


class Evictions:
    """The file of one volume. Its calls block, and may come from several threads."""

    def __init__(self, device: FileDevice, path: Path) -> None:
        self._device = device
        self._path = path
        self._writing = threading.Lock()

    def note(self, keys: Sequence[bytes], wall_s: float) -> int:
        """These are about to be evicted; durable when it returns how many bytes it wrote. Raises DeviceError."""
        if not keys:
            return 0
        entry = pack_entry(keys, wall_s)
        with self._writing:
            file = self._device.open(self._path, direct=False)
            try:
                end = _whole(self._device.size_bytes(file))
                if end + len(entry) <= FILE_BYTES_MAX:
                    self._device.write_bytes(file, end, entry)
                    self._device.sync(file)
                    return len(entry)
            finally:
                self._device.close(file)
            self._device.replace(self._path, rewritten := self._newer_half() + entry)
            return len(rewritten)

    def evicted_s(self, key: bytes) -> float | None:
        """When a block was evicted last (wall clock); None: never, or too long ago to be known. Raises DeviceError."""
        wanted = _hash(key)
        times = [entry.wall_s for entry in unpack_entries(self._read()) if _holds(entry.hashes, wanted)]
        return times[-1] if times else None

    def _newer_half(self) -> bytes:
        kept: list[bytes] = []
        left = FILE_BYTES_MAX // 2
        for entry in reversed(list(unpack_entries(self._read()))):
            packed = _pack(entry)
            left -= len(packed)
            if left < 0:
                break
            kept.append(packed)
        return b"".join(reversed(kept))

    def _read(self) -> bytes:
        return self._device.read_whole(self._path) or b""


def pack_entry(keys: Sequence[bytes], wall_s: float) -> bytes:
    """The entry of these keys, padded."""
    return _pack(Entry(wall_s, b"".join(map(_hash, keys))))


def unpack_entries(data: bytes) -> Iterator[Entry]:
    """The entries of a file that are whole, oldest first."""
    at = 0
    while at + _HEAD.size <= len(data):
        magic, crc, wall_s, count = _HEAD.unpack_from(data, at)
        end = at + _HEAD.size + count * _HASH_BYTES
        if magic == _MAGIC and end <= len(data) and crc == zlib.crc32(data[at + _CRC_END : end]):
            yield Entry(wall_s, data[at + _HEAD.size : end])
            at = _whole(end)
        else:
            at += ALIGN_BYTES


def _pack(entry: Entry) -> bytes:
    body = _HEAD.pack(_MAGIC, 0, entry.wall_s, len(entry.hashes) // _HASH_BYTES)[_CRC_END:] + entry.hashes
    packed = _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body
    return packed.ljust(_whole(len(packed)), b"\0")


def _hash(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_HASH_BYTES).digest()


def _holds(hashes: bytes, wanted: bytes) -> bool:
    at = hashes.find(wanted)
    while at % _HASH_BYTES and at >= 0:
        at = hashes.find(wanted, at + 1)
    return at >= 0


def _whole(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
