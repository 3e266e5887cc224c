"""A service manager for tests: in a thread of this process, with this process as the one that it manages."""

from __future__ import annotations

import os
import selectors
import threading
from types import TracebackType
from typing import Self

from kvstored.descriptor_store import Assignments, DescriptorStore
from kvstored.device.service_manager import ServiceManager, from_environment


class FakeServiceManager:
    """Keeps descriptors, answers barriers and notes what it is told, inside `with`.

    `managed()` is what a process that it started finds; called again, what the next one finds:
    descriptors are handed out as duplicates, so that several lives can be had in one process.
    """

    def __init__(self, descriptors_max: int = 64, watchdog_s: float = 0.0) -> None:
        self.store = DescriptorStore(descriptors_max, self._note)
        self.complaints: list[str] = []
        self.told: list[Assignments] = []
        self._watchdog_s = watchdog_s
        self._something = threading.Condition()
        self._end, self._end_writer = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="service manager")

    def managed(self) -> ServiceManager:
        """The environment of a process that it starts, as that process takes it."""
        with self._something:
            held = dict(self.store.held)
        first_fd = _duplicate_in_a_row(list(held.values()))
        environ = {
            "NOTIFY_SOCKET": str(self.store.path),
            "FDSTORE": str(self.store.descriptors_max),
            "LISTEN_PID": str(os.getpid()),
            "LISTEN_FDS": str(len(held)),
            "LISTEN_FDNAMES": ":".join(held),
            "WATCHDOG_USEC": str(int(self._watchdog_s * 1_000_000)),
        }
        return from_environment(environ, first_fd)

    def wait_told(self, name: str, value: str | None = None, timeout_s: float = 60.0) -> str:
        """Wait until it was told `name` (with that value); returns the value. Raises TimeoutError."""

        def found() -> str | None:
            values = (said[name] for said in self.told if name in said)
            return next((given for given in values if value is None or given == value), None)

        with self._something:
            if self._something.wait_for(lambda: found() is not None, timeout_s):
                return found() or ""
        raise TimeoutError(f"not told {name}={value} within {timeout_s:g} s, but {self.told}")

    def _note(self, what: str) -> None:
        self.complaints.append(what)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            selector.register(self.store.socket, selectors.EVENT_READ)
            while not any(key.fd == self._end for key, _ in selector.select()):
                with self._something:
                    self.told += self.store.receive(os.getpid())
                    self._something.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._end_writer)
        self._thread.join()
        os.close(self._end)
        self.store.close()


def _duplicate_in_a_row(fds: list[int]) -> int:
    """Duplicates whose numbers follow each other, above all that are open; returns the first."""
    first = max(map(int, os.listdir("/proc/self/fd"))) + 64  # none that another thread opens meanwhile
    for number, fd in enumerate(fds, first):
        os.dup2(fd, number)
    return first
