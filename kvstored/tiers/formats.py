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
    epochs, epochs.copy  which epochs count (`epoch_files`); older code does not know them
    CLEAN                hash of data.mdb as an orderly close left it; not there while it may change
    tombstones           places of blocks that were deleted, 128 bytes each (`tombstones`)
    evictions            which blocks were evicted last, for `explain` (`evictions`)
    namespaces/DIGEST    namespaces once more, one a file, for when the index is lost
    keys/TENANT.key      the tenant's data key, wrapped, and the same in TENANT.key.copy (`key_file`)

`generation` is an extent's: it grows with every recycling, and a record with another one is void.

Every value of the index ends in a CRC over what kind it is, its key and itself: LMDB has none,
and a flipped byte must not show a block under another's key. The index can be made again from
the rest (`rebuild`). Format 1 had no CRCs, tombstones, copies; it is converted when opened.
Format 3 is format 2 that may hold encrypted blocks: a record or header of one ends in its seal
(`sealing`), and extents have flags. A volume gets it with its first data key and keeps it.
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
from kvstored.lifetime import Expiry
from kvstored.tiers.base import Location, Record, Store

FORMAT_VERSION: Final = 2
FORMAT_SEALED: Final = 3
DIGEST_BYTES: Final = 16
TRAILER_BYTES: Final = SLOT_ALIGN_BYTES
SEAL_BYTES: Final = 52
DATABASES: Final = (b"records", b"extents", b"journal", b"namespaces")

_HAS_SEAL: Final = 1  # flag of a record: behind the parent comes a seal
_HAS_SEAL_TOO: Final = 0x80  # the same of a header, where the bytes of the parent stand
FLAGS_SHIFT: Final = 14  # of an extent, above the bytes of the tenant in rows and trailers

# version, bytes of the parent, flags, extent, generation, size, offset, limit of the end (s), created, end
# (`Expiry.word`), content hash
_RECORD: Final = struct.Struct("<BBHIIIQIdQ16s")
_PLACE: Final = slice(4, 12)  # extent and generation
_OFFSET: Final = slice(16, 24)
COUNTED: Final = slice(4, 16)  # extent, generation and size: what the account of extents is made of
COUNTED_VALUES: Final = struct.Struct("<III")
# version, state, bytes of the tenant and flags, generation, sequence, appended, headers, live bytes, live blocks
_ROW: Final = struct.Struct("<BBHIQQQQI")
# offset, size, created, content hash, digest, bytes of the hash, bytes of the parent
_HEADER: Final = struct.Struct("<QId16s16sBB")
_CRC: Final = struct.Struct("<I")
# What the CRC of anything is that ends in its own.
INTACT_CRC: Final = 0x2144DF1C
_VERSION: Final = bytes([FORMAT_VERSION])


class State(enum.IntEnum):
    """What an extent is. Only the first three are stored; FULL is stored as OPEN."""

    FREE = 0
    OPEN = 1
    SEALED = 2
    FULL = 3
    RECYCLING = 4


class ExtentFlags(enum.IntFlag):
    """SEALED: its blocks are encrypted. PURE: and nothing in the file was ever anything else."""

    NONE = 0
    SEALED = 1
    PURE = 2


class Placed(msgspec.Struct, frozen=True, gc=False):
    """A block and the place it was given; where it was encrypted, with the seal that came of it."""

    extent: int
    generation: int
    offset: int
    store: Store
    flags: int = 0  # of the extent
    seal: bytes = b""


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
    flags: int = 0  # ExtentFlags


class Header(NamedTuple):
    """One record in a footer or in the journal."""

    offset: int
    size_bytes: int
    created_s: float
    content_hash: bytes
    digest: bytes
    hash: bytes
    parent: bytes
    seal: bytes = b""
    expiry: Expiry | None = None  # neither in footers nor in the journal: a trailer has it for all


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
    if kind in (Kind.RECORD, Kind.ROW) and value[:1] != _VERSION:
        raise CorruptData(f"a {kind.name.lower()} of version {value[:1].hex()}: {FORMAT_VERSION} was expected")
    return value[: -_CRC.size]


def pack_record(placed: Placed, created_s: float) -> bytes:
    """An index entry, never hit and never to expire."""
    return pack_entry(placed.extent, placed.generation, _header(placed, created_s))


def _header(placed: Placed, created_s: float) -> Header:
    s = placed.store
    key = (s.digest, s.hash, s.parent)
    return Header(placed.offset, s.size_bytes, created_s, s.content_hash, *key, placed.seal, s.expiry)


def pack_entry(extent: int, generation: int, header: Header) -> bytes:
    """The index entry that goes with a header of that extent."""
    flags = _HAS_SEAL if header.seal else 0
    sizes = (FORMAT_VERSION, len(header.parent), flags, extent, generation, header.size_bytes)
    end = header.expiry
    word, limit_s = (0, 0) if end is None else (end.word, end.limit_s)
    body = _RECORD.pack(*sizes, header.offset, limit_s, header.created_s, word, header.content_hash)
    return with_crc(Kind.RECORD, header.digest + header.hash, body + header.parent + header.seal)


def header_of(key: bytes, record: Record) -> Header:
    """The header that goes with an index entry."""
    place = (record.location.offset, record.size_bytes, record.created_s, record.content_hash)
    return Header(*place, key[:DIGEST_BYTES], key[DIGEST_BYTES:], record.parent, record.seal, record.expiry)


def pack_found(key: bytes, record: Record) -> bytes:
    """The opposite of `unpack_record`."""
    return pack_entry(record.location.extent, record.location.generation, header_of(key, record))


def unpack_record(key: bytes, value: bytes, volume: int) -> Record:
    """An index entry; raises CorruptData where it is damaged."""
    body = _body(Kind.RECORD, key, value)
    if len(body) < _RECORD.size:
        raise CorruptData("a record in the index is cut short")
    _, _, flags, extent, generation, size, offset, limit_s, created_s, word, content = _RECORD.unpack_from(body)
    parent, seal = body[_RECORD.size :], b""
    if flags & _HAS_SEAL:
        parent, seal = parent[:-SEAL_BYTES], parent[-SEAL_BYTES:]
    expiry = Expiry.of(word, limit_s) if word else None
    return Record(Location(volume, extent, generation, offset), size, content, parent, created_s, seal, expiry)


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
    state = (FORMAT_VERSION, row.state, len(tenant) | row.flags << FLAGS_SHIFT, row.generation, row.sequence)
    body = _ROW.pack(*state, row.append_bytes, row.header_bytes, row.live_bytes, row.live_blocks) + tenant
    return with_crc(Kind.ROW, pack_extent_key(row.extent), body)


def unpack_row(key: bytes, value: bytes) -> ExtentRow:
    """An extent row; raises CorruptData where it is damaged."""
    body = _body(Kind.ROW, key, value)
    try:
        _, state, length, generation, sequence, append, headers, live_bytes, live_blocks = _ROW.unpack_from(body)
        counts = (append, headers, live_bytes, live_blocks)
        tenant, flags = body[_ROW.size :].decode(), length >> FLAGS_SHIFT
        return ExtentRow(int.from_bytes(key, "big"), generation, tenant, State(state), sequence, *counts, flags)
    except (ValueError, struct.error) as error:
        raise CorruptData(f"a row in the index makes no sense: {error}") from None


def pack_namespace(namespace: Namespace) -> bytes:
    """What a digest stands for."""
    return with_crc(Kind.NAMESPACE, namespace.digest, msgspec.msgpack.encode(namespace))


def unpack_namespace(digest: bytes, value: bytes) -> Namespace:
    """What a digest stands for; raises CorruptData where it is damaged."""
    try:
        return msgspec.msgpack.decode(_body(Kind.NAMESPACE, digest, value), type=Namespace)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"a namespace in the index makes no sense: {error}") from None


# --- extents ---


def header_bytes(store: Store, *, sealed: bool = False) -> int:
    """Room that a block's header takes in the footer."""
    return _HEADER.size + len(store.hash) + len(store.parent) + (SEAL_BYTES if sealed else 0)


def pack_header(placed: Placed, created_s: float) -> bytes:
    """One record of a footer."""
    return join_header(_header(placed, created_s))


def join_header(h: Header) -> bytes:
    """A header as it lies in a footer."""
    sizes = (len(h.hash), len(h.parent) | (_HAS_SEAL_TOO if h.seal else 0))
    fixed = _HEADER.pack(h.offset, h.size_bytes, h.created_s, h.content_hash, h.digest, *sizes)
    return fixed + h.hash + h.parent + h.seal


def unpack_headers(data: bytes) -> Iterator[tuple[Header, bytes]]:
    """The headers one after the other, each with the bytes that it is made of."""
    at = 0
    while at < len(data):
        if at + _HEADER.size > len(data):
            raise CorruptData("a header of an extent is cut short")
        offset, size, created_s, content, digest, hash_bytes, parent_bytes = _HEADER.unpack_from(data, at)
        middle = at + _HEADER.size + hash_bytes
        end = after = middle + (parent_bytes & ~_HAS_SEAL_TOO)
        if parent_bytes & _HAS_SEAL_TOO:
            end += SEAL_BYTES
        if end > len(data):
            raise CorruptData("a header of an extent is cut short")
        hash_, parent, seal = data[middle - hash_bytes : middle], data[middle:after], data[after:end]
        yield Header(offset, size, created_s, content, digest, hash_, parent, seal), data[at:end]
        at = end


def footer_bytes(headers: int) -> int:
    """Size of a footer with so many bytes of headers."""
    return slot_bytes(headers) + TRAILER_BYTES
