"""A device that is not there: files in memory, and everything that devices do to those who trust them.

Which fault happens is drawn from the seed, call by call. What must be survived, and how:

    read_error       EIO: the block is a miss, its record may be dropped
    write_error      EIO: the blocks are not stored; nothing that was durable suffers
    sync_error       EIO: the same, and what was not synced may never be, however often one tries
    open_error       EROFS: as if every read and write failed that the file was needed for
    no_space         ENOSPC: not stored; what is there stays usable
    short            a call moves less than asked for: never seen above
    read_flip        a bit is wrong in what was read: a miss
    rot              a bit changes where it lies: a miss from then on, of that block alone
    torn_write       only some sectors of a write arrive, and the call says that all did: a miss, of those blocks
    misdirected      a write goes to another place of the file: misses, of what was there and what was to come
    slow             a call takes seconds (drawn by the virtual threads): late, never wrong
    read_only        for a while every write fails (EROFS): reads go on
    vanished         for a while everything fails (ENODEV): misses, and all is back afterwards
    index_error      a transaction of the index fails: not stored, or a miss; nothing that was durable suffers
    power cut        see `simulated_disk`: everything acknowledged as durable is there
    end of process   in the middle of any call: everything written is there, durable or not

In all of them: never wrong bytes, never a wrong account, and the process lives. Durable blocks may be missing only
where `is_spoilt` says that the device lost them. Out of scope: a device that answers with old contents (its
sectors would carry the right hashes), and one that says "synced" and did not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kvstored.device.file import Buffers, File, FileDevice
from kvstored.testing.simulated_disk import PIECE_BYTES, SECTOR_BYTES, Content, Disk, Folder

_FIRST_DESCRIPTOR: Final = 1_000_000  # never one of the operating system's
EPISODE_S: Final = 20.0


class DeviceFaults(msgspec.Struct, kw_only=True, frozen=True):
    """Probabilities of a call; of `read_only` and `vanished`, that an episode of `EPISODE_S` begins with it."""

    read_error: float = 0.0
    write_error: float = 0.0
    sync_error: float = 0.0
    open_error: float = 0.0
    no_space: float = 0.0
    short: float = 0.0
    read_flip: float = 0.0
    rot: float = 0.0
    torn_write: float = 0.0
    misdirected: float = 0.0
    read_only: float = 0.0
    vanished: float = 0.0
    index_error: float = 0.0


NO_FAULTS: Final = DeviceFaults()


class SimulatedDevice(FileDevice):
    """One device with all its file systems. It outlives the processes that use it: `restarted` and `power_cut`."""

    def __init__(self, seed: int = 0, faults: DeviceFaults = NO_FAULTS) -> None:
        self.disk = Disk()
        self.faults = faults
        self.quiet = False  # no faults for the moment
        self.dead = False  # its process has ended
        self.fired: Counter[str] = Counter()
        self.now: Callable[[], float] = lambda: 0.0
        # Called before each call; may raise `Crash`, or complain about where it is called from.
        self.on_call: Callable[[], None] = lambda: None
        self._random = random.Random(seed)
        self._open_files: dict[int, Content | Folder] = {}
        self._locks: dict[int, Folder] = {}
        self._next_descriptor = _FIRST_DESCRIPTOR
        self._episode = ("", 0.0)

    # --- the life of processes ---

    def restarted(self) -> None:
        """The process that used it is gone, and with it descriptors and locks; what it wrote is there."""
        self._open_files.clear()
        self._locks.clear()
        self.dead = False

    def power_cut(self) -> None:
        """The same, and only what was durable is there for certain."""
        self.disk.power_cut(self._random)
        self.restarted()

    def mend(self) -> None:
        """The end of an episode."""
        self._episode = ("", 0.0)

    # --- calls ---

    def _open(self, path: Path, flags: int) -> int:
        self.called()
        found = self.disk.find(path)
        if self.happens("open_error"):
            if isinstance(found, Content):
                found.spoil(0, len(found.now))  # as where its reads fail
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if found is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            self.fail_writing()
            found = self.disk.folder(path.parent).now[path.name] = Content()
        elif flags & os.O_TRUNC and isinstance(found, Content):
            self.fail_writing()
            found.truncate()
        self._next_descriptor += 1
        self._open_files[self._next_descriptor] = found
        return self._next_descriptor

    def _close(self, descriptor: int) -> None:
        self._open_files.pop(descriptor, None)
        self._locks.pop(descriptor, None)

    def _preadv(self, file: File, buffers: Buffers, offset: int) -> int:
        self.called()
        content = self._content(file)
        wanted = sum(map(len, buffers))
        if self.happens("read_error"):
            content.spoil(offset, wanted)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.happens("rot") and content.now:
            at = self._random.randrange(len(content.now))
            content.rot(at, self._random.randrange(8))
            content.spoil(at, 1)
        data = bytes(content.now[offset : offset + wanted])
        data = data[: self._shortened(len(data))]
        if data and self.happens("read_flip"):
            at = self._random.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
            content.spoil(offset + at, 1)
        done = 0
        for buffer in buffers:
            piece = data[done : done + len(buffer)]
            ctypes.memmove(buffer, piece, len(piece))
            done += len(piece)
        return done

    def _pwritev(self, file: File, buffers: Buffers, offset: int) -> int:
        self.called()
        self.fail_writing()
        self._fail("write_error", errno.EIO)
        data = b"".join(bytes(buffer) for buffer in buffers)
        data = data[: self._shortened(len(data))]
        content = self._content(file)
        if self.happens("misdirected"):
            elsewhere = self._random.randrange(16) * PIECE_BYTES
            content.spoil(offset, len(data))
            content.spoil(elsewhere, len(data))
            content.write(elsewhere, data)
        elif self.happens("torn_write"):
            content.spoil(offset, len(data))
            self._tear(content, offset, data)
        else:
            content.renew(offset, len(data))
            content.write(offset, data)
        return len(data)

    def _tear(self, content: Content, offset: int, data: bytes) -> None:
        if len(content.now) < offset + len(data):  # the file grows all the same
            content.write(offset + len(data) - 1, b"\0")
        for start in range(0, len(data), SECTOR_BYTES):
            if self._random.random() < 0.5:
                content.write(offset + start, data[start : start + SECTOR_BYTES])

    def _fdatasync(self, file: File) -> None:
        self.called()
        self.fail_gone()
        content = self._content(file)
        if self.happens("sync_error"):
            content.sync_failed()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        content.sync()

    def _size(self, file: File) -> int:
        self.called()
        self.fail_gone()
        return len(self._content(file).now)

    def _rename(self, old: Path, new: Path) -> None:
        self.called()
        self.fail_writing()
        folder = self.disk.folder(old.parent)
        self.disk.folder(new.parent).now[new.name] = folder.now.pop(old.name)

    def _unlink(self, path: Path) -> None:
        self.called()
        self.fail_writing()
        folder = self.disk.folder(path.parent)
        if folder.now.pop(path.name, None) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def _exists(self, path: Path) -> bool:
        self.called()
        self.fail_gone()
        return self.disk.find(path) is not None

    def _make_directory(self, path: Path) -> None:
        self.called()
        self.fail_gone()
        if not isinstance(self.disk.find(path), Folder):
            self.fail_writing()
            self.disk.make_folder(path)

    def _list(self, path: Path) -> dict[str, int]:
        self.called()
        self.fail_gone()
        names = self.disk.folder(path).now
        return {name: len(found.now) for name, found in names.items() if isinstance(found, Content)}

    def _place(self, path: Path) -> tuple[int, int]:
        self.called()
        self.fail_gone()
        found = self.disk.find(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return 1, id(found)

    def _truncate(self, path: Path, size_bytes: int) -> None:
        self.called()
        self.fail_writing()
        content = self.disk.find(path)
        assert isinstance(content, Content), f"{path} is no file"
        content.cut(size_bytes)

    def _free_bytes(self, path: Path) -> int:
        self.called()
        self.fail_gone()
        return 1 << 40

    def _flock(self, descriptor: int) -> bool:
        self.called()
        folder = self._open_files[descriptor]
        assert isinstance(folder, Folder), "directories are locked"
        if folder in self._locks.values():
            return False
        self._locks[descriptor] = folder
        return True

    def _sync_directory(self, path: Path) -> None:
        self.called()
        self.fail_writing()
        self.disk.folder(path).sync()

    # --- faults ---

    def called(self) -> None:
        """A call begins."""
        assert not self.dead, "a process that has ended uses its device"
        self.on_call()

    def _content(self, file: File) -> Content:
        self.fail_gone()
        found = self._open_files.get(file.descriptor)
        assert isinstance(found, Content), f"{file.path} is not open"
        return found

    def fail_gone(self) -> None:
        """Raises OSError where the device is not there at present."""
        if self._episode_is("vanished"):
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    def fail_writing(self) -> None:
        """Raises OSError where nothing can be written at present, or no more."""
        self.fail_gone()
        if self._episode_is("read_only"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        self._fail("no_space", errno.ENOSPC)

    def _episode_is(self, kind: str) -> bool:
        if self.quiet:
            return False
        if self._episode[1] <= self.now() and self.happens(kind):
            self._episode = (kind, self.now() + EPISODE_S)
        return self._episode[0] == kind and self._episode[1] > self.now()

    def _fail(self, kind: str, number: int) -> None:
        if self.happens(kind):
            raise OSError(number, os.strerror(number))

    def happens(self, kind: str) -> bool:
        """Whether this call is to suffer from a fault."""
        if self.quiet:
            return False
        share: float = getattr(self.faults, kind)
        if not share or self._random.random() >= share:
            return False
        self.fired[kind] += 1
        return True

    def _shortened(self, size: int) -> int:
        if size > SECTOR_BYTES and self.happens("short"):
            return self._random.randrange(1, -(-size // SECTOR_BYTES)) * SECTOR_BYTES
        return size

    def is_spoilt(self, path: Path, offset: int, size: int) -> bool:
        """Whether the device has spoilt anything of a file since it was written there."""
        content = self.disk.find(path)
        return isinstance(content, Content) and content.is_spoilt(offset, size)
