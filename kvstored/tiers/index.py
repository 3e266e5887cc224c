"""The index of one volume: which key lies where, in LMDB.

Every call blocks. Those that change something run on one thread of their own, and each is one
transaction that is durable when it returns; the rows of extents change together with the records
in them, so that the counts are right after any restart. Those that only read run on one other
thread. (LMDB's reader locks are on: with `lock=False` a reader would see pages being reused.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb
import msgspec

from kvstored.errors import DeviceError
from kvstored.keys import Namespace, slot_bytes
from kvstored.tiers.base import Location, Record
from kvstored.tiers.formats import (
    DIGEST_BYTES,
    ExtentRow,
    Placed,
    State,
    lies_in,
    pack_extent_key,
    pack_header,
    pack_journal_key,
    pack_record,
    pack_row,
    unpack_headers,
    unpack_record,
    unpack_row,
)
from kvstored.tiers.transaction import MapFull, Rows, Txn, lmdb_errors

T = TypeVar("T")
_MAP_BYTES_MAX: Final = 1 << 40
_DATABASES: Final = (b"records", b"extents", b"journal", b"namespaces")


class Index:
    """The LMDB environment of one volume."""

    def __init__(self, path: Path, volume: int, map_bytes: int) -> None:
        self._path = path
        self._volume = volume
        self._map_bytes = map_bytes
        self._env: Any = None
        # Held by readers throughout: the map may only grow while no transaction is open.
        self._growing = threading.Lock()

    def open(self) -> None:
        """Raises DeviceError where the environment cannot be opened, CorruptData where it is damaged."""
        with lmdb_errors(self._path):
            self._env = self._open_environment()
            self._records, self._extents, self._journal, self._namespaces = map(self._env.open_db, _DATABASES)

    def _open_environment(self) -> Any:
        """What a simulation overrides: everything else here runs on whatever it gives."""
        return lmdb.open(
            str(self._path),
            map_size=self._map_bytes,
            max_dbs=len(_DATABASES),
            mode=0o600,
            sync=True,
            metasync=True,
            readahead=False,
        )

    def close(self) -> None:
        """Let go of the environment; everything committed is durable already."""
        if self._env is not None:
            self._env.close()

    # --- reading (reader thread) ---

    def find(self, digest: bytes, hashes: Sequence[bytes], *, prefix: bool) -> list[Record | None]:
        """Entries in the order of the hashes; with `prefix` the list ends before the first miss."""
        found: list[Record | None] = []
        with self._growing, lmdb_errors(self._path), self._env.begin(self._records) as txn:
            for hash_ in hashes:
                value = txn.get(digest + hash_)
                if value is None and prefix:
                    break
                found.append(None if value is None else unpack_record(value, self._volume))
        return found

    def page(self, digest: bytes, after: bytes, limit: int) -> list[tuple[bytes, Record]]:
        """At most `limit` entries (key, record) whose key begins with `digest` and comes after `after`."""
        page: list[tuple[bytes, Record]] = []
        with self._growing, lmdb_errors(self._path), self._env.begin(self._records) as txn:
            cursor = txn.cursor()
            more = cursor.set_range(max(digest, after + b"\0" if after else b""))
            while more and len(page) < limit and cursor.key().startswith(digest):
                page.append((cursor.key(), unpack_record(cursor.value(), self._volume)))
                more = cursor.next()
        return page

    def rows(self) -> list[ExtentRow]:
        """Every extent of the volume."""
        with self._growing, lmdb_errors(self._path), self._env.begin(self._extents) as txn:
            return [unpack_row(key, value) for key, value in txn.cursor()]

    def namespaces(self) -> list[Namespace]:
        """Every namespace that was remembered."""
        with self._growing, lmdb_errors(self._path), self._env.begin(self._namespaces) as txn:
            return [msgspec.msgpack.decode(value, type=Namespace) for _, value in txn.cursor()]

    # --- changing (writer thread) ---

    def insert(self, tenant: str, placed: Sequence[Placed], created_s: float) -> dict[int, tuple[int, int]]:
        """Make blocks that are durable findable; a key that has a valid entry keeps it.

        Returns, per extent, the bytes and blocks that came alive.
        """
        return self._update(lambda txn: self._insert(txn, tenant, placed, created_s))

    def _insert(self, txn: Txn, tenant: str, placed: Sequence[Placed], created_s: float) -> dict[int, tuple[int, int]]:
        rows = Rows(txn, self._extents)
        journal: dict[tuple[int, int], tuple[int, list[bytes]]] = {}
        for p in placed:
            row = rows.open(p.extent, p.generation, tenant)
            slot = slot_bytes(p.store.size_bytes)
            row.append_bytes = max(row.append_bytes, p.offset + slot)
            key = p.store.digest + p.store.hash
            if self._holds(txn, rows, key):
                continue
            txn.put(key, pack_record(p, created_s), db=self._records)
            rows.count(row, slot, 1)
            header = pack_header(p, created_s)
            row.header_bytes += len(header)
            journal.setdefault((p.extent, p.generation), (p.offset, []))[1].append(header)
        for (extent, generation), (offset, headers) in journal.items():
            txn.put(pack_journal_key(extent, generation, offset), b"".join(headers), db=self._journal)
        rows.save()
        return rows.delta

    def _holds(self, txn: Txn, rows: Rows, key: bytes) -> bool:
        value = txn.get(key, db=self._records)
        if value is None:
            return False
        location = unpack_record(value, self._volume).location
        row = rows.get(location.extent)
        return row is not None and row.generation == location.generation

    def remove(self, tenant: str, keys: Iterable[bytes]) -> dict[int, tuple[int, int]]:
        """Remove the tenant's entries among these keys; returns what died, as negative counts."""
        return self._update(lambda txn: self._remove(txn, [(key, None) for key in keys], tenant))

    def remove_unchanged(self, entries: Sequence[tuple[bytes, Record]]) -> dict[int, tuple[int, int]]:
        """Remove entries that still are the record given; returns what died, as negative counts."""
        return self._update(lambda txn: self._remove(txn, entries, None))

    def _remove(
        self, txn: Txn, entries: Sequence[tuple[bytes, Record | None]], tenant: str | None
    ) -> dict[int, tuple[int, int]]:
        rows = Rows(txn, self._extents)
        for key, expected in entries:
            value = txn.get(key, db=self._records)
            if value is None:
                continue
            record = unpack_record(value, self._volume)
            row = rows.get(record.location.extent)
            valid = row is not None and row.generation == record.location.generation
            if row is not None and valid and tenant not in (None, row.tenant):
                continue
            if expected is None or expected == record:
                txn.delete(key, db=self._records)
                if row is not None and valid:
                    rows.count(row, -slot_bytes(record.size_bytes), -1)
        rows.save()
        return rows.delta

    # --- the life of an extent (writer thread) ---

    def headers(self, extent: int, generation: int) -> list[bytes]:
        """Headers of an unsealed extent, in the order of commits, without those whose entry is gone."""
        kept: list[bytes] = []
        with lmdb_errors(self._path), self._env.begin() as txn:
            for value in self._journal_of(txn, extent, generation):
                for header, raw in unpack_headers(value):
                    entry = txn.get(header.digest + header.hash, db=self._records)
                    place = Location(self._volume, extent, generation, header.offset)
                    if entry is not None and unpack_record(entry, self._volume).location == place:
                        kept.append(raw)
        return kept

    def seal(self, sealed: ExtentRow) -> None:
        """The footer is durable: note state and sequence, forget the journal."""

        def seal(txn: Txn) -> None:
            rows = Rows(txn, self._extents)
            row = rows.open(sealed.extent, sealed.generation, sealed.tenant)
            row.state, row.sequence = State.SEALED, sealed.sequence
            self._drop_journal(txn, sealed.extent)
            rows.save()

        self._update(seal)

    def recycle(
        self, extent: int, generation: int, keys: Sequence[bytes] | None
    ) -> tuple[list[bytes], dict[int, tuple[int, int]]]:
        """Remove every entry in the extent and make `generation` its new one.

        `keys` are those that may lie in it; where they are unknown or too few the whole index is
        searched. Returns the keys that were removed, and what died as negative counts.
        """
        return self._update(lambda txn: self._recycle(txn, extent, generation, keys or ()))

    def _recycle(
        self, txn: Txn, extent: int, generation: int, keys: Sequence[bytes]
    ) -> tuple[list[bytes], dict[int, tuple[int, int]]]:
        row = Rows(txn, self._extents).get(extent)
        if row is None:  # opened, and nothing was ever committed in it
            return [], {}
        removed = [key for key in keys if self._remove_from(txn, row, key)]
        if len(removed) < row.live_blocks:
            removed += [key for key in self._all_keys(txn, row) if self._remove_from(txn, row, key)]
        self._drop_journal(txn, extent)
        value = pack_row(ExtentRow(extent, generation, row.tenant, State.FREE))
        txn.put(pack_extent_key(extent), value, db=self._extents)
        return removed, {extent: (-row.live_bytes, -row.live_blocks)}

    def _remove_from(self, txn: Txn, row: ExtentRow, key: bytes) -> bool:
        value = txn.get(key, db=self._records)
        lies_here = value is not None and lies_in(value, row.extent, row.generation)
        return lies_here and txn.delete(key, db=self._records)

    def forget(self, extent: int) -> None:
        """The extent's file is about to be removed."""
        self._update(lambda txn: txn.delete(pack_extent_key(extent), db=self._extents))

    def _all_keys(self, txn: Txn, row: ExtentRow) -> list[bytes]:
        return [key for key, value in txn.cursor(self._records) if lies_in(value, row.extent, row.generation)]

    def _journal_of(self, txn: Txn, extent: int, generation: int) -> Iterable[bytes]:
        prefix = pack_journal_key(extent, generation, 0)[:8]
        cursor = txn.cursor(self._journal)
        more = cursor.set_range(prefix)
        while more and cursor.key().startswith(prefix):
            yield cursor.value()
            more = cursor.next()

    def _drop_journal(self, txn: Txn, extent: int) -> None:
        cursor = txn.cursor(self._journal)
        prefix = pack_extent_key(extent)
        while cursor.set_range(prefix) and cursor.key().startswith(prefix):
            cursor.delete()

    # --- the rest (writer thread) ---

    def remember(self, namespace: Namespace) -> None:
        """Keep what a digest stands for."""
        value = msgspec.msgpack.encode(namespace)
        assert len(namespace.digest) == DIGEST_BYTES
        self._update(lambda txn: txn.put(namespace.digest, value, db=self._namespaces))

    def sync(self) -> None:
        """Make everything durable."""
        with lmdb_errors(self._path):
            self._env.sync(True)

    def _update(self, change: Callable[[Txn], T]) -> T:
        while True:
            try:
                with lmdb_errors(self._path), self._env.begin(write=True) as txn:
                    return change(txn)
            except MapFull as error:
                self._grow(error)

    def _grow(self, error: DeviceError) -> None:
        if self._map_bytes >= _MAP_BYTES_MAX:
            raise DeviceError(f"{self._path}: the index has reached its limit of {_MAP_BYTES_MAX} bytes") from error
        with self._growing, lmdb_errors(self._path):
            self._map_bytes = 2 * self._env.info()["map_size"]
            self._env.set_mapsize(self._map_bytes)
