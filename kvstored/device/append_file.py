"""A file of lines that only grows, up to a size; then it steps aside under a number and a fresh one begins.

Mode 0600, opened O_APPEND: whole lines of several writers never mix. Every call blocks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvstored.device.file import device_errors

TAIL_BYTES_MAX: Final = 1 << 20


class AppendFile:
    """`path`, and the `files - 1` before it as `path.1`, `path.2`, ... from the newest to the oldest."""

    def __init__(self, path: Path, *, file_bytes: int, files: int) -> None:
        self.path = path
        self._file_bytes = file_bytes
        self._files = files
        self._descriptor = -1

    def append(self, lines: Sequence[bytes]) -> None:
        """Add lines, each with its line feed, and sync them; all or, on a DeviceError, none."""
        data = b"".join(lines)
        with device_errors(f"writing {self.path}"):
            size_bytes = self._ready(len(data))
            try:
                self._write(data)
                os.fdatasync(self._descriptor)
            except OSError:
                with suppress(OSError):  # a broken line would spoil the next one
                    os.ftruncate(self._descriptor, size_bytes)
                self.close()
                raise

    def close(self) -> None:
        """Let go of the file; the next `append` opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def tail(self, count: int) -> list[bytes]:
        """The last lines, oldest first, without line feeds: `count` at most, out of the last MiB.

        Raises DeviceError. No file is no lines.
        """
        lines: list[bytes] = []
        left_bytes = TAIL_BYTES_MAX
        for number in range(self._files):
            data, whole = self._end_of(self._numbered(number), left_bytes)
            found = data.splitlines()
            lines = (found if whole else found[1:]) + lines
            left_bytes -= len(data)
            if len(lines) >= count or left_bytes <= 0:
                break
        return lines[-count:]

    def _end_of(self, path: Path, size_bytes: int) -> tuple[bytes, bool]:
        """Up to so many bytes of a file's end, and whether that is all of it."""
        with device_errors(f"reading {path}"):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                return b"", True
            try:
                start = max(0, os.fstat(descriptor).st_size - size_bytes)
                return os.pread(descriptor, size_bytes, start), not start
            finally:
                os.close(descriptor)

    def _ready(self, more_bytes: int) -> int:
        """Open the file, or a fresh one where it would grow too large; its size. Raises OSError."""
        if self._descriptor >= 0 and not self._still_there():  # moved away by somebody who rotates logs
            self.close()
        if fresh := self._descriptor < 0:
            self._open()
        size_bytes = os.fstat(self._descriptor).st_size
        if fresh and size_bytes and os.pread(self._descriptor, 1, size_bytes - 1) != b"\n":  # the end of who wrote it
            self._write(b"\n")
            size_bytes += 1
        if size_bytes and size_bytes + more_bytes > self._file_bytes:
            self.close()
            for number in reversed(range(self._files - 1)):
                with suppress(FileNotFoundError):
                    os.replace(self._numbered(number), self._numbered(number + 1))
            self._open()
            size_bytes = 0
        return size_bytes

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError("it is not a regular file")
        self._descriptor = descriptor

    def _still_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path
