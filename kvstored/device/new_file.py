"""A file that is made once and written from start to end. Mode 0600; it never opens what is there already."""

from __future__ import annotations

import os
from pathlib import Path

from kvstored.device.file import FileDevice, device_errors


class NewFile:
    """Every call blocks and raises DeviceError."""

    def __init__(self, path: Path) -> None:
        """Make the file, and its directory (0700) where there is none."""
        self.path = path
        self.size_bytes = 0
        FileDevice().make_directory(path.parent)
        with device_errors(f"making {path}"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(path, flags, 0o600)

    def write(self, data: bytes) -> None:
        """Add bytes; not synced."""
        rest = memoryview(data)
        with device_errors(f"writing {self.path}"):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        self.size_bytes += len(data)

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
