"""What the index's transactions are made of: extent rows with their changes, the journal, and LMDB's errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb
import msgspec

from kvstored.device.file import device_errors
from kvstored.device.lock_file import lock_file_in_memory
from kvstored.errors import CorruptData, DeviceError
from kvstored.lifetime import Expiry
from kvstored.tiers.base import Record
from kvstored.tiers.formats import (
    DATABASES,
    ExtentFlags,
    ExtentRow,
    State,
    lies_in,
    pack_extent_key,
    pack_found,
    pack_journal_key,
    pack_row,
    unpack_headers,
    unpack_journal,
    unpack_row,
)

Txn = Any
LOCK_FILE: Final = "lock.mdb"
_DAMAGE: Final = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)


class MapFull(DeviceError):
    """The map must grow before the transaction can be tried again."""


@contextmanager
def lmdb_errors(path: Path) -> Iterator[None]:
    """Turn LMDB's errors into this package's."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise MapFull(f"{path}: the map is full") from error
    except _DAMAGE as error:
        raise CorruptData(f"{path}: {error}") from error
    except lmdb.Error as error:
        raise DeviceError(f"{path}: {error}") from error


def open_environment(path: Path, map_bytes: int) -> Any:
    """The index in a directory, made if need be; raises DeviceError, and what `lmdb_errors` turns.

    Its lock file, which only threads of this process share, lies in memory: readers write to its map with the
    GIL held, and on a device that hangs everything would stand still.
    """
    with device_errors(f"opening {path}"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock_file_in_memory(path / LOCK_FILE):
            return lmdb.open(
                str(path),
                map_size=map_bytes,
                max_dbs=len(DATABASES),
                mode=0o600,
                sync=True,
                metasync=True,
                readahead=False,
            )


class Rows:
    """The extent rows that a transaction reads and changes, and by how much."""

    def __init__(self, txn: Txn, database: Any) -> None:
        self._txn = txn
        self._database = database
        self._rows: dict[int, ExtentRow | None] = {}
        self.delta: dict[int, tuple[int, int]] = {}

    def get(self, extent: int) -> ExtentRow | None:
        """The row, if there is one."""
        if extent not in self._rows:
            key = pack_extent_key(extent)
            value = self._txn.get(key, db=self._database)
            self._rows[extent] = None if value is None else unpack_row(key, value)
        return self._rows[extent]

    def of(self, record: Record) -> ExtentRow | None:
        """The row of a record's extent, or None where the record is void."""
        row = self.get(record.location.extent)
        return row if row is not None and row.generation == record.location.generation else None

    def open(self, extent: int, generation: int, tenant: str, flags: int) -> ExtentRow:
        """The row of an extent that is being written, begun afresh at its first record."""
        row = self.get(extent)
        if row is None or row.generation != generation or row.state is State.FREE:
            row = self._rows[extent] = ExtentRow(extent, generation, tenant, State.OPEN, flags=flags)
        return row

    def count(self, row: ExtentRow, bytes_: int, blocks: int) -> None:
        """So much more is alive in this extent."""
        row.live_bytes += bytes_
        row.live_blocks += blocks
        before = self.delta.get(row.extent, (0, 0))
        self.delta[row.extent] = (before[0] + bytes_, before[1] + blocks)

    def save(self) -> None:
        """Write the rows back."""
        for extent, row in self._rows.items():
            if row is not None:
                self._txn.put(pack_extent_key(extent), pack_row(row), db=self._database)


def journal_of(txn: Txn, database: Any, extent: int, generation: int) -> Iterator[bytes]:
    """Headers of an unsealed extent, in the order of their offsets."""
    prefix = pack_journal_key(extent, generation, 0)[:8]
    cursor = txn.cursor(database)
    more = cursor.set_range(prefix)
    while more and cursor.key().startswith(prefix):
        yield unpack_journal(cursor.key(), cursor.value())
        more = cursor.next()


def still_there(
    journal: Iterable[bytes], record_of: Callable[[bytes], Record | None], extent: int, generation: int
) -> Iterator[tuple[bytes, Record]]:
    """Headers whose entry is where they say, with it."""
    for headers in journal:
        for header, raw in unpack_headers(headers):
            record = record_of(header.digest + header.hash)
            place = None if record is None else (record.location.extent, record.location.generation)
            if record is not None and place == (extent, generation) and record.location.offset == header.offset:
                yield raw, record


def extend_in(
    txn: Txn,
    records: Any,
    entries: Iterable[tuple[bytes, Record, Expiry]],
    record_of: Callable[[bytes], Record | None],
) -> None:
    """See `Index.extend`."""
    for key, expected, expiry in entries:
        if record_of(key) == expected:
            txn.put(key, pack_found(key, msgspec.structs.replace(expected, expiry=expiry)), db=records)


def drop_journal(txn: Txn, database: Any, extent: int) -> None:
    """Forget the headers of every generation of an extent."""
    cursor = txn.cursor(database)
    prefix = pack_extent_key(extent)
    while cursor.set_range(prefix) and cursor.key().startswith(prefix):
        cursor.delete()


def keys_in(txn: Txn, records: Any, row: ExtentRow) -> list[bytes]:
    """Keys of all entries in an extent, found by looking at each of the index."""
    return [key for key, value in txn.cursor(records) if lies_in(value, row.extent, row.generation)]


def remove_from(txn: Txn, records: Any, row: ExtentRow, key: bytes) -> bool:
    """Remove a key's entry if it lies in this extent; whether it did."""
    value = txn.get(key, db=records)
    return value is not None and lies_in(value, row.extent, row.generation) and bool(txn.delete(key, db=records))


def recycle_in(
    txn: Txn, records: Any, extents: Any, journal: Any, extent: int, generation: int, keys: Sequence[bytes]
) -> tuple[list[bytes], dict[int, tuple[int, int]]]:
    """See `Index.recycle`."""
    row = Rows(txn, extents).get(extent)
    if row is None:  # opened, and nothing was ever committed in it
        return [], {}
    removed = [key for key in keys if remove_from(txn, records, row, key)]
    if len(removed) < row.live_blocks:
        rest = keys_in(txn, records, row)
        removed += [key for key in rest if remove_from(txn, records, row, key)]
    drop_journal(txn, journal, extent)
    value = pack_row(ExtentRow(extent, generation, row.tenant, State.FREE, flags=row.flags & ExtentFlags.PURE))
    txn.put(pack_extent_key(extent), value, db=extents)
    return removed, {extent: (-row.live_bytes, -row.live_blocks)}


def stain_in(txn: Txn, extents: Any, extent: int) -> None:
    """See `Index.stain`."""
    rows = Rows(txn, extents)
    row = rows.get(extent)
    if row is not None:
        row.flags = ExtentFlags.NONE
        rows.save()
