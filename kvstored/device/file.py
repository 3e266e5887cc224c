"""Files: the only module that opens, reads, writes or syncs them.

Bytes move between a file and addresses of this process (slots of the tier above), with the GIL
released. Direct I/O goes past the page cache; offsets, sizes and addresses are then multiples
of 4 KiB. Every call blocks: callers run it in a thread of their own. What the operating system
refuses becomes a `DeviceError`, a full file system a `NoSpace`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from kvstored.device.buffer import ALIGN_BYTES as ALIGN_BYTES
from kvstored.device.buffer import AlignedBuffer as AlignedBuffer
from kvstored.errors import DeviceError

PIECES_PER_CALL_MAX: Final = 512  # the kernel takes 1024
NEW_SUFFIX: Final = ".new"  # of a file that is to replace another
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

Piece = tuple[int, int]
"""An address in this process and a size in bytes."""

Buffers = Sequence["ctypes.Array[ctypes.c_char]"]


class NoSpace(DeviceError):
    """The file system is full, or its quota is."""


class CutShort(DeviceError):
    """The file ends before what was to be read: the device answers, the bytes are not there."""


class File(NamedTuple):
    """An open file."""

    path: Path
    descriptor: int
    direct: bool


@contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Turn the operating system's refusals into this package's errors."""
    try:
        yield
    except OSError as error:
        kind = NoSpace if error.errno in _FULL else DeviceError
        raise kind(f"{what}: {error.strerror or error}") from error


class FileDevice:
    """Files of the operating system."""

    # --- bytes of blocks ---

    def open(self, path: Path, *, direct: bool, make: bool = True) -> File:
        """Open for reading and writing; a file that is not there is made (if asked), and its name made durable."""
        with device_errors(f"opening {path}"):
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
            try:
                return File(path, self._open(path, flags), direct)
            except FileNotFoundError:
                if not make:
                    raise
                descriptor = self._open(path, flags | os.O_CREAT)
            try:
                self._sync_directory(path.parent)
            except OSError:
                self._close(descriptor)
                raise
            return File(path, descriptor, direct)

    def close(self, file: File) -> None:
        """Let go of the descriptor."""
        self._close(file.descriptor)

    def read(self, file: File, offset: int, pieces: Sequence[Piece]) -> None:
        """Fill the pieces, one after the other, from `offset` on.

        Raises CutShort where the file ends before they are full, DeviceError where the device fails.
        """
        with device_errors(f"reading {file.path} at {offset}"):
            self._move(self._preadv, file, offset, pieces)

    def write(self, file: File, offset: int, pieces: Sequence[Piece]) -> None:
        """Write the pieces, one after the other, from `offset` on. Durable after `sync`."""
        with device_errors(f"writing {file.path} at {offset}"):
            self._move(self._pwritev, file, offset, pieces)

    def sync(self, file: File) -> None:
        """Make everything written to the file durable."""
        with device_errors(f"syncing {file.path}"):
            self._fdatasync(file)

    def size_bytes(self, file: File) -> int:
        """How long the file is."""
        with device_errors(f"asking for the size of {file.path}"):
            return self._size(file)

    # --- bytes of our own, small ---

    def read_bytes(self, file: File, offset: int, size_bytes: int) -> bytes:
        """Bytes of an open file, through an aligned buffer; `offset` is a multiple of 4 KiB."""
        buffer = AlignedBuffer(size_bytes)
        try:
            self.read(file, offset, [(buffer.address, buffer.size_bytes)])
            return buffer.get(0, size_bytes)
        finally:
            buffer.close()

    def write_bytes(self, file: File, offset: int, data: bytes) -> None:
        """Write bytes through an aligned buffer, padded with zeros to 4 KiB; `offset` is a multiple of it."""
        buffer = AlignedBuffer(len(data))
        try:
            buffer.set(0, data)
            self.write(file, offset, [(buffer.address, buffer.size_bytes)])
        finally:
            buffer.close()

    def read_whole(self, path: Path) -> bytes | None:
        """A small file, or None where there is none."""
        with device_errors(f"reading {path}"):
            try:
                file = File(path, self._open(path, os.O_RDONLY | os.O_CLOEXEC), direct=False)
            except FileNotFoundError:
                return None
            try:
                content = ctypes.create_string_buffer(self._size(file))
                self._move(self._preadv, file, 0, [(ctypes.addressof(content), len(content))] if len(content) else [])
                return content.raw
            finally:
                self._close(file.descriptor)

    def replace(self, path: Path, data: bytes) -> None:
        """Write a small file in one step: after a crash it is the old one or the new one, whole."""
        fresh = path.with_name(path.name + NEW_SUFFIX)
        with device_errors(f"writing {path}"):
            try:
                self._write_new(fresh, data)
                self._rename(fresh, path)
            except OSError:
                with suppress(OSError):
                    self._unlink(fresh)  # a full file system can do without it
                raise
            self._sync_directory(path.parent)

    def _write_new(self, path: Path, data: bytes) -> None:
        file = File(path, self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC), direct=False)
        try:
            content = ctypes.create_string_buffer(data, len(data))
            self._move(self._pwritev, file, 0, [(ctypes.addressof(content), len(content))] if data else [])
            self._fdatasync(file)
        finally:
            self._close(file.descriptor)

    def remove(self, path: Path, *, durably: bool = False) -> None:
        """Remove a file; one that is not there is fine. Takes no room on the device."""
        with device_errors(f"removing {path}"), suppress(FileNotFoundError):
            self._unlink(path)
            if durably:
                self._sync_directory(path.parent)

    def truncate(self, path: Path, size_bytes: int) -> None:
        """Cut a file to a length."""
        with device_errors(f"truncating {path}"):
            self._truncate(path, size_bytes)

    # --- directories ---

    def make_directory(self, path: Path) -> None:
        """Make a directory and those above it, from the top, each durable before the next; one that exists is fine."""
        with device_errors(f"making the directory {path}"):
            missing = [one for one in (path, *path.parents) if not self._exists(one)]
            last = missing[-1].parent if missing else path  # the only one whose maker may have failed to sync its name
            if self._place(last)[0] == self._place(last.parent)[0]:  # else a mount point: not made here
                with suppress(PermissionError):  # in a directory of others: neither
                    self._sync_directory(last.parent)
            for one in reversed(missing):
                self._make_directory(one)
                self._sync_directory(one.parent)
            self._make_directory(path)  # fails where it is no directory

    def names(self, path: Path) -> dict[str, int]:
        """The files in a directory with their sizes in bytes; empty where there is no such directory."""
        with device_errors(f"listing {path}"):
            with suppress(FileNotFoundError):
                return self._list(path)
            return {}

    def exists(self, path: Path) -> bool:
        """Whether there is a file or directory of that name."""
        with device_errors(f"looking for {path}"):
            return self._exists(path)

    def place(self, path: Path) -> tuple[int, int] | None:
        """Which file system and inode a path leads to; None where there is nothing."""
        with device_errors(f"looking for {path}"):
            with suppress(FileNotFoundError):
                return self._place(path)
            return None

    def free_bytes(self, path: Path) -> int:
        """How much more the file system of a directory takes."""
        with device_errors(f"asking {path} for its room"):
            return self._free_bytes(path)

    def lock_directory(self, path: Path) -> int | None:
        """Take a directory for this process alone: a descriptor to close later, or None if another has it."""
        with device_errors(f"locking {path}"):
            descriptor = self._open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if self._flock(descriptor):
                return descriptor
            self._close(descriptor)
            return None

    def unlock(self, lock: int) -> None:
        """Give a directory back."""
        self._close(lock)

    def allows_direct_io(self, path: Path) -> bool:
        """Whether the file system of `path`, an existing file, takes direct I/O."""
        try:
            self._close(self._open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise DeviceError(f"opening {path}: {error.strerror}") from error
        return True

    # --- what a fake device overrides: every call to the operating system ---

    def _open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK, 0o600)  # nothing to a file; a FIFO in its place is not waited for

    def _close(self, descriptor: int) -> None:
        os.close(descriptor)

    def _preadv(self, file: File, buffers: Buffers, offset: int) -> int:
        return os.preadv(file.descriptor, buffers, offset)

    def _pwritev(self, file: File, buffers: Buffers, offset: int) -> int:
        return os.pwritev(file.descriptor, buffers, offset)

    def _fdatasync(self, file: File) -> None:
        os.fdatasync(file.descriptor)
        if not os.fstat(file.descriptor).st_nlink:  # what was written goes with the descriptor
            raise OSError(errno.ENOENT, "the file was removed")

    def _size(self, file: File) -> int:
        return os.fstat(file.descriptor).st_size

    def _rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def _unlink(self, path: Path) -> None:
        path.unlink()

    def _truncate(self, path: Path, size_bytes: int) -> None:
        os.truncate(path, size_bytes)

    def _exists(self, path: Path) -> bool:
        return path.exists()

    def _make_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _list(self, path: Path) -> dict[str, int]:
        with os.scandir(path) as entries:
            return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries if entry.is_file()}

    def _place(self, path: Path) -> tuple[int, int]:
        found = path.stat()
        return found.st_dev, found.st_ino

    def _free_bytes(self, path: Path) -> int:
        return (found := os.statvfs(path)).f_bavail * found.f_frsize

    def _flock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @staticmethod
    def _move(call: Callable[[File, Buffers, int], int], file: File, offset: int, pieces: Sequence[Piece]) -> None:
        assert len(pieces) <= PIECES_PER_CALL_MAX, f"{len(pieces)} pieces in one call"
        assert not file.direct or all(not (address | size) % ALIGN_BYTES for address, size in pieces), "not aligned"
        rest = list(pieces)
        while rest:
            moved = call(file, [(ctypes.c_char * size).from_address(address) for address, size in rest], offset)
            if moved <= 0:
                raise CutShort(f"{file.path} at {offset}: the file ends here")
            offset += moved
            rest = _after(rest, moved)


def _after(pieces: Sequence[Piece], moved: int) -> list[Piece]:
    """What is left of the pieces when their first `moved` bytes are done."""
    for done, (address, size) in enumerate(pieces):
        if moved < size:
            return [(address + moved, size - moved), *pieces[done + 1 :]]
        moved -= size
    return []
