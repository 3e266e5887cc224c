"""Unix sockets to listen on, and the listener of the session socket."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstored.catalog.leases import Session
from kvstored.reporting.logs import get_logger
from kvstored.rpc.context import Context
from kvstored.rpc.peer import peer_credentials
from kvstored.rpc.session import Connection
from kvstored.store.release_times import Cause

BACKLOG: Final = 128
SOCKET_BUFFER_BYTES: Final = 1 << 20
LOOK_EVERY_S: Final = 1.0  # for clients that are gone while nothing is read from them
ACCEPT_RETRY_S: Final = 1.0  # after the system refused a descriptor: at once it would refuse again

_log = get_logger("session")


class SessionServer:
    """Listens on the session socket and knows its connections."""

    def __init__(self, context: Context, path: Path, mode: int) -> None:
        self.context = context
        self.path = path
        self.connections: set[Connection] = set()
        self.by_session: dict[Session, Connection] = {}
        self._mode = mode
        self._listener: socket.socket | None = None
        self._looking: asyncio.TimerHandle | None = None
        context.store.releases.on_corrupt = self._page_corrupt
        context.store.part_with = self.part_with

    def start(self) -> None:
        """Bind and listen. Raises OSError; a socket that nobody answers on any more is replaced."""
        self._listener = bind_unix(self.path, self._mode)
        self._accept_again()
        self._look()

    def _accept_again(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._on_client)

    def _on_client(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            _log.error("cannot take a client", reason=str(error))
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(ACCEPT_RETRY_S, self._accept_again)
            return
        self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        # Twice as many as sessions: those that have not opened one yet have their time-out.
        if len(self.connections) >= 2 * self.context.config.server.max_sessions and not self._make_way(sock):
            sock.close()
            return
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self.connections.add(Connection(self.context, sock, self._opened, self._gone))

    def _make_way(self, sock: socket.socket) -> bool:
        """Part with a client that has not opened a session, of the user who has most of them, unless it is this one.

        So one user's connections keep nobody else out, admins included.
        """
        waiting: defaultdict[int, list[tuple[float, Connection]]] = defaultdict(list)
        for connection in self.connections:
            if (since_s := connection.waited_since_s) is not None:
                waiting[connection.uid].append((since_s, connection))
        uid = peer_credentials(sock)[1]
        most = max(waiting, key=lambda one: len(waiting[one]), default=uid)
        if len(waiting[most]) <= len(waiting[uid]) + 1:
            return False
        min(waiting[most], key=lambda one: one[0])[1].close("it opened no session, and another user's client came")
        return True

    def _look(self) -> None:
        for connection in list(self.connections):
            connection.look()
        self._looking = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _opened(self, connection: Connection, session: Session) -> None:
        self.by_session[session] = connection

    def _gone(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if connection.session is not None:
            self.by_session.pop(connection.session, None)

    def retired(self, session: Session, segment_ids: Sequence[int]) -> bool:
        """Tell a session to let go of segments; False where it is not one of this socket's."""
        connection = self.by_session.get(session)
        if connection is not None:
            connection.send_retired(segment_ids)
        return connection is not None

    def part_with(self, session: Session, reason: str, cause: Cause) -> None:
        """End a session of any transport; where it is one of this socket's, its connection first."""
        connection = self.by_session.get(session)
        if connection is not None:
            connection.close(reason, cause)
        else:
            self.context.store.end_session(session, cause)

    def _page_corrupt(self, session: Session) -> None:
        _log.warning("a client's session page makes no sense", pid=session.caller.pid, client=session.caller.client)

    def stop_listening(self) -> None:
        """Take no new clients."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Part with every client."""
        self.stop_listening()
        if self._looking is not None:
            self._looking.cancel()
        for connection in list(self.connections):
            connection.close("the daemon stops", Cause.SHUTDOWN)


def bind_unix(path: Path, mode: int) -> socket.socket:
    """A listening Unix socket with exactly this mode. Raises OSError, see `clear_stale`."""
    clear_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        old = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(old)
        path.chmod(mode)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def clear_stale(path: Path) -> None:
    """Make way for a socket: its directory exists, and no socket that nobody answers on is left.

    Raises FileExistsError where another process serves on it or something else than a socket lies there, OSError
    where the directory cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        choose = "choose another place with server.session_socket and server.grpc_socket"
        raise OSError(f"cannot make the directory of the socket {path}: {error.strerror}: {choose}") from error
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise FileExistsError(f"{path} is not a socket: move it away, or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # its backlog is full: somebody serves
    raise FileExistsError(f"another process serves on {path}: stop it, or choose another path")
