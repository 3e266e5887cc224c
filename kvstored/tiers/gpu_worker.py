"""One device worker, as the daemon sees it: a child process, its connection, and what it owes an answer to.

A worker that ends, is silent while it owes something, or cannot close what it must is killed and
reaped. Only then are its transfers said to be over: until then they may touch memory.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Final

from kvstored_proto import frames

from kvstored.device import worker_messages as messages
from kvstored.device.outbox import Outbox
from kvstored.tiers.stop import Stop

RECEIVE_BYTES: Final = 256 << 10
LOOK_EVERY_S: Final = 0.25
START_MAX_S: Final = 30.0  # drivers take their time where there are many devices
GONE: Final = "the device worker ended"


class GpuWorker:
    """A worker that was started. `hello` is its first word; after `gone` it is of no use any more."""

    def __init__(self, uuid: bytes, silence_max_s: float) -> None:
        """`silence_max_s`: so long it may be silent while it owes an answer."""
        self.uuid = uuid
        self.hello: asyncio.Future[messages.Hello] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.pid = 0  # of the process, once there is one
        self.why = ""  # it was killed
        self.transfers = 0  # that went well
        self.pinned_bytes = 0
        self.pins_ahead_bytes = 0  # so much is to be pinned before it is needed; 0: nothing is
        self.why_not_pinned = ""
        self.sent_segments: set[int] = set()
        self.registered: set[int] = set()
        self._silence_max_s = silence_max_s
        self._heard_s = time.monotonic()
        self._owed: dict[tuple[type, int], list[asyncio.Future[str]]] = {}  # one for each who waits
        self._copied: dict[int, Callable[[int], None]] = {}  # by transfer
        self._tasks: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._reader = frames.FrameReader(messages.MESSAGE_BYTES_MAX)
        self._buffer = bytearray(RECEIVE_BYTES)
        self._ending = False

    async def start(self, note: Callable[[], Awaitable[None]]) -> None:
        """Start the process; `note` writes it down before it is given anything. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            arguments = [str(theirs.fileno()), self.uuid.hex(), str(self._silence_max_s)]
            command = [sys.executable, "-m", "kvstored.device.worker", *arguments]
            self._process = await asyncio.to_thread(
                subprocess.Popen, command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        try:
            await note()
        except BaseException:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            ours.close()
            raise
        ours.setblocking(False)
        self._sock = ours
        self._outbox = Outbox(ours, lambda: None, lambda: self.kill("its connection broke"))
        self._heard_s = time.monotonic()
        self._loop.add_reader(ours.fileno(), self._on_readable)
        self._looking = self._loop.call_later(LOOK_EVERY_S, self._look)

    @property
    def alive(self) -> bool:
        """Whether it can be asked for something."""
        return not self._ending

    def said_pinned(self) -> str:
        """For status: how much of the tier's memory copies run from and to by themselves."""
        ahead = f" of {self.pins_ahead_bytes}" if self.pins_ahead_bytes else ""
        why = f" (not pinned ahead: {self.why_not_pinned})" if self.why_not_pinned else ""
        return f"{self.pinned_bytes}{ahead} bytes pinned{why}"

    # ---- asking ----

    def owes(self, answer: type, number: int) -> bool:
        """Whether it was asked for this, and has not answered yet."""
        return (answer, number) in self._owed

    def send(self, message: messages.ToWorker, fds: tuple[int, ...] = ()) -> None:
        """Say something; the descriptors are given away. Nothing happens where it is gone."""
        if self._ending:
            frames.close_all(fds)
            return
        frame = frames.encode(messages.OPERATION, 0, messages.encode(message), fd_count=len(fds))
        self._outbox.send(frame, fds)

    async def ask(
        self,
        message: messages.ToWorker,
        answer: type,
        number: int,
        copied: Callable[[int], None] | None = None,
        stop: Stop | None = None,
    ) -> str:
        """Say something and wait for its answer: the error in it, empty for none; GONE where the worker is.

        In any case it is over then. A caller that is cancelled does not end it. Who asks what is asked already waits
        for the same answer. `copied` is called with what a transfer tells before its answer; `stop` ends
        a transfer early, with the pieces that are under way.
        """
        if self._ending:
            await self.gone.wait()
            return GONE
        owed: asyncio.Future[str] = self._loop.create_future()
        asked = self._owed.get((answer, number))
        if asked is not None:
            asked.append(owed)
            return await owed
        if not self._owed:
            self._heard_s = time.monotonic()
        self._owed[answer, number] = [owed]
        if copied is not None:
            self._copied[number] = copied
        self.send(message)
        forget = stop.then(lambda: self.send(messages.Cancel(number))) if stop is not None else None
        try:
            return await owed
        finally:
            if forget is not None:
                forget()

    # ---- hearing ----

    def _on_readable(self) -> None:
        try:
            size = self._sock.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0
        if not size:
            self.kill("it ended by itself")
            return
        self._heard_s = time.monotonic()
        for frame in self._reader.feed(memoryview(self._buffer)[:size]):
            self._hear(messages.to_daemon.decode(frame.body))

    def _hear(self, message: messages.ToDaemon) -> None:
        if isinstance(message, messages.Hello):
            self.hello.set_result(message)
        elif isinstance(message, messages.Progress):
            self.pinned_bytes = message.pinned_bytes
        elif isinstance(message, messages.Copied):
            if (copied := self._copied.get(message.transfer)) is not None:
                copied(message.done)
        elif isinstance(message, messages.Done):
            self._copied.pop(message.transfer, None)
            self._answered(messages.Done, message.transfer, message.error)
        elif isinstance(message, messages.Registered):
            if not message.error:
                self.registered.add(message.registration)
            self._answered(messages.Registered, message.registration, message.error)
        elif isinstance(message, messages.Unregistered):
            self.registered.discard(message.registration)
            self._answered(messages.Unregistered, message.registration, "")
        elif isinstance(message, messages.Pinned):
            self._answered(messages.Pinned, message.segment_id, message.error)
        else:
            self.sent_segments.discard(message.segment_id)
            self._answered(messages.Dropped, message.segment_id, "")

    def _answered(self, kind: type, number: int, error: str) -> None:
        for owed in self._owed.pop((kind, number), ()):
            if not owed.done():  # who waited was cancelled
                owed.set_result(error)

    def _look(self) -> None:
        self._looking = self._loop.call_later(LOOK_EVERY_S, self._look)
        started = self.hello.done()
        limit_s = self._silence_max_s if started else max(START_MAX_S, self._silence_max_s)
        if (self._owed or not started) and time.monotonic() > self._heard_s + limit_s:
            self.kill(f"it was silent for {limit_s:g} s")

    # ---- the end ----

    def kill(self, why: str) -> None:
        """End the process, and all that it does, now. Safe to call twice."""
        if self._ending:
            return
        self._ending = True
        self.why = why
        self._looking.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._outbox.close()
        self._process.kill()
        task = asyncio.ensure_future(self._reap())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reap(self) -> None:
        await asyncio.to_thread(self._process.wait)
        self._sock.close()
        self._reader.close()
        if not self.hello.done():
            self.hello.set_result(messages.Hello(f"{GONE}: {self.why}", []))
        for kind, number in list(self._owed):
            self._answered(kind, number, GONE)
        self._copied.clear()
        self.gone.set()
