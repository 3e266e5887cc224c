"""Calls to one volume's device, and what happens when one does not come back.

A thread that is stuck in a system call cannot be ended. So a call that is late gives the volume
up: nothing new goes to the device, and who only asked for information gets an error at once. A
call that moves bytes to or from memory still ends with its thread and not before: until then the
memory is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from kvstored.clock import Clock
from kvstored.errors import DeviceError

T = TypeVar("T")


class Late(DeviceError):
    """A call has not come back in time, or was not begun because another has not."""


class _Work:
    """One call: when its thread began with it, and what asks whether it is late."""

    def __init__(self, calls: DeviceCalls, work: Callable[[], Any]) -> None:
        self._calls = calls
        self._work = work
        self.ended = False
        self.begun_s: float | None = None
        self.timer: asyncio.TimerHandle | None = None

    def run(self) -> Any:
        """In the thread."""
        if self._calls.given_up:
            raise Late("not begun: the device does not answer")
        self.begun_s = self._calls.clock.monotonic()
        return self._work()


class DeviceCalls:
    """The calls of one volume. `on_late` is told once, on the event loop, when one takes longer than `deadline_s`."""

    def __init__(self, deadline_s: float, clock: Clock, on_late: Callable[[Late], None]) -> None:
        self.clock = clock
        self.given_up = False
        self.running = 0  # calls whose thread has not come back
        self._deadline_s = deadline_s
        self._on_late = on_late
        self._asked: set[asyncio.Future[Any]] = set()

    async def call(self, where: Executor, work: Callable[..., T], *args: object, **kwargs: object) -> T:
        """Run `work` on a thread of that pool; returns when the thread has come back, however long that takes."""
        result: T = await asyncio.shield(self._start(where, partial(work, *args, **kwargs)))
        return result

    async def ask(self, where: Executor, work: Callable[..., T], *args: object, **kwargs: object) -> T:
        """The same for work that touches no memory of the caller's: raises Late as soon as the volume is given up."""
        if self.given_up:
            raise Late("the device does not answer")
        done = self._start(where, partial(work, *args, **kwargs))
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._asked.add(answer)
        done.add_done_callback(partial(_hand_on, answer))
        try:
            return await answer
        finally:
            self._asked.discard(answer)

    def give_up(self, late: Late) -> None:
        """Begin nothing more, and answer those who only asked."""
        self.given_up = True
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(late)

    def renew(self) -> None:
        """Take calls again, if every thread has come back after all."""
        self.given_up = self.given_up and self.running > 0

    def _start(self, where: Executor, work: Callable[[], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        item = _Work(self, work)
        future: asyncio.Future[Any] = loop.run_in_executor(where, item.run)
        self.running += 1
        if self._deadline_s:
            item.timer = loop.call_later(self._deadline_s, self._look, item)
        future.add_done_callback(partial(self._ended, item))
        return future

    def _ended(self, item: _Work, future: asyncio.Future[Any]) -> None:
        self.running -= 1
        item.ended = True
        if item.timer is not None:
            item.timer.cancel()
        if not future.cancelled():
            future.exception()  # somebody who left early does not want to know

    def _look(self, item: _Work) -> None:
        """The deadline may have passed; a call that waits for a thread is not late, the one before it may be."""
        if item.ended or self.given_up:
            return
        begun_s, now = item.begun_s, self.clock.monotonic()
        left_s = self._deadline_s if begun_s is None else begun_s + self._deadline_s - now
        if left_s > 0:
            item.timer = asyncio.get_running_loop().call_later(left_s, self._look, item)
            return
        late = Late(f"the device has not answered for {self._deadline_s:g} s")
        self.give_up(late)
        self._on_late(late)


def _hand_on(answer: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
    """Give an answer to whoever still waits for it."""
    if answer.done():
        return
    if done.cancelled():
        answer.cancel()
    elif (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())
