"""One connection to the session socket: frames out, frames in, descriptors, pending requests.

Nothing here waits. The socket is non-blocking; whoever waits for a reply (threads in `waiting`,
the event loop in `aio`) calls `receive` when the socket is readable and `flush` when it is
writable. One-way messages go out from anywhere, finalizers included, so `post` and `flush` take
no lock that they would have to wait for.
"""

from __future__ import annotations

import array
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, Self

from google.protobuf.message import DecodeError, Message
from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client import dialing
from kvstored_client.errors import SHORTAGES, KVStoredClientError, Refused, Unavailable
from kvstored_client.holds import Hold
from kvstored_client.mapping import Segments
from kvstored_client.outbox import Outbox
from kvstored_client.session_page import SessionPage, open_page
from kvstored_client.staging import StagingRing
from kvstored_client.terms import Terms
from kvstored_client.tickets import Late, Ticket
from kvstored_client.tls import Tls

RECEIVE_BYTES: Final = 256 << 10
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(4 * frames.MAX_FDS_PER_FRAME)
_RECEIVE_FLAGS: Final = int(socket.MSG_CMSG_CLOEXEC)
_DESCRIPTORS_LOST: Final = int(socket.MSG_CTRUNC)  # a number: the enum's own operators take as long as a call

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


class Connection:
    """A session with the daemon; once it has failed it stays so, and a new one takes its place."""

    def __init__(self, sock: socket.socket) -> None:
        self.error: KVStoredClientError | None = None
        self.ended_at_s = 0.0  # when it was found to have failed
        self.staging: StagingRing | None = None
        self.page: SessionPage | None = None
        self.segments = Segments(self._segment_dropped)
        self.opened = pb.OpenSessionReply()
        self.holds: dict[int, Hold] = {}
        self.namespaces: dict[tuple[bytes, Terms], pb.OpenNamespaceReply] = {}
        self.frames_received = 0
        self.late_replies = 0
        self.staging_wipes = 0  # how often the daemon has made zeros of the ring, as it said last
        self.before_close: Callable[[], None] | None = None  # the event loop stops watching
        self.want_write: Callable[[], None] | None = None  # called when the socket takes no more for now
        self.carrier: dialing.Carrier | None = None  # of a session without shared memory: what carries it
        self._sock = sock
        self._reader = frames.FrameReader()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._pending: dict[int, Ticket] = {}
        self._abandoned: set[int] = set()
        self._ids = itertools.count(1)
        self._lock = threading.RLock()  # reentrant: a finalizer may fail the connection at any point
        self._outbox = Outbox(sock, self.fail)
        _connections.add(self)

    @classmethod
    def dial(cls, path: str, tls: Tls = Tls()) -> Self:  # noqa: B008 - frozen
        """Connect, without waiting. Raises Unavailable where nobody listens or the backlog is full."""
        sock, carrier = dialing.dial(path, tls)
        try:
            made = cls(sock)
        except BaseException:  # a loop that can watch no more sockets
            sock.close()
            raise
        made.carrier = carrier
        return made

    # ---- state ----

    def fileno(self) -> int:
        """The socket's descriptor; -1 when it is closed."""
        return self._sock.fileno()

    def alive(self) -> bool:
        """Whether the daemon still holds this session, as far as the socket knows this instant.

        The daemon closes it before it reuses anything that this session held: asked after a
        copy, this tells whether the bytes were the right ones to the end.
        """
        fd = self._sock.fileno()
        if self.error is not None or fd < 0:
            return False
        poll = select.poll()  # one of its own: a poll object is not for two threads
        poll.register(fd, select.POLLRDHUP)
        if poll.poll(0):
            self.fail(Unavailable(dialing.why_closed(self.carrier)))
        return self.error is None

    @property
    def unsent(self) -> bool:
        """Whether frames wait for the socket to take them."""
        return bool(self._outbox)

    @property
    def pending(self) -> int:
        """Requests without a reply yet, abandoned ones included."""
        return len(self._pending)

    # ---- sending ----

    def start(
        self, operation: int, request: Message, late: Late | None = None, settled: Callable[[], None] | None = None
    ) -> Ticket:
        """Send a request; see `Ticket` for the callbacks. Raises Unavailable on a connection that has failed."""
        ticket = Ticket(next(self._ids), late, settled)
        frame = frames.encode(operation, ticket.request_id, request.SerializeToString())
        self._pending[ticket.request_id] = ticket
        try:
            self._enqueue(frame)
        except BaseException:  # no memory, or Ctrl-C: nobody knows whether it goes
            self.fail(Unavailable("sending to the daemon: interrupted"))
            raise
        if self.error is not None:
            self._pending.pop(ticket.request_id, None)
            raise self.error
        return ticket

    def post(self, operation: int, request: Message) -> None:
        """Send a message that wants no reply. Never waits, never raises."""
        self.give(operation, request, ())

    def give(self, operation: int, message: Message, fds: tuple[int, ...]) -> None:
        """Send a message that wants no reply, and descriptors, which are given away. Never waits, never raises."""
        if self.error is not None:
            frames.close_all(fds)
            return
        try:
            body = message.SerializeToString()
            frame = frames.encode(operation, next(self._ids), body, frames.ONE_WAY, len(fds))
        except MemoryError:  # what it was to give back ends with the session
            frames.close_all(fds)
            self.fail(Unavailable("no memory for a message to the daemon"))
        else:
            self._enqueue(frame, fds)

    def _enqueue(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        if not self._outbox.put(frame, fds) and self.want_write is not None:
            self.want_write()

    def flush(self) -> bool:
        """Send what is left of earlier frames; see `Outbox.flush`."""
        return self._outbox.flush()

    # ---- receiving ----

    def receive(self) -> None:
        """Take what has arrived. Called by one thread at a time; failures end the connection."""
        size = len(self._buffer)
        try:
            while size == len(self._buffer) and self.error is None:
                size, ancillary, flags, _ = self._sock.recvmsg_into([self._buffer], _ANCILLARY_BYTES, _RECEIVE_FLAGS)
                self._take(size, ancillary, flags)
        except BlockingIOError:
            return
        except (*SHORTAGES, frames.ProtocolError, DecodeError) as error:
            self.fail(Unavailable(f"receiving from the daemon: {error or 'no memory'}"))
        except BaseException:  # Ctrl-C: nobody knows how much of what has arrived was taken
            self.fail(Unavailable("receiving from the daemon: interrupted"))
            raise

    def _take(self, size: int, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        fds = array.array("i")
        for _level, _kind, data in ancillary:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        arrived = self._reader.feed(self._buffer[:size], fds)
        if flags & _DESCRIPTORS_LOST:
            raise frames.ProtocolError("descriptors were lost: too many files are open in this process")
        for frame in arrived:
            self.frames_received += 1
            self._dispatch(frame)
        if not size:
            self.fail(Unavailable(dialing.why_closed(self.carrier)))

    def _dispatch(self, frame: frames.Frame) -> None:
        unasked = not frame.flags & frames.REPLY
        if unasked and frame.operation == pb.OPERATION_SEGMENTS:
            self._add_segments(frame)
            return
        frames.close_all(frame.fds)  # nobody asked for them; other messages may come from a newer daemon
        if not unasked:
            self._complete(frame)
        elif frame.operation == pb.OPERATION_SEGMENTS_RETIRED:
            self.segments.retire(pb.SegmentIds.FromString(frame.body).ids)

    def _add_segments(self, frame: frames.Frame) -> None:
        try:
            message = pb.Segments.FromString(frame.body)
            if len(message.segments) != len(frame.fds):
                raise frames.ProtocolError(f"{len(message.segments)} segments came with {len(frame.fds)} descriptors")
            if message.staging and (self.staging is not None or len(frame.fds) != 1):
                raise frames.ProtocolError("a session has one staging ring")
        except (DecodeError, frames.ProtocolError):
            frames.close_all(frame.fds)
            raise
        for segment, fd in zip(message.segments, frame.fds, strict=True):
            if message.staging:
                self.staging = StagingRing(fd, segment.size_bytes)
            elif message.session_page:
                self.page = open_page(fd, segment.size_bytes)
            else:
                self.segments.add(segment.id, fd, segment.size_bytes)

    def _complete(self, frame: frames.Frame) -> None:
        # Before its ticket is taken: an error that is none ends the connection, and with it all that is waited for.
        failure = pb.Error.FromString(frame.body) if frame.flags & frames.ERROR else None
        with self._lock:
            ticket = self._pending.pop(frame.request_id, None)
            if ticket is None:
                return
            abandoned = ticket.request_id in self._abandoned
            self._abandoned.discard(ticket.request_id)
            if failure is not None:
                ticket.error = Refused(failure.code, failure.message)
            ticket.body = frame.body
            ticket.done = True
        if ticket.settled is not None:
            ticket.settled()
        if abandoned:
            self.late_replies += 1
            self._undo(ticket)
        elif ticket.wake is not None:
            ticket.wake()

    def poke(self) -> None:
        """Take what has arrived, without waiting, where nobody else is about to."""

    def abandon(self, ticket: Ticket) -> None:
        """Nobody waits for this reply any more: what it gives is undone when it comes."""
        with self._lock:
            waiting = not ticket.done
            if waiting:
                self._abandoned.add(ticket.request_id)
        if not waiting:
            self._undo(ticket)

    def _undo(self, ticket: Ticket) -> None:
        try:
            ticket.undo()
        except DecodeError as error:  # then nobody knows what it gave: the end of the session takes it back
            self.fail(Unavailable(f"a late answer of the daemon: {error}"))

    # ---- the end ----

    def fail(self, error: KVStoredClientError) -> None:
        """End the connection: every request in flight fails with `error`. Safe to call twice."""
        with self._lock:
            if self.error is not None:
                return
            self.error, self.ended_at_s = error, time.monotonic()
            # `start` in another thread adds to these and, now that it sees the error, takes away.
            tickets = list(self._pending.values())
            self._pending.clear()
            for ticket in tickets:
                ticket.error, ticket.done = error, True
        if self.before_close is not None:
            self.before_close()
        try:  # wakes threads that wait on the socket; it is closed when none can be using its number
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        for ticket in tickets:
            if ticket.wake is not None:
                ticket.wake()
        self._outbox.clear()

    def close(self) -> None:
        """Give back the socket, the descriptors and the memory. Call it only when no thread waits on the socket."""
        self.fail(Unavailable("the client is closed"))
        self._sock.close()
        self._reader.close()
        self.segments.close()
        self.page = None
        if self.staging is not None:
            self.staging.close()

    def _segment_dropped(self, segment_id: int) -> None:
        self.post(pb.OPERATION_SEGMENTS_DROPPED, pb.SegmentIds(ids=[segment_id]))

    def forget(self) -> None:
        """In a forked child: drop the copy of the socket. The session stays the parent's, undisturbed."""
        self.error = Unavailable("this process was forked from the client's")
        self.before_close = self.want_write = None
        self._sock.close()  # no shutdown: that would reach the parent's
        self._pending.clear()
        self._outbox.clear()


def _forget_all() -> None:
    for connection in list(_connections):
        connection.forget()


os.register_at_fork(after_in_child=_forget_all)
