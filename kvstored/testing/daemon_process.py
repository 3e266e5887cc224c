"""A real daemon as a child process, for tests and benches.

Everything it needs lies in one directory of its own, which goes when it stops for good. Ready
means that the session socket answers a status call with `serving`. Speaks to the daemon by
frames, so that what tests the client does not depend on it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvstored_proto.frames import ERROR, Frame, FrameReader, encode
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing import process_figures

_POLL_S: Final = 0.02
_LOG_TAIL_BYTES: Final = 4000
_DAEMON: Final = ("kvstored", "serve")
_SUPERVISOR: Final = ("kvstored.testing.patient_supervisor",)


class DaemonFailed(RuntimeError):
    """The daemon did not start, did not stop, or died; the text holds the end of its log."""


class DaemonProcess:
    """One daemon: start, stop, kill, restart on the same files, and what it costs.

    `settings` are `section.key` -> value as the command line takes them. `nvme` gives it one
    path of its own. `supervised`: under a supervisor, as `kvstored --supervise` starts it, which
    keeps the DRAM tier's memory over a crash and restarts it however often it dies. As a context
    manager it is started and, at the end, stopped and wiped.
    """

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        nvme: bool = False,
        supervised: bool = False,
        parent_directory: Path | None = None,
        ready_timeout_s: float = 60.0,
        stop_timeout_s: float = 60.0,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="kvstored-", dir=parent_directory)
        self.directory = Path(self._temporary.name)
        self.session_socket = self.directory / "session.sock"
        self.grpc_socket = self.directory / "grpc.sock"
        self.nvme_path = self.directory / "nvme"
        self.log_path = self.directory / "daemon.log"
        self._ready_timeout_s = ready_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._settings = {**self._own_settings(nvme), **(settings or {})}
        self._supervised = supervised
        # A supervisor that is killed cleans nothing up; a short path, for it makes a socket there.
        self._scratch = tempfile.TemporaryDirectory(prefix="kvstored-")
        self._process: subprocess.Popen[bytes] | None = None
        self._crashed_pid = 0

    # --- addresses -------------------------------------------------------------

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"unix:{self.session_socket}"

    @property
    def grpc_target(self) -> str:
        """What a gRPC channel connects to."""
        return f"unix:{self.grpc_socket}"

    @property
    def pid(self) -> int:
        """Process id of the running daemon; raises DaemonFailed where there is none."""
        pid = self._daemon_pid()
        if not pid:
            raise DaemonFailed("the daemon is not running")
        return pid

    # --- life ------------------------------------------------------------------

    def start(self) -> None:
        """Start it and wait until it serves; raises DaemonFailed."""
        self._spawn()
        self.wait_serving()

    def wait_serving(self) -> None:
        """Wait until it serves; raises DaemonFailed, and ends it, where it does not."""
        try:
            self._wait_ready(time.monotonic() + self._ready_timeout_s)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop it in order (SIGTERM); raises DaemonFailed where it does not end in time or fails."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            code = process.wait(self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise self._failed(f"not stopped within {self._stop_timeout_s:g} s") from None
        if code not in (0, -15):
            raise self._failed(f"exit status {code}")

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        pid = self._daemon_pid()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._await(lambda: not pid or process_figures.ended(pid), "the daemon does not end with its supervisor")

    def crash(self, *, memory_too: bool = False) -> None:
        """End the daemon at once (SIGKILL), whatever it is doing; it starts again by itself (`wait_serving`).

        After another crash it waits for the next daemon, which is killed at whatever point of its start.
        `memory_too`: its supervisor ends with it, and with that the DRAM tier's memory.
        """
        if memory_too or not self._supervised:
            self.kill()
            self._spawn()
            return
        pid = 0

        def found() -> bool:
            nonlocal pid  # of one look: by the next it may have ended by itself
            pid = self._daemon_pid()
            return pid not in (0, self._crashed_pid)

        self._await(found, "no daemon is started again")
        self._crashed_pid = pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        """Stop in order, then start on the same files."""
        self.stop()
        self.start()

    def wipe(self) -> None:
        """Remove its directory."""
        self._temporary.cleanup()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.wipe()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.stop()
            else:
                self.kill()  # the first error is the one to show
        finally:
            self.wipe()

    # --- what it costs -----------------------------------------------------------

    def cpu_s(self) -> float:
        """CPU seconds used so far by the daemon and its children."""
        return process_figures.cpu_s(self.pid)

    def written_bytes(self) -> int:
        """Bytes it has caused to be written to storage so far."""
        return process_figures.written_bytes(self.pid)

    def private_bytes(self) -> int:
        """Its resident memory without tier, staging and session pages."""
        return process_figures.private_bytes(self.pid)

    def shared_bytes(self) -> int:
        """Tier, staging and session pages, as far as they are resident."""
        return process_figures.shared_bytes(self.pid)

    def descriptors(self) -> list[str]:
        """What each open descriptor points to."""
        return process_figures.descriptors(self.pid)

    def log_tail(self) -> str:
        """The end of its log."""
        text = self.log_path.read_bytes() if self.log_path.exists() else b""
        return text[-_LOG_TAIL_BYTES:].decode(errors="replace")

    # --- inside ------------------------------------------------------------------

    def _own_settings(self, nvme: bool) -> dict[str, str]:
        own = {
            "server.session_socket": str(self.session_socket),
            "server.grpc_socket": str(self.grpc_socket),
            "server.state_dir": str(self.directory / "state"),
            "metrics.enabled": "false",
            "nvme.paths": json.dumps([str(self.nvme_path)] if nvme else []),
        }
        if nvme:
            own["nvme.io_deadline_s"] = "60"  # a disk that others use too is slow, and is none that hangs
            self.nvme_path.mkdir()
        return own

    def _spawn(self) -> None:
        assert self._process is None, "already started"
        command = [sys.executable, "-m", *(_SUPERVISOR if self._supervised else _DAEMON)]
        for key, value in self._settings.items():
            command += ["--set", f"{key}={value}"]
        with self.log_path.open("ab") as log:
            environ = {**os.environ, "TMPDIR": self._scratch.name}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ)

    def _wait_ready(self, deadline: float) -> None:
        assert self._process is not None
        while not self._serving():
            code = self._process.poll()
            if code is not None:
                raise self._failed(f"exit status {code} before it served")
            if time.monotonic() > deadline:
                raise self._failed(f"not serving within {self._ready_timeout_s:g} s")
            time.sleep(_POLL_S)

    def _serving(self) -> bool:
        try:
            reply = status(self.session_socket, timeout_s=5.0)
            return reply.state == "serving" and reply.pid != self._crashed_pid
        except OSError:
            return False

    def _daemon_pid(self) -> int:
        """The daemon's process id, or 0 where none runs."""
        if self._process is None:
            return 0
        if not self._supervised:
            return self._process.pid
        # Beside it there may be, for a moment, what a daemon that died has left behind.
        return next(filter(_is_daemon, process_figures.children(self._process.pid)), 0)

    def _await(self, happened: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + self._ready_timeout_s
        while not happened():
            if time.monotonic() > deadline:
                raise self._failed(otherwise)
            time.sleep(0.001)

    def _failed(self, what: str) -> DaemonFailed:
        return DaemonFailed(f"kvstored: {what}; the end of its log:\n{self.log_tail()}")


def _is_daemon(pid: int) -> bool:
    return "serve" in process_figures.arguments(pid) and not process_figures.ended(pid)


def status(session_socket: Path, timeout_s: float = 60.0) -> pb.StatusReply:
    """One status call over a connection of its own; raises OSError where nobody answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(session_socket))
        opening = pb.OpenSessionRequest(protocol_min=1, protocol_max=1, client_name="probe")
        _call(connection, pb.OPERATION_OPEN_SESSION, opening.SerializeToString())
        return pb.StatusReply.FromString(_call(connection, pb.OPERATION_STATUS, b"").body)


def _call(connection: socket.socket, operation: int, body: bytes) -> Frame:
    connection.sendall(encode(operation, operation, body))
    reader = FrameReader()
    try:
        while data := connection.recv(1 << 16):
            for frame in reader.feed(data):
                if frame.flags & ERROR:
                    raise ConnectionError(pb.Error.FromString(frame.body).message)
                if frame.request_id == operation:
                    return frame
    finally:
        reader.close()
    raise ConnectionError("the daemon closed the session without an answer")
