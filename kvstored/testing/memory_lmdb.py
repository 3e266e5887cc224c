"""LMDB in memory: environments, transactions and cursors as far as an index uses them, and their durability.

What is committed is in `IndexFiles.committed`; what would be there after a power cut is in `durable`. A commit
of an environment that syncs makes both the same, in one step: LMDB's commits are atomic. Readers have the
snapshot of their beginning, and a writer that fails leaves nothing behind.

`Trouble` is where a simulated device makes calls fail, or ends the process before or after a commit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any, Final

import lmdb

PAGE_BYTES: Final = 4096


class Table:
    """The entries of one database at one commit; never changed."""

    __slots__ = ("_keys", "entries")

    def __init__(self, entries: Mapping[bytes, bytes]) -> None:
        self.entries = dict(entries)
        self._keys: list[bytes] | None = None

    @property
    def keys(self) -> list[bytes]:
        """The keys in LMDB's order."""
        if self._keys is None:
            self._keys = sorted(self.entries)
        return self._keys


_NOTHING: Final = Table({})


def _pages(tables: Mapping[bytes, Table]) -> int:
    """About how much of the map they would take."""
    return sum(len(table.entries) for table in tables.values()) // 8


class IndexFiles:
    """What one environment leaves on a device."""

    def __init__(self) -> None:
        self.committed: dict[bytes, Table] = {}
        self.durable: dict[bytes, Table] = {}

    def sync(self) -> None:
        """Everything committed is durable."""
        self.durable = dict(self.committed)

    def power_cut(self) -> None:
        """What was not durable is gone."""
        self.committed = dict(self.durable)


class Trouble:
    """Asked before things happen; may raise `lmdb.Error`, or `Crash`. This one does nothing."""

    def reading(self) -> None:
        """A read transaction begins."""

    def committing(self) -> None:
        """A commit is about to be written."""

    def committed(self) -> None:
        """A commit is durable, and nobody knows yet."""


class Environment:
    """Stands for `lmdb.Environment`."""

    def __init__(self, files: IndexFiles, *, map_bytes: int = 1 << 30, sync: bool = True, trouble: Trouble) -> None:
        self._files = files
        self._map_bytes = map_bytes
        self._sync = sync
        self._trouble = trouble
        self._writing = self._closed = False

    def open_db(self, key: bytes, txn: Transaction | None = None, **_: Any) -> bytes:
        """A handle of a named database, made if need be."""
        self._files.committed.setdefault(key, _NOTHING)
        return key

    def begin(self, db: bytes | None = None, write: bool = False, **_: Any) -> Transaction:
        """A transaction, for use with `with`."""
        if self._closed:
            raise lmdb.Error("the environment is closed")
        if not write:
            self._trouble.reading()
        return Transaction(self, db, write)

    def sync(self, force: bool = False) -> None:
        """Make everything durable."""
        self._trouble.committing()
        self._files.sync()
        self._trouble.committed()

    def info(self) -> dict[str, int]:
        """Of it, the size of the map."""
        return {"map_size": self._map_bytes, "last_pgno": _pages(self._files.committed)}

    def stat(self) -> dict[str, int]:
        """Of it, the size of a page."""
        return {"psize": PAGE_BYTES}

    def set_mapsize(self, map_size: int) -> None:
        """Grow the map."""
        assert not self._writing, "the map grows while nothing is written"
        self._map_bytes = map_size

    def readers(self) -> str:
        """No reader of another process."""
        return "(no active readers)\n"

    def reader_check(self) -> int:
        """No reader of a process that is gone."""
        return 0

    def close(self) -> None:
        """Let go; what was committed stays."""
        self._closed = True

    # --- for transactions ---

    def snapshot(self) -> dict[bytes, Table]:
        """The databases as they are now."""
        return self._files.committed

    def enter(self) -> None:
        """A writer begins; there is one at a time."""
        assert not self._writing, "one writer at a time"
        self._writing = True

    def leave(self) -> None:
        """The writer has ended."""
        self._writing = False

    def commit(self, changed: Mapping[bytes, dict[bytes, bytes]]) -> None:
        """Make changes visible, and durable where the environment syncs."""
        self._trouble.committing()
        after = self._files.committed | {name: Table(entries) for name, entries in changed.items()}
        if _pages(after) * PAGE_BYTES > self._map_bytes:
            raise lmdb.MapFullError("the map is full")
        self._files.committed = after
        if self._sync:
            self._files.sync()
        self._trouble.committed()


class Transaction:
    """Stands for `lmdb.Transaction`."""

    def __init__(self, environment: Environment, db: bytes | None, write: bool) -> None:
        self._environment = environment
        self._db = db
        self._write = write
        self._tables = environment.snapshot()
        self._changed: dict[bytes, dict[bytes, bytes]] = {}
        self._sorted: dict[bytes, list[bytes]] = {}

    def __enter__(self) -> Transaction:
        if self._write:
            self._environment.enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._write:
            self._environment.leave()
            if kind is None and self._changed:
                self._environment.commit(self._changed)

    def get(self, key: bytes, default: bytes | None = None, db: bytes | None = None) -> bytes | None:
        """The value of a key."""
        return self.entries(db).get(key, default)

    def put(self, key: bytes, value: bytes, db: bytes | None = None, *, overwrite: bool = True, **_: Any) -> bool:
        """Set a key; False where it is there and may not be overwritten."""
        entries = self._writable(db)
        if not overwrite and key in entries:
            return False
        if key not in entries:
            self._sorted.pop(self._name(db), None)
        entries[bytes(key)] = bytes(value)
        return True

    def delete(self, key: bytes, value: bytes = b"", db: bytes | None = None) -> bool:
        """Remove a key; whether it was there."""
        if key not in self.entries(db):
            return False
        del self._writable(db)[key]
        self._sorted.pop(self._name(db), None)
        return True

    def drop(self, db: bytes, delete: bool = True) -> None:
        """Empty a database."""
        self._writable(db).clear()
        self._sorted.pop(db, None)

    def stat(self, db: bytes | None = None) -> dict[str, int]:
        """Of it, the number of entries."""
        return {"entries": len(self.entries(db)), "psize": PAGE_BYTES}

    def cursor(self, db: bytes | None = None) -> Cursor:
        """A cursor, on nothing yet."""
        return Cursor(self, self._name(db))

    # --- for cursors ---

    def entries(self, db: bytes | None) -> dict[bytes, bytes]:
        """The entries as this transaction sees them; not to be changed."""
        name = self._name(db)
        changed = self._changed.get(name)
        return self._tables.get(name, _NOTHING).entries if changed is None else changed

    def keys(self, name: bytes) -> list[bytes]:
        """The keys as this transaction sees them, in order; not to be changed."""
        if name not in self._changed:
            return self._tables.get(name, _NOTHING).keys
        found = self._sorted.get(name)
        if found is None:
            found = self._sorted[name] = sorted(self._changed[name])
        return found

    def _writable(self, db: bytes | None) -> dict[bytes, bytes]:
        assert self._write, "changes need a write transaction"
        name = self._name(db)
        changed = self._changed.get(name)
        if changed is None:
            changed = self._changed[name] = dict(self._tables.get(name, _NOTHING).entries)
        return changed

    def _name(self, db: bytes | None) -> bytes:
        name = db if db is not None else self._db
        assert name is not None, "which database"
        return name


class Cursor:
    """Stands for `lmdb.Cursor`."""

    def __init__(self, txn: Transaction, name: bytes) -> None:
        self._txn = txn
        self._name = name
        self._key: bytes | None = None

    def first(self) -> bool:
        """Go to the first entry."""
        return self._go(0)

    def next(self) -> bool:
        """Go on; from nothing to the first."""
        if self._key is None:
            return self.first()
        at = bisect_left(self._keys, self._key)
        there = at < len(self._keys) and self._keys[at] == self._key
        return self._go(at + there)

    def set_key(self, key: bytes) -> bool:
        """Go to this very key."""
        self._key = key if key in self._txn.entries(self._name) else None
        return self._key is not None

    def set_range(self, key: bytes) -> bool:
        """Go to the first key that is not before this one."""
        return self._go(bisect_left(self._keys, key))

    def key(self) -> bytes:
        """Where it is; empty for nowhere."""
        return self._key or b""

    def value(self) -> bytes:
        """What is there; empty for nowhere."""
        return self._txn.entries(self._name).get(self._key, b"") if self._key is not None else b""

    def item(self) -> tuple[bytes, bytes]:
        """Both."""
        return self.key(), self.value()

    def delete(self) -> bool:
        """Remove what is there and stand on what follows."""
        if self._key is None:
            return False
        at = bisect_left(self._keys, self._key)
        self._txn.delete(self._key, db=self._name)
        self._go(at)
        return True

    def iternext(self, keys: bool = True, values: bool = True) -> Iterator[Any]:
        """Everything from here on, or from the first."""
        more = self._key is not None or self.first()
        while more:
            yield self.item() if keys and values else self.key() if keys else self.value()
            more = self.next()

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return self.iternext()

    @property
    def _keys(self) -> list[bytes]:
        return self._txn.keys(self._name)

    def _go(self, at: int) -> bool:
        keys = self._keys
        self._key = keys[at] if 0 <= at < len(keys) else None
        return self._key is not None
