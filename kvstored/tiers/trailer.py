"""The end of a sealed extent: headers of its records, then the trailer, which says what the extent is."""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from kvstored.keys import slot_bytes
from kvstored.lifetime import Expiry
from kvstored.tiers.formats import FLAGS_SHIFT, TRAILER_BYTES, ExtentRow

FOOTER_VERSION: Final = 1  # footers are what they were in format 1
_TENANT_BYTES: Final = (1 << FLAGS_SHIFT) - 1
# magic, version, bytes of the tenant and flags, volume, extent, generation, sequence, bytes of headers, records,
# CRC of headers
_TRAILER: Final = struct.Struct("<8sHH16sIIQQII")
_MAGIC: Final = b"KVSTEXTF"
_CRC: Final = struct.Struct("<I")
# What older daemons pass over, behind the tenant: magic, runs; then of each: first record, end (`Expiry.word`), limit
_ENDS_AT: Final = 1024
_ENDS: Final = struct.Struct("<8sI")
_END: Final = struct.Struct("<IQI")
_ENDS_MAGIC: Final = b"KVSTENDS"
_ENDS_MAX: Final = (TRAILER_BYTES - _CRC.size - _ENDS_AT - _ENDS.size) // _END.size


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
    flags: int = 0
    ends: tuple[tuple[int, Expiry | None], ...] = ()  # from which record on they have which end


def pack_footer(
    row: ExtentRow, volume: bytes, headers: bytes, records: int, ends: Sequence[Expiry | None] = ()
) -> bytes:
    """Headers and trailer; it ends where the extent ends. `ends` of the records, or of none."""
    tenant = row.tenant.encode()
    identity = (
        _MAGIC,
        FOOTER_VERSION,
        len(tenant) | row.flags << FLAGS_SHIFT,
        volume,
        row.extent,
        row.generation,
        row.sequence,
    )
    trailer = _TRAILER.pack(*identity, len(headers), records, zlib.crc32(headers)) + tenant
    if any(ends):
        trailer = trailer.ljust(_ENDS_AT, b"\0") + _pack_ends(ends)
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
    try:
        tenant = data[_TRAILER.size : _TRAILER.size + (length & _TENANT_BYTES)].decode()
    except UnicodeDecodeError:
        return None
    flags = length >> FLAGS_SHIFT
    ends = _unpack_ends(data)
    return Trailer(tenant, volume, extent, generation, sequence, headers, records, headers_crc, flags, ends)


def end_of(trailer: Trailer, record: int) -> Expiry | None:
    """When a record ends, by its number among the headers; never later than it did, maybe earlier."""
    place = bisect_right(trailer.ends, record, key=itemgetter(0))
    return trailer.ends[place - 1][1] if place else None


def _pack_ends(ends: Sequence[Expiry | None]) -> bytes:
    """Runs of records with one end. Where there is no room for all, neighbours share the earliest of theirs."""
    runs = [(first, end) for first, end in enumerate(ends) if not first or end != ends[first - 1]]
    if len(runs) > _ENDS_MAX:
        step = -(-len(ends) // _ENDS_MAX)
        runs = [(first, _earliest(ends[first : first + step])) for first in range(0, len(ends), step)]
    packed = (_END.pack(first, end.word, end.limit_s) if end else _END.pack(first, 0, 0) for first, end in runs)
    return _ENDS.pack(_ENDS_MAGIC, len(runs)) + b"".join(packed)


def _earliest(ends: Iterable[Expiry | None]) -> Expiry | None:
    there = [end.expires_s for end in ends if end is not None]
    return Expiry(min(there)) if there else None


def _unpack_ends(data: bytes) -> tuple[tuple[int, Expiry | None], ...]:
    magic, count = _ENDS.unpack_from(data, _ENDS_AT)
    if magic != _ENDS_MAGIC:
        return ()
    runs = (_END.unpack_from(data, _ENDS_AT + _ENDS.size + n * _END.size) for n in range(min(count, _ENDS_MAX)))
    return tuple((first, Expiry.of(word, limit_s)) for first, word, limit_s in runs)
