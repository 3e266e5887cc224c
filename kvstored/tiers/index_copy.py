"""A new index file beside the old one, which it replaces in one step when it is complete.

Its entries come in the order of their keys, so that LMDB makes pages that nothing of the old
file went into. Nobody else may have the index open.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

import lmdb

from kvstored.device.file import NEW_SUFFIX
from kvstored.errors import CorruptData
from kvstored.tiers.directory import DATA_FILE
from kvstored.tiers.formats import DATABASES

_MAP_BYTES: Final = 1 << 38  # addresses only: the file grows as it is written
_ENTRIES_PER_TRANSACTION: Final = 100_000


class IndexCopy:
    """The new file; `replace_old` or `discard` ends it."""

    def __init__(self, directory: Path) -> None:
        self._target = directory / DATA_FILE
        self._path = directory / (DATA_FILE + NEW_SUFFIX)
        self._path.unlink(missing_ok=True)
        try:
            self.env: Any = lmdb.open(
                str(self._path),
                subdir=False,
                map_size=_MAP_BYTES,
                max_dbs=len(DATABASES),
                mode=0o600,
                sync=False,
                metasync=False,
                lock=False,
            )
            self.databases = {name: self.env.open_db(name) for name in DATABASES}
        except lmdb.Error:
            self._path.unlink(missing_ok=True)
            raise

    def append(self, name: bytes, entries: Iterable[tuple[bytes, bytes]]) -> int:
        """Add entries; raises CorruptData where their keys are not in order. Returns how many there were."""
        rest, total = iter(entries), 0
        while True:
            with self.env.begin(self.databases[name], write=True) as txn:
                few = islice(rest, _ENTRIES_PER_TRANSACTION)
                consumed, added = txn.cursor().putmulti(few, append=True, overwrite=True)
            if consumed != added:
                raise CorruptData(f"keys of {name.decode()} are not in order")
            if not consumed:
                return total
            total += consumed

    def replace_old(self) -> None:
        """Make it durable and put it in the place of the old file."""
        self.env.sync(True)
        self.env.close()
        self._path.replace(self._target)
        directory = os.open(self._target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def discard(self) -> None:
        """Remove it."""
        self.env.close()
        with suppress(OSError):
            self._path.unlink()
