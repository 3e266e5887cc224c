"""A bare client of the session socket for tests: frames, descriptors and mappings, and no more sense than that."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import socket
from typing import Final

from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.contract_client import CallFailed

RECEIVE_BYTES: Final = 1 << 16
END_TIMEOUT_S: Final = 60.0


class ConnectionEnded(Exception):
    """The daemon closed the connection."""


class FramesClient:
    """One connection, used from one event loop. Maps what it is given and lets go of what it is asked to."""

    def __init__(self, path: str) -> None:
        self.staging: mmap.mmap | None = None
        self.page: mmap.mmap | None = None
        self.segments: dict[int, mmap.mmap] = {}
        self.retired: list[int] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._reader = frames.FrameReader()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[frames.Frame]] = {}
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect(path)
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    # ---- sending ----

    async def call(self, operation: int, body: bytes = b"") -> bytes:
        """The body of the reply. Raises CallFailed, or ConnectionEnded."""
        if self.ended.done():
            raise ConnectionEnded
        number = next(self._numbers)
        answer = self._answers[number] = self._loop.create_future()
        await self.send(frames.encode(operation, number, body))
        frame: frames.Frame = await answer
        if frame.flags & frames.ERROR:
            error = pb.Error.FromString(frame.body)
            raise CallFailed(error.code, error.message)
        assert frame.operation == operation, "a reply repeats its request's operation"
        return frame.body

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        await self._loop.sock_sendall(self._sock, data)

    # ---- receiving ----

    def _on_readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, RECEIVE_BYTES, frames.MAX_FDS_PER_FRAME)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._stop(ConnectionEnded())
            return
        for frame in self._reader.feed(data, fds):
            self._take(frame)

    def _take(self, frame: frames.Frame) -> None:
        if frame.flags & frames.REPLY:
            self._answers.pop(frame.request_id).set_result(frame)
        elif frame.operation == pb.OPERATION_SEGMENTS:
            self._map(pb.Segments.FromString(frame.body), frame.fds)
        else:
            assert frame.operation == pb.OPERATION_SEGMENTS_RETIRED
            self._let_go(list(pb.SegmentIds.FromString(frame.body).ids))

    def _map(self, message: pb.Segments, fds: tuple[int, ...]) -> None:
        for segment, fd in zip(message.segments, fds, strict=True):
            writable = message.staging or message.session_page
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapping = mmap.mmap(fd, segment.size_bytes, mmap.MAP_SHARED, protection)
            os.close(fd)
            if message.staging:
                self.staging = mapping
            elif message.session_page:
                self.page = mapping
            else:
                assert segment.id not in self.segments, "sent once"
                self.segments[segment.id] = mapping

    def _let_go(self, ids: list[int]) -> None:
        self.retired += ids
        for segment_id in ids:
            self.segments.pop(segment_id).close()
        body = pb.SegmentIds(ids=ids).SerializeToString()
        self._sock.send(frames.encode(pb.OPERATION_SEGMENTS_DROPPED, 0, body, frames.ONE_WAY))

    # ---- the end ----

    def _stop(self, error: Exception) -> None:
        if self.ended.done():
            return
        self.ended.set_result(None)
        self._loop.remove_reader(self._sock.fileno())
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._reader.close()
        for mapping in (*self.segments.values(), self.staging, self.page):
            if mapping is not None:
                mapping.close()
        self._sock.close()

    async def close(self) -> None:
        """Hang up, and wait until the daemon has hung up too: then it has given back all that this client held."""
        if not self.ended.done():
            self._sock.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(asyncio.shield(self.ended), END_TIMEOUT_S)
