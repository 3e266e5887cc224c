"""Frames on their way out: sent at once where the socket takes them, queued where it does not."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstored_client.errors import KVStoredClientError, Unavailable

UNSENT_BYTES_MAX: Final = 8 << 20  # a daemon that reads nothing is as good as gone


class Outbox:
    """The sending half of a connection. Any thread may use it, finalizers included: nothing here waits for a lock."""

    def __init__(self, sock: socket.socket, fail: Callable[[KVStoredClientError], None]) -> None:
        """`fail` is told when the socket takes nothing any more."""
        self._sock = sock
        self._fail = fail
        self._frames: deque[memoryview] = deque()
        self._sending = threading.Lock()

    def __bool__(self) -> bool:
        """Whether something waits for the socket to take it."""
        return bool(self._frames)

    def put(self, frame: bytes) -> bool:
        """Send a frame; False: not all of it has gone yet."""
        self._frames.append(memoryview(frame))
        return self.flush()

    def flush(self) -> bool:
        """Send what the socket takes now. False: some is left, or another thread is sending it."""
        while self._frames:
            # Whoever holds the lock looks at the queue again after letting go of it, so nothing stays behind.
            if not self._sending.acquire(blocking=False):
                return False
            try:
                if not self._send_some():
                    return False
            finally:
                self._sending.release()
        return True

    def clear(self) -> None:
        """Forget what is left: the connection has ended."""
        self._frames.clear()

    def _send_some(self) -> bool:
        frames = self._frames
        try:
            while frames:
                data = frames[0]
                sent = self._sock.send(data, socket.MSG_NOSIGNAL)
                if sent == len(data):
                    frames.popleft()
                else:
                    frames[0] = data[sent:]
        except BlockingIOError:
            if sum(map(len, tuple(frames))) > UNSENT_BYTES_MAX:
                self._fail(Unavailable("the daemon reads nothing"))
            return False
        except IndexError:  # cleared meanwhile: the connection has ended
            return True
        except OSError as error:
            self._fail(Unavailable(f"sending to the daemon: {error.strerror or error}"))
            return False
        return True
