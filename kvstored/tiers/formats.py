"""Every byte that the NVMe tier leaves on a device, apart from the blocks themselves.

All of it is little endian and versioned; a volume whose `FORMAT` file names a newer version is
refused, so that what is read below is of this version or damaged.

    FORMAT, FORMAT.copy  JSON: format, volume (uuid), extent_bytes, CRC; the same twice
    extents/00000001.ext blocks at multiples of 4 KiB; at its end, once sealed, the footer:
                         headers of its records, zeros up to 4 KiB, then the trailer (4 KiB)
    index/data.mdb       LMDB: records   digest + hash                    -> record
                               extents   extent (big endian)              -> extent row
                               journal   extent, generation, first offset -> headers of an unsealed extent
                               namespaces digest                          -> namespace (msgpack)
    CLEAN                hash of data.mdb as an orderly close left it; not there while it may change
    tombstones           places of blocks that were deleted, 128 bytes each (`tombstones`)
    evictions            which blocks were evicted last, for `explain` (`evictions`)
    namespaces/DIGEST    namespaces once more, one a file, for when the index is lost

`generation` is an extent's: it grows with every recycling, and a record with another one is void.

Every value of the index ends in a CRC over what kind it is, its key and itself: LMDB has none,
and a flipped byte must not show a block under another's key. The index can be made again from
the rest (`rebuild`). Format 1 had no CRCs, tombstones, copies; it is converted when opened.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from kvstored.errors import CorruptData
from kvstored.keys import SLOT_ALIGN_BYTES, Namespace, slot_bytes
from kvstored.tiers.base import Location, Record, Store

FORMAT_VERSION: Final = 2
FOOTER_VERSION: Final = 1  # footers are what they were in format 1
DIGEST_BYTES: Final = 16
TRAILER_BYTES: Final = SLOT_ALIGN_BYTES
DATABASES: Final = (b"records", b"extents", b"journal", b"namespaces")

# version, bytes of the parent, flags, extent, generation, size, offset, hits, created, expires, content hash
_RECORD: Final = struct.Struct("<BBHIIIQIdd16s")
_PLACE: Final = slice(4, 12)  # extent and generation
_OFFSET: Final = slice(16, 24)
COUNTED: Final = slice(4, 16)  # extent, generation and size: what the account of extents is made of
COUNTED_VALUES: Final = struct.Struct("<III")
# version, state, bytes of the tenant, generation, sequence, appended, headers, live bytes, live blocks
_ROW: Final = struct.Struct("<BBHIQQQQI")
# offset, size, created, content hash, digest, bytes of the hash, bytes of the parent
_HEADER: Final = struct.Struct("<QId16s16sBB")
# magic, version, bytes of the tenant, volume, extent, generation, sequence, bytes of headers, records, CRC of headers
_TRAILER: Final = struct.Struct("<8sHH16sIIQQII")
_MAGIC: Final = b"KVSTEXTF"
_CRC: Final = struct.Struct("<I")
# What the CRC of anything is that ends in its own.
INTACT_CRC: Final = 0x2144DF1C


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


class Kind(enum.IntEnum):
    """What a value of the index is; its CRC begins with it, so that none passes for another."""

    RECORD = 1
    ROW = 2
    JOURNAL = 3
    NAMESPACE = 4


KINDS: Final = dict(zip(DATABASES, Kind, strict=True))


def with_crc(kind: Kind, key: bytes, body: bytes) -> bytes:
    """A value of the index: the body, and its CRC."""
    return body + _CRC.pack(zlib.crc32(body, zlib.crc32(key, kind)))


def is_intact(kind: Kind, key: bytes, value: bytes) -> bool:
    """Whether key and value are what was written."""
    return zlib.crc32(value, zlib.crc32(key, kind)) == INTACT_CRC


def _body(kind: Kind, key: bytes, value: bytes) -> bytes:
    """The value without its CRC; raises CorruptData where that is wrong, or the version is not ours."""
    if not is_intact(kind, key, value):
        raise CorruptData(f"a damaged {kind.name.lower()} in the index")
    if kind in (Kind.RECORD, Kind.ROW) and value[0] != FORMAT_VERSION:
        raise CorruptData(f"a {kind.name.lower()} of version {value[0]}: {FORMAT_VERSION} was expected")
    return value[: -_CRC.size]


def pack_record(placed: Placed, created_s: float) -> bytes:
    """An index entry, never hit and never to expire."""
    s = placed.store
    header = Header(placed.offset, s.size_bytes, created_s, s.content_hash, s.digest, s.hash, s.parent)
    return pack_entry(placed.extent, placed.generation, header)


def pack_entry(extent: int, generation: int, header: Header) -> bytes:
    """The index entry that goes with a header of that extent."""
    sizes = (FORMAT_VERSION, len(header.parent), 0, extent, generation, header.size_bytes)
    body = _RECORD.pack(*sizes, header.offset, 0, header.created_s, 0.0, header.content_hash) + header.parent
    return with_crc(Kind.RECORD, header.digest + header.hash, body)


def unpack_record(key: bytes, value: bytes, volume: int) -> Record:
    """An index entry; raises CorruptData where it is damaged."""
    body = _body(Kind.RECORD, key, value)
    _, _, _, extent, generation, size, offset, _, created_s, _, content = _RECORD.unpack_from(body)
    return Record(Location(volume, extent, generation, offset), size, content, body[_RECORD.size :], created_s)


def lies_in(value: bytes, extent: int, generation: int) -> bool:
    """Whether an index entry points into this very extent, not recycled since."""
    return value[_PLACE] == struct.pack("<II", extent, generation)


def lies_at(value: bytes, extent: int, generation: int, offset: int) -> bool:
    """Whether an index entry names this very place."""
    return lies_in(value, extent, generation) and value[_OFFSET] == struct.pack("<Q", offset)


def pack_extent_key(extent: int) -> bytes:
    """Big endian, so that LMDB keeps extents in order."""
    return struct.pack(">I", extent)


def pack_journal_key(extent: int, generation: int, offset: int) -> bytes:
    """Big endian, so that the headers of an extent come in the order of their offsets."""
    return struct.pack(">IIQ", extent, generation, offset)


def unpack_journal(key: bytes, value: bytes) -> bytes:
    """Headers of an unsealed extent; raises CorruptData where they are damaged."""
    return _body(Kind.JOURNAL, key, value)


def pack_row(row: ExtentRow) -> bytes:
    """An extent row, without its key."""
    tenant = row.tenant.encode()
    state = (FORMAT_VERSION, row.state, len(tenant), row.generation, row.sequence)
    body = _ROW.pack(*state, row.append_bytes, row.header_bytes, row.live_bytes, row.live_blocks) + tenant
    return with_crc(Kind.ROW, pack_extent_key(row.extent), body)


def unpack_row(key: bytes, value: bytes) -> ExtentRow:
    """An extent row; raises CorruptData where it is damaged."""
    body = _body(Kind.ROW, key, value)
    _, state, _, generation, sequence, *counts = _ROW.unpack_from(body)
    tenant = body[_ROW.size :].decode()
    return ExtentRow(int.from_bytes(key, "big"), generation, tenant, State(state), sequence, *counts)


def pack_namespace(namespace: Namespace) -> bytes:
    """What a digest stands for."""
    return with_crc(Kind.NAMESPACE, namespace.digest, msgspec.msgpack.encode(namespace))


def unpack_namespace(digest: bytes, value: bytes) -> Namespace:
    """What a digest stands for; raises CorruptData where it is damaged."""
    return msgspec.msgpack.decode(_body(Kind.NAMESPACE, digest, value), type=Namespace)


# --- extents ---


def header_bytes(store: Store) -> int:
    """Room that a block's header takes in the footer."""
    return _HEADER.size + len(store.hash) + len(store.parent)


def pack_header(placed: Placed, created_s: float) -> bytes:
    """One record of a footer."""
    s = placed.store
    return join_header(Header(placed.offset, s.size_bytes, created_s, s.content_hash, s.digest, s.hash, s.parent))


def join_header(h: Header) -> bytes:
    """A header as it lies in a footer."""
    sizes = (len(h.hash), len(h.parent))
    return _HEADER.pack(h.offset, h.size_bytes, h.created_s, h.content_hash, h.digest, *sizes) + h.hash + h.parent


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
    identity = (_MAGIC, FOOTER_VERSION, len(tenant), volume, row.extent, row.generation, row.sequence)
    trailer = _TRAILER.pack(*identity, len(headers), records, zlib.crc32(headers)) + tenant
    trailer = trailer.ljust(TRAILER_BYTES - _CRC.size, b"\0")
    return headers.ljust(slot_bytes(len(headers)), b"\0") + trailer + _CRC.pack(zlib.crc32(trailer))


def unpack_trailer(data: bytes) -> Trailer | None:
    """The trailer, or None where there is none that is whole."""
    body, crc = data[: -_CRC.size], data[-_CRC.size :]
    if len(data) != TRAILER_BYTES or not data.startswith(_MAGIC) or _CRC.pack(zlib.crc32(body)) != crc:
        return None
    _, version, length, volume, extent, generation, sequence, headers, records, headers_crc = _TRAILER.unpack_from(data)
    if version != FOOTER_VERSION:
        return None
    tenant = data[_TRAILER.size : _TRAILER.size + length].decode()
    return Trailer(tenant, volume, extent, generation, sequence, headers, records, headers_crc)
