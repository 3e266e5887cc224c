"""How blocks come into the index: those that are new there, and those that were written anew elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstored.keys import slot_bytes
from kvstored.tiers.base import Record
from kvstored.tiers.formats import Kind, Placed, pack_header, pack_journal_key, pack_record, with_crc
from kvstored.tiers.tombstones import Tombstone
from kvstored.tiers.transaction import Rows, Txn

Found = Callable[[bytes], Record | None]


def insert_in(
    txn: Txn,
    databases: tuple[Any, Any, Any],
    tenant: str,
    placed: Sequence[Placed],
    created_s: float,
    record_of: Found,
    opens: Callable[[Record], bool] | None,
) -> dict[int, tuple[int, int]]:
    """See `Index.insert`; the databases are those of records, extents and the journal."""
    records, extents, journal = databases
    rows, headers = Rows(txn, extents), _Headers()
    for p in placed:
        row = headers.open(rows, tenant, p)
        key = p.store.digest + p.store.hash
        older = record_of(key)
        if older is not None and (before := rows.of(older)) is not None:
            if opens is None or opens(older):
                continue
            rows.count(before, -slot_bytes(older.size_bytes), -1)
        txn.put(key, pack_record(p, created_s), db=records)
        rows.count(row, slot_bytes(p.store.size_bytes), 1)
        row.header_bytes += headers.add(p, created_s)
    headers.save(txn, journal)
    rows.save()
    return rows.delta


def move_in(
    txn: Txn,
    databases: tuple[Any, Any, Any],
    tenant: str,
    moved: Sequence[tuple[Record, Placed]],
    record_of: Found,
) -> tuple[dict[int, tuple[int, int]], list[Tombstone]]:
    """See `Index.move`; with the places that they left."""
    records, extents, journal = databases
    rows, headers = Rows(txn, extents), _Headers()
    left: list[Tombstone] = []
    for expected, p in moved:
        row = headers.open(rows, tenant, p)
        key, place, size = p.store.digest + p.store.hash, expected.location, slot_bytes(p.store.size_bytes)
        before = rows.of(expected)
        if before is None or record_of(key) != expected:
            continue
        txn.put(key, pack_record(p, expected.created_s), db=records)
        rows.count(before, -size, -1)
        rows.count(row, size, 1)
        row.header_bytes += headers.add(p, expected.created_s)
        left.append(Tombstone(key, place.extent, place.generation, place.offset, moved=True))
    headers.save(txn, journal)
    rows.save()
    return rows.delta, left


class _Headers:
    """The headers of one transaction, for the journal: an entry for each extent."""

    def __init__(self) -> None:
        self._journal: dict[tuple[int, int], tuple[int, list[bytes]]] = {}

    def open(self, rows: Rows, tenant: str, p: Placed) -> Any:
        """The row of the extent that a block lies in, which reaches to its end at least."""
        row = rows.open(p.extent, p.generation, tenant, p.flags)
        row.append_bytes = max(row.append_bytes, p.offset + slot_bytes(p.store.size_bytes))
        return row

    def add(self, p: Placed, created_s: float) -> int:
        """Note a block's header; its bytes."""
        header = pack_header(p, created_s)
        self._journal.setdefault((p.extent, p.generation), (p.offset, []))[1].append(header)
        return len(header)

    def save(self, txn: Txn, database: Any) -> None:
        """Write them."""
        for (extent, generation), (offset, headers) in self._journal.items():
            key = pack_journal_key(extent, generation, offset)
            txn.put(key, with_crc(Kind.JOURNAL, key, b"".join(headers)), db=database)
