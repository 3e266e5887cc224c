"""The session socket: frames and descriptors on a Unix stream, read and written by our own hand.

No asyncio transport: beside one, a raw `sendmsg` lands inside a half-written frame, and
descriptors that a transport receives vanish. One `Connection` per client; its end, however it
comes, ends the session and all that it held. The socket is closed before anything is given
back, so a client that still sees it open after a copy knows that its blocks did not move.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from google.protobuf.message import Message
from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.leases import Session
from kvstored.device.outbox import Outbox
from kvstored.errors import (
    DeviceError,
    FailedPrecondition,
    InvalidArgument,
    KVStoredError,
    LimitExceeded,
    Unauthenticated,
)
from kvstored.reporting.logs import get_logger
from kvstored.rpc import acts
from kvstored.rpc.context import Context
from kvstored.rpc.errors import describe
from kvstored.rpc.named import NAMES, parsed
from kvstored.rpc.opening import open_session
from kvstored.rpc.operations import OPERATIONS
from kvstored.rpc.peer import peer_credentials, received
from kvstored.rpc.transferring import offer
from kvstored.store.release_times import Cause

RECEIVE_BYTES: Final = 256 << 10
HANDSHAKE_TIMEOUT_S: Final = 10.0
FRAMES_PER_TURN: Final = 64  # then the next client has its turn

# Served before the releases that their client has posted: what they answer is the same, and they answer sooner.
# Neither changes the eviction order; a get that evicts for what is below takes all releases itself.
_BEFORE_RELEASES: Final = frozenset({pb.OPERATION_GET, pb.OPERATION_LOOKUP})

_log = get_logger("session")


class Connection:
    """One client on the session socket."""

    def __init__(
        self,
        context: Context,
        sock: socket.socket,
        on_opened: Callable[[Connection, Session], None],
        on_gone: Callable[[Connection], None],
    ) -> None:
        self._context = context
        self._on_opened = on_opened
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._reader = frames.FrameReader()
        self._buffer = bytearray(RECEIVE_BYTES)
        self._backlog: deque[frames.Frame] = deque()
        self._outbox = Outbox(sock, self._work, lambda: self.close("gone"))
        self._tasks: set[asyncio.Future[None]] = set()
        self._owed: list[Callable[[], None]] = []  # to be done when the answer has gone: see `Session.after_answer`
        self._reading = self._closed = self._opening = self._hung_up = False
        self.pid, self.uid = peer_credentials(sock)
        self.session: Session | None = None
        self._handshake = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._handshake_late)
        self._resume()

    @property
    def waited_since_s(self) -> float | None:
        """Since when it has not said who it is (loop time); None: it did."""
        opened = self.session is not None or self._opening or self._closed
        return None if opened else self._handshake.when() - HANDSHAKE_TIMEOUT_S

    # ---- receiving ----

    def _on_readable(self) -> None:
        try:
            size, fds = received(self._sock, self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        if not size:
            frames.close_all(fds)
            self.close("closed by the client")
            return
        try:
            self._backlog.extend(self._reader.feed(memoryview(self._buffer)[:size], fds))
            self._reader.drop_stray()
        except frames.ProtocolError as error:
            self.close(f"broke the protocol: {error}", Cause.ERROR)
            return
        self._work()

    def _work(self) -> None:
        """Serve what has arrived, as far as this client's limits allow."""
        for _ in range(FRAMES_PER_TURN):
            if not self._backlog or self._closed or self._at_limit() or not self._released():
                break
            under_way = len(self._tasks)
            self._serve(self._backlog.popleft())
            if len(self._tasks) > under_way:
                break  # what takes longer begins, in its thread too, before the next frame is looked at
        if self._closed:
            return
        if self._backlog and not self._at_limit():
            self._loop.call_soon(self._work)
        self._resume()

    def _released(self) -> bool:
        """Whether all is released that the client posted before its next frame; many take several turns."""
        if self.session is None or self._backlog[0].operation in _BEFORE_RELEASES:
            return True
        return self._context.store.releases.take(self.session)

    def _at_limit(self) -> bool:
        limits = self._context.config.limits
        return len(self._tasks) >= limits.requests_in_flight or self._outbox.queued_bytes >= limits.reply_queue_bytes

    def _resume(self) -> None:
        """Read on, unless the client must first take its replies or let its requests finish."""
        wanted = not self._closed and not self._backlog and not self._at_limit()
        if wanted and not self._reading:
            self._loop.add_reader(self._sock.fileno(), self._on_readable)
        elif self._reading and not wanted:
            self._loop.remove_reader(self._sock.fileno())
        self._reading = wanted

    def look(self) -> None:
        """Part with a client that is gone while nothing is read from it; called now and then.

        Reading is paused while the client is at a limit, and then its end of file waits too. Twice
        in a row, so that what it sent before it went is read where it can be.
        """
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLRDHUP)
        gone = bool(poll.poll(0))
        if gone and self._hung_up:
            self.close("closed by the client")
        self._hung_up = gone

    # ---- serving ----

    def _serve(self, frame: frames.Frame) -> None:
        started = time.perf_counter()
        if frame.fds and (self.session is None or frame.operation != pb.OPERATION_OFFER_DESCRIPTORS):
            frames.close_all(frame.fds)  # nobody asked for them
        try:
            reply = self._dispatch(frame)
            if isinstance(reply, Message):
                self._finish(frame, reply, started)
                return
        except Exception as error:  # one request's failure is one reply
            self._reply_error(frame, error)
            return
        finally:
            self._settle()
        task = asyncio.ensure_future(self._later(frame, reply, started))
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _settle(self) -> None:
        """Do what is owed for an answer. Nothing else of the store may run between the two."""
        while self._owed:
            try:
                self._owed.pop(0)()
            except Exception as error:
                _log.error("cannot do what was answered", pid=self.pid, exc_info=error)
                self.close("was answered what could not be done", Cause.ERROR)

    def _dispatch(self, frame: frames.Frame) -> Message | Awaitable[Message]:
        session = self.session
        if session is None:
            return self._begin(frame)
        if frame.operation == pb.OPERATION_OPEN_SESSION:
            raise FailedPrecondition("a session is open on this connection: one connection has one session")
        if frame.operation == pb.OPERATION_SEGMENTS_DROPPED:
            self._context.store.segments_dropped(session, parsed(pb.SegmentIds, frame).ids)
            return pb.KeepAliveReply(boot_id=self._context.boot_id)
        if frame.operation == pb.OPERATION_OFFER_DESCRIPTORS:
            offer(self._context, session, frame)
            return pb.KeepAliveReply(boot_id=self._context.boot_id)
        if frame.operation == pb.OPERATION_CLOSE_SESSION:
            return pb.CloseSessionReply(boot_id=self._context.boot_id)  # the session ends after the reply
        operation = OPERATIONS.get(frame.operation)
        if operation is None:
            raise InvalidArgument(f"operation {frame.operation} is not known to this daemon")
        return operation.serve(self._context, session, parsed(operation.request, frame))

    async def _later(self, frame: frames.Frame, reply: Awaitable[Message], started: float) -> None:
        try:
            self._finish(frame, await reply, started)
        except Exception as error:
            self._reply_error(frame, error)

    def _task_done(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not self._closed:
            self._work()

    def _finish(self, frame: frames.Frame, reply: Message, started: float) -> None:
        took_s = time.perf_counter() - started
        if not self._closed and not frame.flags & frames.ONE_WAY:
            body = reply.SerializeToString()
            if len(body) > frames.MAX_BODY_BYTES:
                raise LimitExceeded(f"the answer has {len(body)} bytes, a frame {frames.MAX_BODY_BYTES}: ask for less")
            if isinstance(reply, pb.GetReply):
                self._expose(reply)
            self._outbox.send(frames.encode(frame.operation, frame.request_id, body, frames.REPLY))
        self._context.metrics.observe(NAMES[frame.operation], took_s)
        if frame.operation == pb.OPERATION_CLOSE_SESSION:
            self.close("closed its session", Cause.CLOSED)

    def _reply_error(self, frame: frames.Frame, error: BaseException) -> None:
        code, message = describe(error)
        if not isinstance(error, KVStoredError):
            _log.error("request failed", operation=frame.operation, exc_info=error)
        caller = self.session.caller if self.session is not None else None
        acts.refusal(self._context.audit, NAMES.get(frame.operation, "unknown"), f"uid {self.uid}", error, caller)
        if not self._closed and not frame.flags & frames.ONE_WAY:
            body = pb.Error(code=code, message=message).SerializeToString()
            self._outbox.send(frames.encode(frame.operation, frame.request_id, body, frames.REPLY | frames.ERROR))

    # ---- the beginning ----

    def _begin(self, frame: frames.Frame) -> Awaitable[Message]:
        if frame.operation != pb.OPERATION_OPEN_SESSION:
            raise Unauthenticated("the first frame must be OPEN_SESSION")
        if self._opening:
            raise FailedPrecondition("OPEN_SESSION is not answered yet: send nothing before")
        request = parsed(pb.OpenSessionRequest, frame)
        self._opening = True
        return self._open(request)

    async def _open(self, request: pb.OpenSessionRequest) -> Message:
        try:
            # From here to the session nothing else runs, so a change of tenants comes before or finds the session.
            caller = self._context.identity.of_peer(self.uid, self.pid, request.token, request.client_name)
            session, reply = await open_session(self._context, caller, request)
        finally:
            self._opening = False
        if self._closed:
            self._context.store.end_session(session, Cause.DISCONNECT)
            return reply
        self._handshake.cancel()
        self.session = session
        session.after_answer = self._owed.append
        self._on_opened(self, session)
        if session.staging is not None:
            self._send_segments([(0, session.staging.size_bytes, session.staging.read_write_fd())], staging=True)
        if session.page is not None and not self._closed:  # it may have left while it was sent its staging
            self._send_segments([(0, session.page.size_bytes, session.page.read_write_fd())], session_page=True)
        return reply

    def _handshake_late(self) -> None:
        self.close(f"did not open a session within {HANDSHAKE_TIMEOUT_S:.0f} s")

    # ---- descriptors ----

    def _expose(self, reply: pb.GetReply) -> None:
        """Send the descriptors of segments that this session does not have yet, before the reply that names them."""
        assert self.session is not None
        leases = [self.session.lease(lease.lease_id) for lease in reply.leases]
        try:
            fresh = self._context.store.expose(self.session, leases)
            for start in range(0, len(fresh), frames.MAX_FDS_PER_FRAME):
                self._send_segments(fresh[start : start + frames.MAX_FDS_PER_FRAME])
        except (OSError, DeviceError) as error:
            # Which of them arrived is not known any more: only a new session can put that right.
            _log.error("cannot hand out descriptors", pid=self.pid, reason=str(error))
            self.close("could not be sent descriptors", Cause.ERROR)

    def _send_segments(
        self, segments: Sequence[tuple[int, int, int]], *, staging: bool = False, session_page: bool = False
    ) -> None:
        listed = [pb.Segment(id=i, size_bytes=size) for i, size, _ in segments]
        body = pb.Segments(segments=listed, staging=staging, session_page=session_page).SerializeToString()
        # Duplicates: the segment may be closed before this client takes its frame.
        fds = tuple([os.dup(fd) for _, _, fd in segments])
        self._outbox.send(frames.encode(pb.OPERATION_SEGMENTS, 0, body, fd_count=len(fds)), fds)

    def send_retired(self, segment_ids: Sequence[int]) -> None:
        """Ask the client to let go of segments."""
        body = pb.SegmentIds(ids=segment_ids).SerializeToString()
        self._outbox.send(frames.encode(pb.OPERATION_SEGMENTS_RETIRED, 0, body))

    # ---- the end ----

    def close(self, reason: str, cause: Cause = Cause.DISCONNECT) -> None:
        """Close the socket, then give back all that the session held. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._settle()
        self._handshake.cancel()
        self._resume()
        self._outbox.close()
        self._sock.close()
        self._reader.close()
        while self._backlog:
            frames.close_all(self._backlog.popleft().fds)
        self._on_gone(self)
        if self.session is not None:
            self._context.store.end_session(self.session, cause)
        _log.debug("client left", pid=self.pid, reason=reason)
