"""The contract of indexes, kept by LMDB and by its twin in memory; and what only the twin can show: power cuts."""

from pathlib import Path

import lmdb
import pytest

from kvstored.errors import DeviceError
from kvstored.testing.contract_index import IndexContract, find, insert, is_found
from kvstored.testing.memory_index import MemoryIndex
from kvstored.testing.memory_lmdb import IndexFiles, Trouble
from kvstored.tiers.index import Index

MAP_BYTES = 1 << 20


class LmdbHarness:
    def __init__(self, path):
        self._path = path
        self.index = self._open()

    def _open(self):
        index = Index(self._path, 0, MAP_BYTES)
        index.open()
        return index

    def reopen(self):
        self.index.close()
        self.index = self._open()


class MemoryHarness:
    def __init__(self, *, sync=True):
        self.files, self.trouble, self._sync = IndexFiles(), Trouble(), sync
        self.index = self._open()

    def _open(self):
        index = MemoryIndex(Path("nowhere"), 0, MAP_BYTES, self.files, sync=self._sync, trouble=self.trouble)
        index.open()
        return index

    def reopen(self):
        self.index.close()
        self.index = self._open()

    def power_cut(self):
        self.files.power_cut()
        self.index = self._open()


class TestLmdb(IndexContract):
    @pytest.fixture
    def harness(self, tmp_path):
        made = LmdbHarness(tmp_path)
        yield made
        made.index.close()


class TestMemory(IndexContract):
    @pytest.fixture
    def harness(self):
        return MemoryHarness()


def test_a_commit_survives_a_power_cut():
    harness = MemoryHarness()
    insert(harness, [1])
    harness.power_cut()
    assert is_found(harness, [1]) == [True]


def test_without_sync_a_power_cut_takes_what_was_not_synced():
    harness = MemoryHarness(sync=False)
    insert(harness, [1])
    harness.index.sync()
    insert(harness, [2])
    assert is_found(harness, [1, 2]) == [True, True]
    harness.power_cut()
    assert is_found(harness, [1, 2]) == [True, False]


def test_a_commit_that_fails_changes_nothing():
    harness = MemoryHarness()
    insert(harness, [1])
    rows, records = harness.index.rows(), find(harness, [1, 2])

    def refuse():
        raise lmdb.DiskError("no")

    harness.trouble.committing = refuse
    with pytest.raises(DeviceError):
        insert(harness, [2])
    assert (harness.index.rows(), find(harness, [1, 2])) == (rows, records)
