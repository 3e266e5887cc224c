"""A keeper in memory: adoption tested in one process, as if the earlier one had been killed at any instant."""

from __future__ import annotations

import fcntl
import os
import threading

from kvstored.device.memory import Mapping


class MemoryKeeper:
    """A `Keeper` that holds duplicates. `room` limits how many; `log` has every call in order."""

    def __init__(self, room: int = 1 << 20) -> None:
        self.room = room
        self.held: dict[str, int] = {}
        self.log: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def inherited(self) -> dict[str, int]:
        """See `Keeper`: as a process finds them that is started next."""
        return {name: os.dup(fd) for name, fd in self.held.items()}

    def keep(self, name: str, fd: int) -> bool:
        """See `Keeper`."""
        with self._lock:
            self.log.append(("keep", name))
            if len(self.held) >= self.room:
                return False
            self.held[name] = os.dup(fd)
            return True

    def drop(self, name: str) -> None:
        """See `Keeper`."""
        with self._lock:
            self.log.append(("drop", name))
            fd = self.held.pop(name, -1)
        if fd >= 0:
            os.close(fd)

    def snapshot(self) -> MemoryKeeper:
        """A keeper of copies of all memory as it is now: what a kill at this instant leaves."""
        copy = MemoryKeeper(self.room)
        for name, fd in self.held.items():
            copy.held[name] = _copy_of(fd, name)
        return copy

    def close(self) -> None:
        """Let go of everything."""
        for name in list(self.held):
            self.drop(name)


def _copy_of(fd: int, name: str) -> int:
    """A memfd with the same seals and bytes; what was never touched stays so."""
    size = os.fstat(fd).st_size
    target = Mapping(size, name=name)
    at = 0
    while (at := _next_data(fd, at)) < size:
        end = os.lseek(fd, at, os.SEEK_HOLE)
        os.pwrite(target.fd, os.pread(fd, end - at, at), at)
        at = end
    copied = fcntl.fcntl(target.fd, fcntl.F_DUPFD_CLOEXEC)
    target.close()
    return copied


def _next_data(fd: int, at: int) -> int:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError:  # none is left
        return 1 << 62
