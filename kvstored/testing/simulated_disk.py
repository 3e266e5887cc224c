"""A file system in memory that tells what is durable: contents and names, each as it is and as it would be found.

Data is durable after a sync of its file, a name after a sync of its directory. A power cut keeps any subset of what was
not durable: of data by pieces of 4 KiB or sectors of 512 bytes, of names one by one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvstored.testing.memory_lmdb import IndexFiles

SECTOR_BYTES: Final = 512
PIECE_BYTES: Final = 4096


class Content:
    """The bytes of one file: as they are read now, and as far as they are durable."""

    def __init__(self) -> None:
        self.now = bytearray()
        self.durable = bytearray()
        self.unsynced: list[tuple[int, bytes]] = []
        self.spoilt: set[int] = set()  # pieces that are not what was written, by the device's fault

    def spoil(self, offset: int, size: int) -> None:
        """The device has lost what was there, or never had it."""
        self.spoilt.update(_pieces(offset, size))

    def renew(self, offset: int, size: int) -> None:
        """It was written anew; a piece of which only a part was is what it was."""
        if self.spoilt:
            self.spoilt.difference_update(range(-(-offset // PIECE_BYTES), (offset + size) // PIECE_BYTES))

    def is_spoilt(self, offset: int, size: int) -> bool:
        """Whether any of these bytes is."""
        return not self.spoilt.isdisjoint(_pieces(offset, size))

    def write(self, offset: int, data: bytes) -> None:
        """Write; durable after `sync`."""
        _put(self.now, offset, data)
        self.unsynced.append((offset, data))

    def sync(self) -> None:
        """Make everything written durable."""
        for offset, data in self.unsynced:
            _put(self.durable, offset, data)
        self.unsynced.clear()

    def sync_failed(self) -> None:
        """As Linux does it: what could not be written counts as clean from here on, and no later sync will write it."""
        self.unsynced.clear()

    def rot(self, at: int, bit: int) -> None:
        """A bit changes on the device."""
        for image in (self.now, self.durable):
            if at < len(image):
                image[at] ^= 1 << bit

    def truncate(self) -> None:
        """Empty it; nothing here truncates what it wants to keep, so that this is durable at once."""
        self.__init__()  # type: ignore[misc]

    def cut(self, size: int) -> None:
        """Make it that long; durable at once, because nothing that cuts needs what it cuts off."""
        for image in (self.now, self.durable):
            del image[size:]

    def power_cut(self, keep: Callable[[], bool], step_bytes: int) -> None:
        """What was not durable is there in part: each piece of `step_bytes` as `keep` says."""
        for offset, data in self.unsynced:
            for start in range(0, len(data), step_bytes):
                if keep():
                    _put(self.durable, offset + start, data[start : start + step_bytes])
        self.unsynced.clear()
        self.now = bytearray(self.durable)


def _pieces(offset: int, size: int) -> range:
    return range(offset // PIECE_BYTES, -(-(offset + size) // PIECE_BYTES))


def _put(image: bytearray, offset: int, data: bytes) -> None:
    if len(image) < offset:
        image += bytes(offset - len(image))
    image[offset : offset + len(data)] = data


class Folder:
    """The names in one directory: those that are there, and those that are durable."""

    def __init__(self) -> None:
        self.now: dict[str, Content | Folder] = {}
        self.durable: dict[str, Content | Folder] = {}

    def sync(self) -> None:
        """Make the names durable."""
        self.durable = dict(self.now)

    def power_cut(self, keep: Callable[[], bool]) -> None:
        """Each change of a name since the last sync is there or not, as `keep` says."""
        for name in sorted(self.now.keys() | self.durable.keys()):
            old, new = self.durable.get(name), self.now.get(name)
            if old is not new and keep():
                if new is None:
                    del self.durable[name]
                else:
                    self.durable[name] = new
        self.now = dict(self.durable)


class Disk:
    """All files, and the indexes, which live in directories but bring their own durability."""

    def __init__(self) -> None:
        self.root = Folder()
        self.indexes: dict[Path, IndexFiles] = {}

    def folder(self, path: Path) -> Folder:
        """A directory; raises FileNotFoundError."""
        found: Content | Folder | None = self.root
        for name in path.parts[1:]:
            found = found.now.get(name) if isinstance(found, Folder) else None
        if not isinstance(found, Folder):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return found

    def find(self, path: Path) -> Content | Folder | None:
        """What is there under a name."""
        if not path.name:
            return self.root
        try:
            return self.folder(path.parent).now.get(path.name)
        except FileNotFoundError:
            return None

    def make_folder(self, path: Path) -> None:
        """Make a directory and those above it."""
        folder = self.root
        for name in path.parts[1:]:
            inner = folder.now.setdefault(name, Folder())
            assert isinstance(inner, Folder), f"{path} is no directory"
            folder = inner

    def index(self, path: Path) -> IndexFiles:
        """The files of the index in a directory, made at first use."""
        return self.indexes.setdefault(path, IndexFiles())

    def power_cut(self, rng: random.Random) -> None:
        """Only what is durable is there, and of the rest whatever the dice say."""
        share = rng.choice((0.0, 0.0, 0.3, 0.7, 1.0))
        step_bytes = rng.choice((PIECE_BYTES, PIECE_BYTES, SECTOR_BYTES, 1 << 30))

        def keep() -> bool:
            return rng.random() < share

        todo: list[Folder] = [self.root]
        while todo:
            folder = todo.pop()
            folder.power_cut(keep)
            for inner in folder.now.values():
                if isinstance(inner, Folder):
                    todo.append(inner)
                else:
                    inner.power_cut(keep, step_bytes)
        for path in list(self.indexes):
            if isinstance(self.find(path), Folder):
                self.indexes[path].power_cut()
            else:  # its directory's name did not survive
                del self.indexes[path]

    def contents(self) -> list[tuple[Path, Content]]:
        """Every file with its path, in the order of names."""
        found: list[tuple[Path, Content]] = []
        todo: list[tuple[Path, Folder]] = [(Path("/"), self.root)]
        while todo:
            path, folder = todo.pop()
            for name, inner in sorted(folder.now.items()):
                if isinstance(inner, Folder):
                    todo.append((path / name, inner))
                else:
                    found.append((path / name, inner))
        return found
