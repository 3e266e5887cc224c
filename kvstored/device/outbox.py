"""What is on its way to the other end of a Unix socket: frames and the descriptors beside them."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Outbox:
    """A queue before a non-blocking socket. Owns the descriptors in it until the kernel has taken them.

    `on_progress` is called when a waiting client took something, `on_gone` when it cannot take any more.
    """

    def __init__(self, sock: socket.socket, on_progress: Callable[[], None], on_gone: Callable[[], None]) -> None:
        self._sock = sock
        self._on_progress = on_progress
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._waiting = self._closed = False
        self.queued_bytes = 0

    def send(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send a frame, at once where the socket takes it."""
        if self._closed:
            _close_all(fds)
            return
        self._queue.append((memoryview(frame), fds))
        self.queued_bytes += len(frame)
        if not self._waiting:
            self._flush()

    def _flush(self) -> None:
        while self._queue:
            data, fds = self._queue[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], ancillary, _FLAGS)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._on_gone()
                return
            _close_all(fds)  # they went with the first byte
            self.queued_bytes -= sent
            if sent < len(data):
                self._queue[0] = (data[sent:], ())
            else:
                self._queue.popleft()
        self._wait(bool(self._queue))

    def _wait(self, wanted: bool) -> None:
        if wanted and not self._waiting:
            self._loop.add_writer(self._sock.fileno(), self._on_writable)
        elif self._waiting and not wanted:
            self._loop.remove_writer(self._sock.fileno())
        self._waiting = wanted

    def _on_writable(self) -> None:
        self._flush()
        if not self._closed:
            self._on_progress()

    def close(self) -> None:
        """Drop what is queued; to be called before the socket is closed."""
        self._closed = True
        self._wait(False)
        while self._queue:
            _close_all(self._queue.popleft()[1])


def _close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
