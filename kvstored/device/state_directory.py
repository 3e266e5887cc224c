"""The directory of what an admin changed at run time and of what is on record: one daemon's alone.

Made when something is first written there, so that a daemon that was never changed leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import Final

from kvstored.device.file import FileDevice, device_errors
from kvstored.errors import ConfigError

LOCK: Final = "state.lock"


class StateDirectory:
    """A directory that is locked from the first `take` to `close`. May be used by several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._device = FileDevice()
        self._lock = -1
        self._mutex = threading.Lock()

    def take(self) -> None:
        """Make the directory and keep others from it; nothing where that is done.

        Raises ConfigError where another process has it, DeviceError where it cannot be made or locked.
        """
        with self._mutex:
            if self._lock >= 0:
                return
            self._device.make_directory(self.path)
            with device_errors(f"locking {self.path / LOCK}"):
                # Not the directory itself: it may be a volume of NVMe too, which locks it.
                lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock)
                    raise ConfigError(
                        f"server.state_dir: {self.path} is in use by another kvstored: each needs its own directory"
                    ) from None
                except OSError:
                    os.close(lock)
                    raise
            self._lock = lock

    def read(self, name: str) -> bytes | None:
        """A small file, or None where there is none; raises DeviceError."""
        return self._device.read_whole(self.path / name)

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file durably and in one step; raises ConfigError or DeviceError."""
        self.take()
        self._device.replace(self.path / name, data)

    def close(self) -> None:
        """Let others have it."""
        with self._mutex:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1
