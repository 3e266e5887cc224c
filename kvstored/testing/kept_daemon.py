"""A real daemon whose memory this process keeps, as a service manager does: kill it, and see what it still has."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from kvstored.descriptor_store import DescriptorStore
from kvstored.testing.daemon_process import DaemonProcess

# Descriptors must come as 3, 4, 5 and so on, with the process's own number beside them: exec keeps that.
_SHIM: Final = """
import fcntl, os, sys
given = [int(fd) for fd in os.environ.pop("KEPT_FDS").split()]
high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1 << 9) for fd in given]
for fd in given:
    os.close(fd)
for number, fd in enumerate(high, 3):
    os.dup2(fd, number)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class KeptDaemon(DaemonProcess):
    """A `DaemonProcess` that finds at each start what it left at the end before, however that came.

    `source`: a tree with the code of another version, to be started from now on; None: this one.
    """

    descriptors_max = 1100
    source: Path | None = None
    left_out_of_others: frozenset[str] = frozenset({"server.state_dir"})  # settings that the other version refuses

    def _spawn(self) -> None:
        assert self._process is None, "already started"
        keeper = self._keeper = getattr(self, "_keeper", None) or _Keeper(self.descriptors_max)
        held = keeper.held()
        command = [sys.executable, "-c", _SHIM, "-m", "kvstored", "serve"]
        for key, value in self._settings.items():
            if self.source is not None and key in self.left_out_of_others:
                continue
            command += ["--set", f"{key}={value}"]
        environ = {
            **os.environ,
            "NOTIFY_SOCKET": str(keeper.store.path),
            "FDSTORE": str(self.descriptors_max),
            "KEPT_FDS": " ".join(map(str, held.values())),
            "LISTEN_FDS": str(len(held)),
            "LISTEN_FDNAMES": ":".join(held),
        }
        if self.source is not None:
            environ["PYTHONPATH"] = os.pathsep.join(str(self.source / part) for part in (".", "client", "proto"))
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                cwd=self.source,
                pass_fds=tuple(held.values()),
            )
        keeper.pid = self._process.pid

    def wipe(self) -> None:
        """Remove its directory and let go of its memory."""
        super().wipe()
        keeper = getattr(self, "_keeper", None)
        if keeper is not None:
            keeper.close()

    def kept(self) -> list[str]:
        """The names of all that is kept now."""
        return list(self._keeper.held())


class _Keeper:
    """The store and the thread that serves it."""

    def __init__(self, descriptors_max: int) -> None:
        self.pid = -1
        self.store = DescriptorStore(descriptors_max, print)
        self._end, self._end_writer = os.pipe()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="descriptor keeper")
        self._thread.start()

    def held(self) -> dict[str, int]:
        with self._lock:
            return dict(self.store.held)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            selector.register(self.store.socket, selectors.EVENT_READ)
            while not any(key.fd == self._end for key, _ in selector.select()):
                with self._lock:
                    self.store.receive(self.pid)

    def close(self) -> None:
        os.close(self._end_writer)
        self._thread.join()
        os.close(self._end)
        self.store.close()
