"""The session socket: frames and descriptors on a Unix stream, read and written by our own hand.

No asyncio transport: beside one, a raw `sendmsg` lands inside a half-written frame, and
descriptors that a transport receives vanish. One `Connection` per client; its end, however it
comes, ends the session and all that it held. The socket is closed before anything is given
back, so a client that still sees it open after a copy knows that its blocks did not move.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError, Message
from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.errors import InvalidArgument, KVStoredError, Unauthenticated
from kvstored.leases import Session
from kvstored.logs import get_logger
from kvstored.rpc.context import Context
from kvstored.rpc.errors import describe
from kvstored.rpc.operations import OPERATIONS, open_session

RECEIVE_BYTES: Final = 256 << 10
SOCKET_BUFFER_BYTES: Final = 1 << 20
HANDSHAKE_TIMEOUT_S: Final = 10.0
FRAMES_PER_TURN: Final = 64  # then the next client has its turn
_PEERCRED: Final = struct.Struct("3i")
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4 * frames.MAX_FDS_PER_FRAME)

_log = get_logger("session")


class Connection:
    """One client on the session socket."""

    def __init__(self, server: SessionServer, sock: socket.socket) -> None:
        self._server = server
        self._context = server.context
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._reader = frames.FrameReader()
        self._buffer = bytearray(RECEIVE_BYTES)
        self._backlog: deque[frames.Frame] = deque()
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._out_bytes = 0
        self._tasks: set[asyncio.Future[None]] = set()
        self._reading = self._writing = self._closed = self._opening = False
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        self.pid, self.uid, _gid = _PEERCRED.unpack(credentials)
        self.session: Session | None = None
        self._handshake = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._handshake_late)
        self._resume()

    # ---- receiving ----

    def _on_readable(self) -> None:
        try:
            size, ancillary, _flags, _ = self._sock.recvmsg_into(
                [self._buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size, ancillary = 0, []
        for _level, _type, data in ancillary:  # clients have no descriptors to send
            for fd in array.array("i", data[: len(data) - len(data) % 4]):
                os.close(fd)
        if not size:
            self.close("closed by the client")
            return
        try:
            self._backlog.extend(self._reader.feed(memoryview(self._buffer)[:size]))
        except frames.ProtocolError as error:
            self.close(f"broke the protocol: {error}")
            return
        self._work()

    def _work(self) -> None:
        """Serve what has arrived, as far as this client's limits allow."""
        for _ in range(FRAMES_PER_TURN):
            if not self._backlog or self._closed or self._at_limit():
                break
            self._serve(self._backlog.popleft())
        if self._closed:
            return
        if self._backlog and not self._at_limit():
            self._loop.call_soon(self._work)
        self._resume()

    def _at_limit(self) -> bool:
        limits = self._context.config.limits
        return len(self._tasks) >= limits.requests_in_flight or self._out_bytes >= limits.reply_queue_bytes

    def _resume(self) -> None:
        """Read on, unless the client must first take its replies or let its requests finish."""
        wanted = not self._closed and not self._backlog and not self._at_limit()
        if wanted and not self._reading:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)
        elif self._reading and not wanted:
            self._loop.remove_reader(self._sock.fileno())
        self._reading = wanted

    # ---- serving ----

    def _serve(self, frame: frames.Frame) -> None:
        started = time.perf_counter()
        try:
            reply = self._dispatch(frame)
        except Exception as error:  # one request's failure is one reply
            self._reply_error(frame, error)
            return
        if isinstance(reply, Message):
            self._finish(frame, reply, started)
            return
        task = asyncio.ensure_future(self._later(frame, reply, started))
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _dispatch(self, frame: frames.Frame) -> Message | Awaitable[Message]:
        if self.session is None:
            if self._opening:
                raise InvalidArgument("OPEN_SESSION is not answered yet: send nothing before")
            self._opening = True
            return self._open(frame)
        if frame.operation == pb.OPERATION_SEGMENTS_DROPPED:
            self._context.store.segments_dropped(self.session, list(pb.SegmentIds.FromString(frame.body).ids))
            return pb.KeepAliveReply(boot_id=self._context.boot_id)
        operation = OPERATIONS.get(frame.operation)
        if operation is None:
            raise InvalidArgument(f"operation {frame.operation} is not known to this daemon")
        try:
            request = operation.request.FromString(frame.body)
        except DecodeError:
            raise InvalidArgument(f"the body of {operation.name} is not its request message") from None
        return operation.serve(self._context, self.session, request)

    async def _open(self, frame: frames.Frame) -> Message:
        if frame.operation != pb.OPERATION_OPEN_SESSION:
            self._opening = False
            raise Unauthenticated("the first frame must be OPEN_SESSION")
        request = pb.OpenSessionRequest.FromString(frame.body)
        caller = self._context.identity.of_peer(self.uid, self.pid, request.token, request.client_name)
        session, reply = await open_session(self._context, caller, request)
        if self._closed:
            self._context.store.end_session(session)
            return reply
        self._handshake.cancel()
        self.session = session
        self._server.by_session[session] = self
        if session.staging is not None:
            self._send_segments([(0, session.staging.size_bytes, session.staging.read_write_fd())], staging=True)
        return reply

    async def _later(self, frame: frames.Frame, reply: Awaitable[Message], started: float) -> None:
        try:
            message = await reply
        except Exception as error:
            self._reply_error(frame, error)
        else:
            self._finish(frame, message, started)

    def _task_done(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not self._closed:
            self._work()

    def _finish(self, frame: frames.Frame, reply: Message, started: float) -> None:
        self._context.metrics.observe(_name(frame.operation), time.perf_counter() - started)
        if self._closed or frame.flags & frames.ONE_WAY:
            return
        if isinstance(reply, pb.GetReply):
            self._expose(reply)
        self._send(frames.encode(frame.operation, frame.request_id, reply.SerializeToString(), frames.REPLY))

    def _reply_error(self, frame: frames.Frame, error: BaseException) -> None:
        code, message = describe(error)
        if not isinstance(error, KVStoredError):
            _log.error("request failed", operation=frame.operation, exc_info=error)
        if not self._closed and not frame.flags & frames.ONE_WAY:
            body = pb.Error(code=code, message=message).SerializeToString()
            self._send(frames.encode(frame.operation, frame.request_id, body, frames.REPLY | frames.ERROR))

    # ---- descriptors ----

    def _expose(self, reply: pb.GetReply) -> None:
        """Send the descriptors of segments that this session does not have yet, before the reply that names them."""
        assert self.session is not None
        fresh = self._context.store.expose(self.session, [self.session.lease(x.lease_id) for x in reply.leases])
        for start in range(0, len(fresh), frames.MAX_FDS_PER_FRAME):
            self._send_segments(fresh[start : start + frames.MAX_FDS_PER_FRAME])

    def _send_segments(self, segments: Sequence[tuple[int, int, int]], *, staging: bool = False) -> None:
        listed = [pb.Segment(id=i, size_bytes=size) for i, size, _ in segments]
        body = pb.Segments(segments=listed, staging=staging).SerializeToString()
        # Duplicates: the segment may be closed before this client takes its frame.
        fds = tuple(os.dup(fd) for _, _, fd in segments)
        self._send(frames.encode(pb.OPERATION_SEGMENTS, 0, body, fd_count=len(fds)), fds)

    def send_retired(self, segment_ids: Sequence[int]) -> None:
        """Ask the client to let go of segments."""
        body = pb.SegmentIds(ids=segment_ids).SerializeToString()
        self._send(frames.encode(pb.OPERATION_SEGMENTS_RETIRED, 0, body))

    # ---- sending ----

    def _send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        self._out.append((memoryview(data), fds))
        self._out_bytes += len(data)
        if not self._writing:
            self._flush()

    def _flush(self) -> None:
        """Write what the socket takes; the rest goes when it takes more."""
        while self._out:
            data, fds = self._out[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self.close("gone")
                return
            for fd in fds:
                os.close(fd)
            self._out_bytes -= sent
            if sent < len(data):
                self._out[0] = (data[sent:], ())
            else:
                self._out.popleft()
        self._watch_writable(bool(self._out))

    def _watch_writable(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._sock.fileno())
        self._writing = wanted

    def _on_writable(self) -> None:
        self._flush()
        if not self._closed:
            self._work()

    # ---- the end ----

    def _handshake_late(self) -> None:
        self.close(f"did not open a session within {HANDSHAKE_TIMEOUT_S:.0f} s")

    def close(self, reason: str) -> None:
        """Close the socket, then give back all that the session held. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._handshake.cancel()
        self._resume()
        self._watch_writable(False)
        self._sock.close()
        for _, fds in self._out:
            for fd in fds:
                os.close(fd)
        self._out.clear()
        self._reader.close()
        self._backlog.clear()
        self._server.connections.discard(self)
        if self.session is not None:
            self._server.by_session.pop(self.session, None)
            self._context.store.end_session(self.session)
        _log.debug("client left", pid=self.pid, reason=reason)


class SessionServer:
    """Listens on the session socket."""

    def __init__(self, context: Context, path: Path, mode: int) -> None:
        self.context = context
        self.path = path
        self.connections: set[Connection] = set()
        self.by_session: dict[Session, Connection] = {}
        self._mode = mode
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Bind and listen. Raises OSError; a socket that nobody answers on any more is replaced."""
        listener = bind_unix(self.path, self._mode)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._on_client)

    def _on_client(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        if len(self.connections) >= 2 * self.context.config.server.max_sessions:
            sock.close()
            return
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        self.connections.add(Connection(self, sock))

    def retired(self, session: Session, segment_ids: Sequence[int]) -> bool:
        """Tell a session to let go of segments; False where it is not one of this socket's."""
        connection = self.by_session.get(session)
        if connection is not None:
            connection.send_retired(segment_ids)
        return connection is not None

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
        for connection in list(self.connections):
            connection.close("the daemon stops")


def bind_unix(path: Path, mode: int) -> socket.socket:
    """A listening Unix socket with exactly this mode. Raises OSError where another process answers on it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(str(path))
    except OSError:
        path.unlink(missing_ok=True)
    else:
        raise OSError(f"another process serves on {path}")
    finally:
        probe.close()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    old = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(old)
    path.chmod(mode)
    listener.listen(128)
    return listener


def _name(operation: int) -> str:
    known = OPERATIONS.get(operation)
    return known.name if known is not None else "OpenSession"
