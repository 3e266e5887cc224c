"""Virtual time: an event loop that never waits, its clock, and threads that are none.

Nothing here reads the machine's clock or starts a thread. When no callback is ready the loop's
time jumps to the next timer; calls for threads run on the loop's own thread, at a virtual time drawn from the
seed, one at a time. So the same seed gives the same order of everything, and an hour takes seconds.

A wait for something that can never come is found at once: nothing is ready, no timer is set, and the
loop raises `NothingToDo`; what goes round and round at one moment is found, too (`GoesRound`).

Two more things that differ from process to process are taken away. A set has the order of its members' hashes, and
objects are hashed by their address: so tasks and futures of the loop, which `asyncio.wait` hands out in sets, are
hashed by a number. (Other objects are not: whoever goes through a set of them in code that is simulated takes a
dict instead.) And what asks the operating system for random bytes is given some that are drawn (`drawn_bytes`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from itertools import count
from typing import Any, Final, TypeVar

T = TypeVar("T")
START_S: Final = 1000.0
WALL_START_S: Final = 1.7e9
TURNS_MAX: Final = 100_000  # of the loop at one moment
EARLY_SHARE: Final = 0.3  # of the calls do their work well before anybody learns of it


class Crash(KeyboardInterrupt):
    """The process ends here and now: no code of it runs any more. (asyncio lets this kind of exception through.)"""


class NothingToDo(RuntimeError):
    """Everything waits and nothing will ever come: a deadlock."""


class GoesRound(RuntimeError):
    """So much happens at one moment that it will hardly end: in real time the loop would be kept busy."""


class NumberedFuture(asyncio.Future[T]):
    """A future of a virtual loop: the order of a set of them is the same in every process."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class NumberedTask(asyncio.Task[T]):
    """The same of a task."""

    def __init__(self, loop: VirtualLoop, work: Coroutine[Any, Any, T], context: Context | None) -> None:
        self.number = loop.next_number()  # first: a task is hashed while it is made
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.number


class _Jumps(selectors.SelectSelector):
    """Turns a wait into a jump of the loop's time. There are no files: nothing is ever ready."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self._turns = 0  # since time passed

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Nothing, after `timeout` seconds of virtual time."""
        if timeout is None:
            raise NothingToDo("nothing is ready, no timer is set: what runs waits for what never comes")
        self._turns = 0 if timeout > 0 else self._turns + 1
        if self._turns > TURNS_MAX:
            raise GoesRound(f"{TURNS_MAX} turns of the loop, and no time has passed")
        self._loop.advance(timeout)
        return []


class Delays:
    """How long calls on virtual threads take: mostly about `mean_s`, some `slow_s` and more."""

    def __init__(self, seed: int = 0, *, mean_s: float = 0.001, slow_share: float = 0.0, slow_s: float = 5.0) -> None:
        self.random = random.Random(seed)
        self.mean_s = mean_s
        self.slow_share = slow_share
        self.slow_s = slow_s
        self.slow_calls = 0

    def draw(self) -> float:
        """Seconds of one call."""
        if self.slow_share and self.random.random() < self.slow_share:
            self.slow_calls += 1
            return self.slow_s * (1.0 + self.random.random())
        return 2 * self.mean_s * self.random.random()

    def early(self) -> bool:
        """Whether a call does its work at its beginning."""
        return self.random.random() < EARLY_SHARE


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. Every `run_in_executor` comes to a virtual thread, whatever the executor."""

    def __init__(self, delays: Delays | None = None, *, start_s: float = START_S) -> None:
        self._now = start_s
        self.delays = delays or Delays()
        self.in_thread = False  # whether what runs now is meant to be on a thread
        self.next_number = count().__next__  # of tasks and futures
        super().__init__(_Jumps(self))
        self.set_task_factory(_numbered)
        self._anywhere = VirtualPool(self, threads=1 << 30)

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let virtual time pass."""
        assert seconds >= 0, "time does not go back"
        self._now += seconds

    def create_future(self) -> asyncio.Future[Any]:
        """See `AbstractEventLoop.create_future`."""
        return NumberedFuture(self)

    def run_in_executor(  # type: ignore[override]  # typeshed has it as a coroutine's result
        self, executor: concurrent.futures.Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """See `AbstractEventLoop.run_in_executor`; pools that are not virtual count as one without a limit."""
        pool = executor if isinstance(executor, VirtualPool) else self._anywhere
        return pool.run(func, *args)

    def pool(self, threads: int, name: str = "", *, gives_way: bool = False) -> VirtualPool:
        """A pool of virtual threads; fits `kvstored.tiers.threads.MakePool`."""
        return VirtualPool(self, threads)

    def _write_to_self(self) -> None:
        """Nobody sleeps in a system call that would have to be woken."""


class VirtualClock:
    """The `Clock` of a virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        """The loop's time."""
        return self._loop.time()

    def wall(self) -> float:
        """The same, from another start."""
        return WALL_START_S + self._loop.time()


class VirtualPool(concurrent.futures.Executor):
    """So many virtual threads. What waits for one can be cancelled; what runs goes on, whoever has lost interest."""

    def __init__(self, loop: VirtualLoop, threads: int) -> None:
        self._loop = loop
        self._threads = threads
        self._busy = 0
        self._ended = False
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def run(self, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Have a call made; its result, later."""
        if self._ended:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((future, func, args))
        self._start()
        return future

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """See `Executor.submit`."""
        given: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.run(lambda: fn(*args, **kwargs)).add_done_callback(lambda done: _copy_outcome(done, given))
        return given

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; those that were taken are made all the same."""
        self._ended = True

    def _start(self) -> None:
        while self._waiting and self._busy < self._threads:
            future, func, args = self._waiting.popleft()
            if future.cancelled():
                continue
            self._busy += 1
            delays = self._loop.delays
            seconds = delays.draw()
            if delays.early():
                begin_s = seconds * delays.random.random()
                self._loop.call_later(begin_s, self._work, future, func, args, seconds - begin_s)
            else:
                self._loop.call_later(seconds, self._work, future, func, args, 0.0)

    def _work(
        self, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...], rest_s: float
    ) -> None:
        result, error = None, None
        self._loop.in_thread = True
        try:
            result = func(*args)
        except Exception as raised:  # whatever it was, it is the caller's
            error = raised
        finally:
            self._loop.in_thread = False
        if rest_s:
            self._loop.call_later(rest_s, self._finish, future, result, error)
        else:
            self._finish(future, result, error)

    def _finish(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        self._busy -= 1
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._start()


def _numbered(loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None) -> NumberedTask[Any]:
    assert isinstance(loop, VirtualLoop), "its own factory"
    return NumberedTask(loop, work, context)


@contextmanager
def drawn_bytes(seed: object) -> Iterator[None]:
    """Whatever in this process asks the operating system for random bytes meanwhile has them drawn from the seed.

    Ids, keys and salts are made of them. They are worth nothing as secrets then: for simulations alone.
    """
    dice = random.Random(f"bytes {seed}")
    theirs = os.urandom, random._urandom  # type: ignore[attr-defined]  # the second is what `secrets` asks
    os.urandom = random._urandom = dice.randbytes  # type: ignore[attr-defined]
    try:
        yield
    finally:
        os.urandom, random._urandom = theirs  # type: ignore[attr-defined]


def _copy_outcome(done: asyncio.Future[Any], given: concurrent.futures.Future[Any]) -> None:
    if done.cancelled():
        given.cancel()
    elif (error := done.exception()) is not None:
        given.set_exception(error)
    else:
        given.set_result(done.result())


def abandon(loop: VirtualLoop) -> None:
    """End a loop as a crash does: its tasks go no further, and nobody hears of them again.

    Their coroutines are closed here, so that no later collection runs a piece of them. Whatever they do
    on their way out must find dead devices.
    """
    loop.set_exception_handler(lambda *_: None)
    for task in sorted(asyncio.all_tasks(loop), key=hash):  # their numbers: in the order in which they were begun
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coroutine: Any = task.get_coro()
        try:
            coroutine.close()
        except (Exception, Crash):  # it awaited, or asked for the running loop
            continue
    loop.close()
