"""Frames on their way out: sent at once where the socket takes them, queued where it does not."""

from __future__ import annotations

import array
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from kvstored_proto.frames import close_all

from kvstored_client.errors import SHORTAGES, KVStoredClientError, Unavailable

UNSENT_BYTES_MAX: Final = 8 << 20  # a daemon that reads nothing is as good as gone


class Outbox:
    """The sending half of a connection. Any thread may use it, finalizers included: nothing here waits for a lock."""

    def __init__(self, sock: socket.socket, fail: Callable[[KVStoredClientError], None]) -> None:
        """`fail` is told when the socket takes nothing any more."""
        self._sock = sock
        self._fail = fail
        self._frames: deque[tuple[memoryview, tuple[int, ...]]] = deque()  # and the descriptors that go beside each
        self._sending = threading.Lock()

    def __bool__(self) -> bool:
        """Whether something waits for the socket to take it."""
        return bool(self._frames)

    def put(self, frame: bytes, fds: tuple[int, ...] = ()) -> bool:
        """Send a frame, and descriptors, which are given away; False: not all of it has gone yet."""
        try:
            self._frames.append((memoryview(frame), fds))
        except MemoryError:
            close_all(fds)
            self._fail(Unavailable("no memory for a message to the daemon"))
            return True
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
        while self._frames:
            try:
                close_all(self._frames.popleft()[1])
            except IndexError:  # another thread has sent it
                return

    def _send_some(self) -> bool:
        frames = self._frames
        try:
            while frames:
                data, fds = frames[0]
                if fds:
                    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    sent = self._sock.sendmsg([data], beside, socket.MSG_NOSIGNAL)
                else:
                    sent = self._sock.send(data, socket.MSG_NOSIGNAL)
                frames[0] = (data[sent:], ())
                close_all(fds)  # they went with the first byte
                if sent == len(data):
                    frames.popleft()
        except BlockingIOError:
            if sum(len(data) for data, _ in tuple(frames)) > UNSENT_BYTES_MAX:
                self._fail(Unavailable("the daemon reads nothing"))
            return False
        except IndexError:  # cleared meanwhile: the connection has ended
            return True
        except SHORTAGES as error:
            self._fail(Unavailable(f"sending to the daemon: {getattr(error, 'strerror', None) or 'no memory'}"))
            return False
        except BaseException:  # Ctrl-C: nobody knows how much has gone
            self._fail(Unavailable("sending to the daemon: interrupted"))
            raise
        return True
