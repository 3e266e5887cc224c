"""Counters that many processes share and that a `kill -9` of any of them does not lose."""

import mmap

import numpy as np


class Counts:
    """Rows of named counters in a mapped file: one row per process, shared by all its incarnations."""

    def __init__(self, path, rows, names):
        if not path.exists():
            path.write_bytes(bytes(8 * rows * len(names)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._columns = {name: column for column, name in enumerate(names)}
        self._rows = np.frombuffer(self._memory, dtype=np.int64).reshape(rows, len(names))

    def add(self, row, name, count=1):
        self._rows[row, self._columns[name]] += count

    def set(self, row, name, value):
        self._rows[row, self._columns[name]] = value

    def get(self, row, name):
        return int(self._rows[row, self._columns[name]])

    def total(self, name):
        return int(self._rows[:, self._columns[name]].sum())

    def set_all(self, name, value):
        self._rows[:, self._columns[name]] = value

    def all(self, name):
        return self._rows[:, self._columns[name]].tolist()
