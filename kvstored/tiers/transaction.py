"""What the index's transactions are made of: extent rows with their changes, the journal, and LMDB's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from kvstored.device.file import device_errors
from kvstored.device.lock_file import lock_file_in_memory
from kvstored.errors import CorruptData, DeviceError
from kvstored.tiers.formats import (
    DATABASES,
    ExtentRow,
    State,
    lies_in,
    pack_extent_key,
    pack_journal_key,
    pack_row,
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

    def open(self, extent: int, generation: int, tenant: str) -> ExtentRow:
        """The row of an extent that is being written, begun afresh at its first record."""
        row = self.get(extent)
        if row is None or row.generation != generation or row.state is State.FREE:
            row = self._rows[extent] = ExtentRow(extent, generation, tenant, State.OPEN)
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
