"""Every byte that the NVMe tier leaves on a device, apart from the blocks themselves.

All of it is little endian and versioned; a volume whose `FORMAT` file names a newer version is
refused, so that what is read below is of this version or damaged.

    FORMAT               JSON: format, volume (uuid), extent_bytes
    extents/00000001.ext blocks at multiples of 4 KiB; at its end, once sealed, the footer:
                         headers of its records, zeros up to 4 KiB, then the trailer (4 KiB)
    index/               LMDB: records   digest + hash                    -> record
                               extents   extent (big endian)              -> extent row
                               journal   extent, generation, first offset -> headers of an unsealed extent
                               namespaces digest                          -> namespace (msgpack)

`generation` is an extent's: it grows with every recycling, and a record with another one is void.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from kvstored.errors import CorruptData
from kvstored.keys import SLOT_ALIGN_BYTES, slot_bytes
from kvstored.tiers.base import Location, Record, Store

FORMAT_VERSION: Final = 1
DIGEST_BYTES: Final = 16
TRAILER_BYTES: Final = SLOT_ALIGN_BYTES

# version, bytes of the parent, flags, extent, generation, offset, size, hits, created, expires, content hash
_RECORD: Final = struct.Struct("<BBHIIQIIdd16s")
_PLACE: Final = slice(4, 12)  # extent and generation
# version, state, bytes of the tenant, generation, sequence, appended, headers, live bytes, live blocks
_ROW: Final = struct.Struct("<BBHIQQQQI")
# offset, size, created, content hash, digest, bytes of the hash, bytes of the parent
_HEADER: Final = struct.Struct("<QId16s16sBB")
# magic, version, bytes of the tenant, volume, extent, generation, sequence, bytes of headers, records, CRC of headers
_TRAILER: Final = struct.Struct("<8sHH16sIIQQII")
_MAGIC: Final = b"KVSTEXTF"
_CRC: Final = struct.Struct("<I")


class State(enum.IntEnum):
    """What an extent is. Only the first three are stored; FULL is stored as OPEN."""

    FREE = 0
    OPEN = 1
    SEALED = 2
    FULL = 3
    RECYCLING = 4


class Placed(msgspec.Struct, frozen=True, gc=False):
    """A block and the place it was given."""

    extent: int
    generation: int
    offset: int
    store: Store


class ExtentRow(msgspec.Struct):
    """What the index keeps of an extent; changed in the transaction that changes its records."""

    extent: int
    generation: int
    tenant: str = ""
    state: State = State.FREE
    sequence: int = 0
    append_bytes: int = 0
    header_bytes: int = 0
    live_bytes: int = 0
    live_blocks: int = 0


class Header(NamedTuple):
    """One record in a footer or in the journal."""

    offset: int
    size_bytes: int
    created_s: float
    content_hash: bytes
    digest: bytes
    hash: bytes
    parent: bytes


class Trailer(NamedTuple):
    """The last 4 KiB of a sealed extent, which say what it is."""

    tenant: str
    volume: bytes
    extent: int
    generation: int
    sequence: int
    header_bytes: int
    records: int
    headers_crc: int


# --- index ---


def pack_record(placed: Placed, created_s: float) -> bytes:
    """An index entry, never hit and never to expire."""
    store = placed.store
    place = (placed.extent, placed.generation, placed.offset)
    sizes = (FORMAT_VERSION, len(store.parent), 0)
    return _RECORD.pack(*sizes, *place, store.size_bytes, 0, created_s, 0.0, store.content_hash) + store.parent


def unpack_record(value: bytes, volume: int) -> Record:
    """An index entry; raises CorruptData for a version that is not ours."""
    version, parent, _, extent, generation, offset, size, _, created_s, _, content = _RECORD.unpack_from(value)
    if version != FORMAT_VERSION:
        raise CorruptData(f"an index entry of version {version}: {FORMAT_VERSION} was expected")
    end = _RECORD.size + parent
    return Record(Location(volume, extent, generation, offset), size, content, value[_RECORD.size : end], created_s)


def lies_in(value: bytes, extent: int, generation: int) -> bool:
    """Whether an index entry points into this very extent, not recycled since."""
    return value[_PLACE] == struct.pack("<II", extent, generation)


def pack_extent_key(extent: int) -> bytes:
    """Big endian, so that LMDB keeps extents in order."""
    return struct.pack(">I", extent)


def pack_journal_key(extent: int, generation: int, offset: int) -> bytes:
    """Big endian, so that the headers of an extent come in the order of their offsets."""
    return struct.pack(">IIQ", extent, generation, offset)


def pack_row(row: ExtentRow) -> bytes:
    """An extent row, without its key."""
    tenant = row.tenant.encode()
    state = (FORMAT_VERSION, row.state, len(tenant), row.generation, row.sequence)
    return _ROW.pack(*state, row.append_bytes, row.header_bytes, row.live_bytes, row.live_blocks) + tenant


def unpack_row(key: bytes, value: bytes) -> ExtentRow:
    """An extent row; raises CorruptData for a version that is not ours."""
    version, state, length, generation, sequence, *counts = _ROW.unpack_from(value)
    if version != FORMAT_VERSION:
        raise CorruptData(f"an extent row of version {version}: {FORMAT_VERSION} was expected")
    tenant = value[_ROW.size : _ROW.size + length].decode()
    return ExtentRow(int.from_bytes(key, "big"), generation, tenant, State(state), sequence, *counts)


# --- extents ---


def header_bytes(store: Store) -> int:
    """Room that a block's header takes in the footer."""
    return _HEADER.size + len(store.hash) + len(store.parent)


def pack_header(placed: Placed, created_s: float) -> bytes:
    """One record of a footer."""
    s = placed.store
    sizes = (len(s.hash), len(s.parent))
    return _HEADER.pack(placed.offset, s.size_bytes, created_s, s.content_hash, s.digest, *sizes) + s.hash + s.parent


def unpack_headers(data: bytes) -> Iterator[tuple[Header, bytes]]:
    """The headers one after the other, each with the bytes that it is made of."""
    at = 0
    while at < len(data):
        offset, size, created_s, content, digest, hash_bytes, parent_bytes = _HEADER.unpack_from(data, at)
        middle = at + _HEADER.size + hash_bytes
        end = middle + parent_bytes
        hash_, parent = data[middle - hash_bytes : middle], data[middle:end]
        yield Header(offset, size, created_s, content, digest, hash_, parent), data[at:end]
        at = end


def footer_bytes(headers: int) -> int:
    """Size of a footer with so many bytes of headers."""
    return slot_bytes(headers) + TRAILER_BYTES


def pack_footer(row: ExtentRow, volume: bytes, headers: bytes, records: int) -> bytes:
    """Headers and trailer; it ends where the extent ends."""
    tenant = row.tenant.encode()
    identity = (_MAGIC, FORMAT_VERSION, len(tenant), volume, row.extent, row.generation, row.sequence)
    trailer = _TRAILER.pack(*identity, len(headers), records, zlib.crc32(headers)) + tenant
    trailer = trailer.ljust(TRAILER_BYTES - _CRC.size, b"\0")
    return headers.ljust(slot_bytes(len(headers)), b"\0") + trailer + _CRC.pack(zlib.crc32(trailer))


def unpack_trailer(data: bytes) -> Trailer | None:
    """The trailer, or None where there is none that is whole."""
    body, crc = data[: -_CRC.size], data[-_CRC.size :]
    if len(data) != TRAILER_BYTES or not data.startswith(_MAGIC) or _CRC.pack(zlib.crc32(body)) != crc:
        return None
    _, version, length, volume, extent, generation, sequence, headers, records, headers_crc = _TRAILER.unpack_from(data)
    if version != FORMAT_VERSION:
        return None
    tenant = data[_TRAILER.size : _TRAILER.size + length].decode()
    return Trailer(tenant, volume, extent, generation, sequence, headers, records, headers_crc)
