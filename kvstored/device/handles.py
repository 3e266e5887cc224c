"""Open files, within a limit.

A volume may have more extents than a process may have descriptors (a soft limit of 1024 is
common), so the least recently used files are closed when nobody is using them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstored.device.file import File, FileDevice


class OpenFiles:
    """A bounded set of open files, safe to use from any thread.

    The limit bends while more files than that are in use at once, which the number of I/O
    threads bounds.
    """

    def __init__(self, device: FileDevice, *, direct: bool, limit: int) -> None:
        self._device = device
        self._direct = direct
        self._limit = limit
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, File] = OrderedDict()
        self._users: dict[Path, int] = {}

    @contextmanager
    def use(self, path: Path, *, make: bool = True) -> Iterator[File]:
        """The file, opened (and made) if need be, and kept open at least as long as the context lasts."""
        with self._lock:
            file = self._take(path, make=make)
        try:
            yield file
        finally:
            with self._lock:
                self._give_back(path)

    def discard(self, path: Path) -> None:
        """Close one file, which nobody may be using, before it is removed."""
        with self._lock:
            assert path not in self._users, f"{path} is in use"
            file = self._files.pop(path, None)
        if file is not None:
            self._device.close(file)

    def close(self) -> None:
        """Close all of them; nobody may be using one."""
        with self._lock:
            assert not self._users, f"{len(self._users)} files are in use"
            while self._files:
                self._device.close(self._files.popitem()[1])

    def _take(self, path: Path, *, make: bool) -> File:
        file = self._files.get(path)
        if file is None:
            self._make_room()
            file = self._files[path] = self._device.open(path, direct=self._direct, make=make)
        self._files.move_to_end(path)
        self._users[path] = self._users.get(path, 0) + 1
        return file

    def _give_back(self, path: Path) -> None:
        self._users[path] -= 1
        if not self._users[path]:
            del self._users[path]

    def _make_room(self) -> None:
        excess = len(self._files) + 1 - self._limit
        idle = [path for path in self._files if path not in self._users]
        for path in idle[: max(0, excess)]:
            self._device.close(self._files.pop(path))
