"""The index of format 1 converted to that of format 2: the same entries, with a CRC each.

Format 1 differs in its index alone; extents and footers are the same. Runs where a check runs
(`check`), and leaves the old index in place until the new one is complete.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from kvstored.errors import CorruptData
from kvstored.tiers.check import Opened, check, open_old, take
from kvstored.tiers.formats import (
    DATABASES,
    DIGEST_BYTES,
    FORMAT_VERSION,
    ExtentRow,
    Header,
    Kind,
    State,
    pack_entry,
    pack_row,
    with_crc,
)
from kvstored.tiers.index_copy import IndexCopy
from kvstored.tiers.sources import Report, Source
from kvstored.tiers.transaction import lmdb_errors

_OLD: Final = 1
# version, bytes of the parent, flags, extent, generation, offset, size, hits, created, expires, content hash
_RECORD: Final = struct.Struct("<BBHIIQIIdd16s")
# version, state, bytes of the tenant, generation, sequence, appended, headers, live bytes, live blocks
_ROW: Final = struct.Struct("<BBHIQQQQI")

Entry = tuple[bytes, bytes]


def migrate(source: Source) -> Report:
    """Convert the index; raises CorruptData where it is damaged, DeviceError where the device fails."""
    with lmdb_errors(source.index):
        old = open_old(source.index)
        with old.env.begin() as txn:
            if _converted(old, txn):  # and the process ended before it could note so
                return check(source)
            copy = IndexCopy(source.index)
            try:
                copy.append(b"records", (_record(*entry) for entry in old.entries(txn, b"records")))
                copy.append(b"extents", (_row(*entry) for entry in old.entries(txn, b"extents")))
                copy.append(b"journal", (_with_crc(Kind.JOURNAL, *e) for e in old.entries(txn, b"journal")))
                copy.append(b"namespaces", (_with_crc(Kind.NAMESPACE, *e) for e in old.entries(txn, b"namespaces")))
            except BaseException:
                copy.discard()
                raise
        old.env.close()
        return take(source, copy)


def _converted(old: Opened, txn: Any) -> bool:
    first: Iterator[bytes] = old.values(txn, DATABASES[1])
    return next(first, b"\1")[0] == FORMAT_VERSION


def _record(key: bytes, value: bytes) -> Entry:
    version, parent, _, extent, generation, offset, size, _, created_s, _, content = _unpack(_RECORD, value)
    if version != _OLD or len(value) != _RECORD.size + parent:
        raise CorruptData("a damaged entry in records")
    digest, hash_ = key[:DIGEST_BYTES], key[DIGEST_BYTES:]
    header = Header(offset, size, created_s, content, digest, hash_, value[_RECORD.size :])
    return key, pack_entry(extent, generation, header)


def _row(key: bytes, value: bytes) -> Entry:
    version, state, length, generation, sequence, *counts = _unpack(_ROW, value)
    tenant = value[_ROW.size :]
    if version != _OLD or len(tenant) != length:
        raise CorruptData("a damaged entry in extents")
    extent = int.from_bytes(key, "big")
    return key, pack_row(ExtentRow(extent, generation, tenant.decode(), State(state), sequence, *counts))


def _with_crc(kind: Kind, key: bytes, value: bytes) -> Entry:
    return key, with_crc(kind, key, value)


def _unpack(layout: struct.Struct, value: bytes) -> tuple[Any, ...]:
    if len(value) < layout.size:
        raise CorruptData("an entry that is too short")
    return layout.unpack_from(value)
