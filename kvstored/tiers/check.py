"""Checks a volume's index, or makes it anew, in a process of its own: `python -m kvstored.tiers.check`.

LMDB trusts its pages, which carry no checksum: a damaged one can end or hang the process that
reads it. So the daemon has this process read everything first and opens only what this has
copied: every CRC right, every key in order, every extent's account equal to its records, and
nothing on the volume newer than it. The
copy is made by LMDB itself and takes over neither branches nor the list of free pages.

It prints one JSON line, a `Report`. Exit status: 0 the index is good (or was made), 3 it is
damaged, 4 the device failed; a signal if LMDB did not survive it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import lmdb
import msgspec

from kvstored.device.file import FileDevice, NoSpace
from kvstored.errors import CorruptData, DeviceError
from kvstored.keys import slot_bytes
from kvstored.tiers.directory import DATA_FILE
from kvstored.tiers.footers import check_age
from kvstored.tiers.formats import (
    COUNTED,
    COUNTED_VALUES,
    DATABASES,
    INTACT_CRC,
    KINDS,
    ExtentRow,
    lies_at,
    unpack_row,
)
from kvstored.tiers.index_copy import IndexCopy
from kvstored.tiers.sources import Report, Source
from kvstored.tiers.tombstones import read_tombstones
from kvstored.tiers.transaction import lmdb_errors

EXIT_DAMAGED: Final = 3
EXIT_DEVICE: Final = 4
_PR_SET_PDEATHSIG: Final = 1


class Opened:
    """An LMDB environment with the index's databases, to be read."""

    def __init__(self, env: Any, databases: dict[bytes, Any]) -> None:
        self.env = env
        self.databases = databases

    def entries(self, txn: Any, name: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values in their order."""
        found: Iterator[tuple[bytes, bytes]] = txn.cursor(self.databases[name]).iternext()
        return found

    def keys(self, txn: Any, name: bytes) -> Iterator[bytes]:
        """Keys in their order."""
        found: Iterator[bytes] = txn.cursor(self.databases[name]).iternext(values=False)
        return found

    def values(self, txn: Any, name: bytes) -> Iterator[bytes]:
        """Values in the order of their keys."""
        found: Iterator[bytes] = txn.cursor(self.databases[name]).iternext(keys=False)
        return found


def open_old(path: Path) -> Opened:
    """The index as it was left; raises lmdb.Error, or does worse, where it is damaged."""
    env = lmdb.open(str(path / DATA_FILE), subdir=False, readonly=True, lock=False, max_dbs=len(DATABASES))
    return Opened(env, {name: env.open_db(name, create=False) for name in DATABASES})


def check(source: Source) -> Report:
    """Copy the index, check the copy and put it in the index's place; raises CorruptData or DeviceError."""
    with lmdb_errors(source.index):
        old = open_old(source.index)
        try:
            copy = _copy(source, old)
        except (lmdb.DiskError, OSError):  # most likely no room: what is there must do
            return audit(source, old)
        old.env.close()
        return take(source, copy)


def _copy(source: Source, old: Opened) -> IndexCopy:
    copy = IndexCopy(source.index)
    try:
        with old.env.begin() as txn:
            for name in DATABASES:
                copy.append(name, old.entries(txn, name))
    except BaseException:
        copy.discard()
        raise
    return copy


def take(source: Source, copy: IndexCopy) -> Report:
    """Check a complete copy and put it in the index's place."""
    try:
        report = audit(source, Opened(copy.env, copy.databases))
    except BaseException:
        copy.discard()
        raise
    copy.replace_old()
    return report


def audit(source: Source, index: Opened) -> Report:
    """Check every entry and the account of every extent; raises CorruptData."""
    with index.env.begin() as txn:
        for name in DATABASES:
            crcs = map(crc32, index.values(txn, name), map(crc32, index.keys(txn, name), repeat(KINDS[name])))
            if not set(crcs) <= {INTACT_CRC}:
                raise CorruptData(f"a damaged entry in {name.decode()}")
        rows = [unpack_row(key, value) for key, value in index.entries(txn, b"extents")]
        places = map(itemgetter(COUNTED), index.values(txn, b"records"))
        report = _compare(rows, Counter(places))
        _no_deleted_block(source, txn, index.databases[b"records"])
        check_age(FileDevice(), source, rows)
        report.namespaces = txn.stat(index.databases[b"namespaces"])["entries"]
    return report


def _compare(rows: list[ExtentRow], counted: Counter[bytes]) -> Report:
    """Whether the rows say what the records do."""
    alive: dict[tuple[int, int], list[int]] = {}
    for place, blocks in counted.items():
        extent, generation, size = COUNTED_VALUES.unpack(place)
        total = alive.setdefault((extent, generation), [0, 0])
        total[0] += slot_bytes(size) * blocks
        total[1] += blocks
    report = Report(extents=len(rows))
    for row in rows:
        found = alive.pop((row.extent, row.generation), [0, 0])
        if found != [row.live_bytes, row.live_blocks]:
            raise CorruptData(f"the account of extent {row.extent} is not that of its records")
        report.live_bytes += row.live_bytes
        report.records += row.live_blocks
    if alive:
        raise CorruptData(f"records in extents that are not theirs: {sorted(alive)[:3]}")
    return report


def _no_deleted_block(source: Source, txn: Any, records: Any) -> None:
    """An index from before a delete, such as a damaged page may bring back, is not one to go on with."""
    tombstones, _, _ = read_tombstones(FileDevice(), source.tombstones)
    for tombstone in tombstones:
        value = txn.get(tombstone.key, db=records)
        if value is not None and not tombstone.moved and lies_at(value, *tombstone[1:4]):
            raise CorruptData("a block that was deleted is in the index")


def main(arguments: list[str]) -> int:
    """Do what is asked (`check`, `migrate` or `rebuild`), print a report, return the exit status."""
    mode, source = arguments[0], msgspec.json.decode(arguments[1], type=Source)
    _end_with_parent(source.parent_pid)
    try:
        if mode == "rebuild":
            from kvstored.tiers.rebuild import rebuild as work
        elif mode == "migrate":
            from kvstored.tiers.migrate import migrate as work
        else:
            work = check
        report, status = work(source), 0
    except (CorruptData, ValueError) as error:
        report, status = Report(reason=str(error)), EXIT_DAMAGED
    except (DeviceError, NoSpace, OSError) as error:
        report, status = Report(reason=str(error)), EXIT_DEVICE
    print(msgspec.json.encode(report).decode(), flush=True)
    return status


def _end_with_parent(parent_pid: int) -> None:
    """A daemon that is killed leaves nobody behind who changes its index; one that is asked to end decides itself."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid and os.getppid() != parent_pid:
        sys.exit(EXIT_DEVICE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
