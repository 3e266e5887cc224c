"""The index of one volume: which key lies where, in LMDB.

Every call blocks. Those that change something run on one thread of their own, and each is one transaction that is
durable when it returns; the rows of extents change together with the records in them, so that the counts are right
after any restart. Those that only read run on one other thread. (LMDB's reader locks are on: with `lock=False` a
reader would see pages being reused.) Entries that are damaged are as good as absent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from kvstored.errors import CorruptData, DeviceError
from kvstored.keys import Namespace, slot_bytes
from kvstored.lifetime import Expiry
from kvstored.tiers.base import Record
from kvstored.tiers.beside import Beside
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.formats import (
    DATABASES,
    DIGEST_BYTES,
    ExtentRow,
    Placed,
    State,
    pack_extent_key,
    pack_namespace,
    unpack_namespace,
    unpack_record,
    unpack_row,
)
from kvstored.tiers.index_check import mark_clean, prepare
from kvstored.tiers.insertion import insert_in, move_in
from kvstored.tiers.tombstones import Tombstone
from kvstored.tiers.transaction import (
    MapFull,
    Rows,
    Txn,
    drop_journal,
    extend_in,
    journal_of,
    lmdb_errors,
    open_environment,
    recycle_in,
    stain_in,
    still_there,
)

T = TypeVar("T")
Opens: TypeAlias = Callable[[Record], bool]
"""Whether a record's bytes can be had: they are not encrypted, or the key is there."""
_MAP_BYTES_MAX: Final = 1 << 40


class Index:
    """The LMDB environment of one volume."""

    def __init__(self, path: Path, volume: int, map_bytes: int) -> None:
        self._path = path
        self._volume = volume
        self._map_bytes = map_bytes
        self._env: Any = None
        # Held by readers throughout: the map may only grow while no transaction is open.
        self._growing = threading.Lock()
        self._directory: VolumeDirectory | None = None
        self._beside: Beside | None = None

    def open(self, directory: VolumeDirectory | None = None) -> None:
        """Open the index, made if need be. Raises DeviceError, or CorruptData where it is damaged.

        With the volume's directory it is checked first and made anew from the extents where it is
        damaged or lost, and deletes and namespaces outlast it; without, it stands alone.
        """
        if directory is not None:
            self._prepare(directory)
        with self._errors():
            self._env = self._open_environment()
            self._records, self._extents, self._journal, self._namespaces = map(self._env.open_db, DATABASES)
        if directory is not None:
            self._directory, self._beside = directory, Beside(directory)
            self._beside.open(self.namespaces(), self.rows())

    # What a simulation overrides; everything else here runs on whatever these give.

    def _open_environment(self) -> Any:
        return open_environment(self._path, self._map_bytes)

    def _prepare(self, directory: VolumeDirectory) -> None:
        prepare(directory)

    def _mark_clean(self, directory: VolumeDirectory) -> None:
        mark_clean(directory)

    def close(self) -> None:
        """Let go of the environment; everything committed is durable already."""
        if self._env is not None:
            self._env.close()
        if self._beside is not None:
            self._beside.close()
        if self._directory is not None:
            self._mark_clean(self._directory)
            self._directory = None

    # --- reading (reader thread) ---

    def find(self, digest: bytes, hashes: Sequence[bytes], *, prefix: bool) -> list[Record | None]:
        """Entries in the order of the hashes; with `prefix` the list ends before the first miss."""
        found: list[Record | None] = []
        with self._growing, self._errors(), self._env.begin(self._records) as txn:
            for hash_ in hashes:
                record = self._record(txn, digest + hash_)
                if record is None and prefix:
                    break
                found.append(record)
        return found

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with lmdb_errors(self._path):
                yield
        except CorruptData:
            self._directory = None  # what has shown damage is not closed as clean
            raise

    def _record(self, txn: Txn, key: bytes) -> Record | None:
        value = txn.get(key, db=self._records)
        return None if value is None else self._unpack(key, value)

    def _unpack(self, key: bytes, value: bytes) -> Record | None:
        try:
            return unpack_record(key, value, self._volume)
        except CorruptData:
            self._directory = None
            return None

    def page(self, digest: bytes, after: bytes, limit: int) -> list[tuple[bytes, Record]]:
        """At most `limit` entries (key, record) whose key begins with `digest` and comes after `after`."""
        page: list[tuple[bytes, Record]] = []
        with self._growing, self._errors(), self._env.begin(self._records) as txn:
            cursor = txn.cursor()
            more = cursor.set_range(max(digest, after + b"\0" if after else b""))
            while more and len(page) < limit and cursor.key().startswith(digest):
                record = self._unpack(cursor.key(), cursor.value())
                if record is not None:
                    page.append((cursor.key(), record))
                more = cursor.next()
        return page

    def rows(self) -> list[ExtentRow]:
        """Every extent of the volume."""
        with self._growing, self._errors(), self._env.begin(self._extents) as txn:
            return [unpack_row(key, value) for key, value in txn.cursor()]

    def namespaces(self) -> list[Namespace]:
        """Every namespace that was remembered."""
        with self._growing, self._errors(), self._env.begin(self._namespaces) as txn:
            return [unpack_namespace(digest, value) for digest, value in txn.cursor()]

    # --- changing (writer thread) ---

    def insert(
        self, tenant: str, placed: Sequence[Placed], created_s: float, opens: Opens | None = None
    ) -> dict[int, tuple[int, int]]:
        """Make durable blocks findable; a valid entry that `opens` stays. Returns what came alive, per extent."""
        databases = (self._records, self._extents, self._journal)

        def insert(txn: Txn) -> dict[int, tuple[int, int]]:
            return insert_in(txn, databases, tenant, placed, created_s, lambda key: self._record(txn, key), opens)

        return self._update(insert)

    def move(self, tenant: str, moved: Sequence[tuple[Record, Placed]]) -> dict[int, tuple[int, int]]:
        """Have entries that still are the record given lie elsewhere, durably; returns what came alive and died."""
        databases = (self._records, self._extents, self._journal)

        def move(txn: Txn) -> dict[int, tuple[int, int]]:
            delta, left = move_in(txn, databases, tenant, moved, lambda key: self._record(txn, key))
            if self._beside is not None:
                # Before it counts: a later delete notes the new place alone, while a footer still names the old one.
                self._beside.deleted(left)
            return delta

        return self._update(move)

    def remove(self, tenant: str, keys: Iterable[bytes]) -> dict[int, tuple[int, int]]:
        """Remove the tenant's entries among these keys, for good; returns what died, as negative counts."""
        return self._update(lambda txn: self._remove(txn, [(key, None) for key in keys], tenant))

    def remove_unchanged(self, entries: Sequence[tuple[bytes, Record]]) -> dict[int, tuple[int, int]]:
        """Remove entries that still are the record given; returns what died, as negative counts."""
        return self._update(lambda txn: self._remove(txn, entries, None))

    def _remove(
        self, txn: Txn, entries: Sequence[tuple[bytes, Record | None]], tenant: str | None
    ) -> dict[int, tuple[int, int]]:
        rows = Rows(txn, self._extents)
        removed: list[Tombstone] = []
        for key, expected in entries:
            record = self._record(txn, key)
            if record is None:
                txn.delete(key, db=self._records)  # nothing, or damaged
                continue
            place = record.location
            row = rows.get(place.extent)
            valid = row is not None and row.generation == place.generation
            if row is not None and valid and tenant not in (None, row.tenant):
                continue
            if expected is None or expected == record:
                txn.delete(key, db=self._records)
                removed.append(Tombstone(key, place.extent, place.generation, place.offset))
                if row is not None and valid:
                    rows.count(row, -slot_bytes(record.size_bytes), -1)
        rows.save()
        if tenant is not None and self._beside is not None:
            # Durable before the transaction is: what a delete took away stays away, whatever happens to the index.
            self._beside.deleted(removed)
        return rows.delta

    # --- the life of an extent (writer thread) ---

    def headers(self, extent: int, generation: int) -> list[bytes]:
        """Headers of an unsealed extent, in the order of commits, without those whose entry is gone."""
        return [raw for raw, _ in self.kept(extent, generation)]

    def kept(self, extent: int, generation: int) -> list[tuple[bytes, Record]]:
        """The same with their entries."""
        with self._errors(), self._env.begin() as txn:
            headers = list(journal_of(txn, self._journal, extent, generation))
            return list(still_there(headers, lambda key: self._record(txn, key), extent, generation))

    def extend(self, entries: Sequence[tuple[bytes, Record, Expiry]]) -> None:
        """Give entries that still are the record given another end."""
        self._update(lambda txn: extend_in(txn, self._records, entries, lambda key: self._record(txn, key)))

    def seal(self, sealed: ExtentRow) -> None:
        """The footer is durable: note state and sequence, forget the journal."""

        def seal(txn: Txn) -> None:
            rows = Rows(txn, self._extents)
            row = rows.open(sealed.extent, sealed.generation, sealed.tenant, sealed.flags)
            row.state, row.sequence = State.SEALED, sealed.sequence
            drop_journal(txn, self._journal, sealed.extent)
            rows.save()

        self._update(seal)

    def recycle(
        self, extent: int, generation: int, keys: Sequence[bytes] | None
    ) -> tuple[list[bytes], dict[int, tuple[int, int]]]:
        """Remove every entry in the extent and make `generation` its new one.

        `keys` are those that may lie in it; where they are unknown or too few the whole index is searched.
        Returns the keys that were removed, and what died as negative counts.
        """
        recycled = self._update(
            lambda txn: recycle_in(txn, self._records, self._extents, self._journal, extent, generation, keys or ())
        )
        if self._beside is not None:
            self._beside.recycled(self.rows)
        return recycled

    def stain(self, extent: int) -> None:
        """Blocks that are not encrypted are about to be written to a free extent: it is not pure any more."""
        self._update(lambda txn: stain_in(txn, self._extents, extent))

    def forget(self, extent: int) -> None:
        """The extent's file was removed."""
        self._update(lambda txn: txn.delete(pack_extent_key(extent), db=self._extents))

    # --- the rest (writer thread) ---

    def remember(self, namespace: Namespace) -> None:
        """Keep what a digest stands for."""
        assert len(namespace.digest) == DIGEST_BYTES
        self._update(lambda txn: txn.put(namespace.digest, pack_namespace(namespace), db=self._namespaces))
        if self._beside is not None:
            self._beside.remember(namespace)

    def forget_namespaces(self, digests: Sequence[bytes]) -> None:
        """Keep them no longer: nothing is stored under them."""
        self._update(lambda txn: [txn.delete(digest, db=self._namespaces) for digest in digests])
        if self._beside is not None:
            self._beside.forget(digests)

    def sync(self) -> None:
        """Make everything durable."""
        with self._errors():
            self._env.sync(True)

    def _update(self, change: Callable[[Txn], T]) -> T:
        while True:
            try:
                with self._errors(), self._env.begin(write=True) as txn:
                    return change(txn)
            except MapFull as error:
                self._grow(error)

    def _grow(self, error: DeviceError) -> None:
        if self._map_bytes >= _MAP_BYTES_MAX:
            raise DeviceError(f"{self._path}: the index has reached its limit of {_MAP_BYTES_MAX} bytes") from error
        with self._growing, self._errors():
            self._map_bytes = 2 * self._env.info()["map_size"]
            self._env.set_mapsize(self._map_bytes)
