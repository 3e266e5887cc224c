"""A session over gRPC, for clients on other machines: the frames of the session socket, carried by gRPC calls.

A thread stands between: to the client it is a daemon at the other end of a socket, and every operation works as it is,
but for those on shared memory. Blocks go inside of messages instead (`inline`). The end of the channel, or of the
session in the daemon, closes the socket, so that the client connects again as it always does.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from google.protobuf.descriptor import ServiceDescriptor
from kvstored_proto import frames
from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client import threads
from kvstored_client.dialing import Carrier
from kvstored_client.errors import SHORTAGES, KVStoredClientError, Refused, Timeout, Unavailable
from kvstored_client.tls import Tls

KEEP_ALIVE_S: Final = 10.0  # sessions without calls end, by default after a minute
CALL_MAX_S: Final = 120.0  # the caller's own limit is shorter
CLOSE_MAX_S: Final = 1.0
_SESSION: Final = "kvstored-session-bin"
_UNIMPLEMENTED: Final = 12
_RECEIVE_BYTES: Final = 256 << 10


def _methods(service: ServiceDescriptor) -> dict[int, str]:
    """Path of each unary method by the number that frames have for it."""
    found = {}
    for method in service.methods:
        name = "OPERATION_" + re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).upper()
        if name in pb.Operation.keys():  # noqa: SIM118 - no dict
            found[pb.Operation.Value(name)] = f"/{service.full_name}/{method.name}"
    return found


_PATHS: Final = {
    **_methods(pb.DESCRIPTOR.services_by_name["KVStore"]),
    **_methods(admin_pb2.DESCRIPTOR.services_by_name["Admin"]),
}


class Bridge(Carrier):
    """One session. `ours` is the client's end of the socket."""

    def __init__(self, target: str, tls: Tls) -> None:
        """`target`: unix:PATH, or host:port, which is TCP with TLS and nothing else. Raises Unavailable."""
        import grpc

        self._grpc: Any = grpc
        credentials = None if target.startswith("unix:") else tls.credentials()
        try:
            self.ours, self._theirs = socket.socketpair()
        except OSError as error:
            raise Unavailable(f"connecting to {target}: {error.strerror or error}") from None
        self._metadata: tuple[tuple[str, bytes], ...] = ()
        self._sending = threading.Lock()
        self._channel: Any = None
        try:
            self.ours.setblocking(False)
            if credentials is None:
                self._channel = grpc.insecure_channel(target)
            else:
                self._channel = grpc.secure_channel(target, credentials)
            threads.start(self._run, "kvstored-grpc")
        except BaseException:
            self.ours.close()
            self._theirs.close()
            if self._channel is not None:
                self._channel.close()
            raise

    # ---- calls ----

    def _run(self) -> None:
        reader = frames.FrameReader()
        try:
            self._theirs.settimeout(KEEP_ALIVE_S)
            while True:
                try:
                    data = self._theirs.recv(_RECEIVE_BYTES)
                except TimeoutError:
                    self._call(frames.Frame(pb.OPERATION_KEEP_ALIVE, frames.ONE_WAY, 0, b""))
                    continue
                if not data:
                    break
                for frame in reader.feed(data):
                    self._call(frame)
        except (OSError, frames.ProtocolError):
            pass
        except Exception as error:  # gRPC has threads of its own, and may get none
            self.why = self.why or f"calling the daemon: {error or 'no memory'}"
        finally:
            self._lost()  # what a forked child has of the socket does not keep it open
            reader.close()
            self._end()
            self._theirs.close()

    def _call(self, frame: frames.Frame) -> None:
        path: str | None = _PATHS.get(frame.operation)
        if path is None:
            self._answer(frame, pb.Error(code=_UNIMPLEMENTED, message="there is no shared memory over gRPC"))
            return
        method: Any = self._channel.unary_unary(path)
        calling = method.future(frame.body, CALL_MAX_S, metadata=self._metadata)
        calling.add_done_callback(partial(self._done, frame))

    def _done(self, frame: frames.Frame, called: Any) -> None:
        """In a thread of gRPC's."""
        try:
            body = called.result()
        except Exception as error:
            failure = self.failure_of(error)
            opening = frame.operation == pb.OPERATION_OPEN_SESSION
            if isinstance(failure, Refused) and (opening or failure.code != self._unauthenticated):
                self._answer(frame, pb.Error(code=failure.code, message=failure.message))
            else:
                self.why = self.why or str(failure)
                self._lost()
            return
        if frame.operation == pb.OPERATION_OPEN_SESSION:
            self._metadata = ((_SESSION, pb.OpenSessionReply.FromString(body).session_id),)
        self._answer(frame, body)

    @property
    def _unauthenticated(self) -> int:
        return int(self._grpc.StatusCode.UNAUTHENTICATED.value[0])

    def _answer(self, frame: frames.Frame, body: bytes | pb.Error) -> None:
        if frame.flags & frames.ONE_WAY:
            return
        flags = frames.REPLY | (frames.ERROR if isinstance(body, pb.Error) else 0)
        data = body.SerializeToString() if isinstance(body, pb.Error) else body
        try:
            with self._sending:
                self._theirs.sendall(frames.encode(frame.operation, frame.request_id, data, flags))
        except SHORTAGES:  # the client is gone, or takes nothing: then a part of a frame may have gone
            self._lost()

    def _lost(self) -> None:
        try:
            self._theirs.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _end(self) -> None:
        if self._metadata:
            path = _PATHS[pb.OPERATION_CLOSE_SESSION]
            with contextlib.suppress(Exception):  # it ends by itself then
                close: Any = self._channel.unary_unary(path)
                close(b"", CLOSE_MAX_S, metadata=self._metadata)
        self._channel.close()

    # ---- blocks inside of messages ----

    def put(self, requests: Iterator[pb.PutInlineRequest], timeout_s: float) -> pb.PutInlineReply:
        """Send blocks. Raises KVStoredClientError."""
        method = self._channel.stream_unary(
            "/kvstored.v1.KVStore/PutInline", pb.PutInlineRequest.SerializeToString, pb.PutInlineReply.FromString
        )
        try:
            reply: pb.PutInlineReply = method(requests, timeout_s, metadata=self._metadata)
        except self._uncalled as error:
            raise self.failure_of(error) from None
        return reply

    def get(self, request: pb.GetInlineRequest, timeout_s: float) -> Iterator[pb.GetInlineReply]:
        """Receive blocks. Raises KVStoredClientError."""
        method = self._channel.unary_stream(
            "/kvstored.v1.KVStore/GetInline", pb.GetInlineRequest.SerializeToString, pb.GetInlineReply.FromString
        )
        try:
            replies = method(request, timeout_s, metadata=self._metadata)
        except self._uncalled as error:
            raise self.failure_of(error) from None
        try:
            yield from replies
        except self._grpc.RpcError as error:
            raise self.failure_of(error) from None
        finally:
            replies.cancel()

    @property
    def _uncalled(self) -> tuple[type[Exception], ...]:
        """What a call raises: its failure, or that there is no thread for it, or no channel after a close."""
        return (self._grpc.RpcError, RuntimeError, ValueError)

    def failure_of(self, error: Exception) -> KVStoredClientError:
        """What a failed call means."""
        if not isinstance(error, self._grpc.RpcError):
            return Unavailable(f"calling the daemon: {error}")
        code, text = error.code(), error.details() or ""
        if code in (self._grpc.StatusCode.UNAVAILABLE, self._grpc.StatusCode.CANCELLED):
            return Unavailable(text)
        if code == self._grpc.StatusCode.DEADLINE_EXCEEDED:
            return Timeout(text)
        return Refused(int(code.value[0]), text)
