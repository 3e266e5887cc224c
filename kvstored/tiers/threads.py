"""Threads for a volume's blocking calls, and calls that are not cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kvstored.device.scheduling import compute_in_long_slices, give_way
from kvstored.errors import DeviceError

T = TypeVar("T")
STORE_THREADS_MAX: Final = 2


def real_pool(threads: int, name: str, *, gives_way: bool) -> Executor:
    """Threads of the operating system; what calls run on unless a simulation brings something else."""
    return ThreadPoolExecutor(threads, name, give_way if gives_way else compute_in_long_slices)


class MakePool(Protocol):
    """How pools are made: so many threads, their name, and whether they take a smaller share of the CPUs."""

    def __call__(self, threads: int, name: str, *, gives_way: bool) -> Executor:
        """A pool that nobody else uses."""
        ...


class VolumeThreads:
    """Pools of one volume. Stores have threads of their own, so that loads never queue behind them.

    A pool of one thread runs what it is given in that order.
    """

    def __init__(self, number: int, io_threads: int, make_pool: MakePool = real_pool) -> None:
        self.accounted = make_pool is real_pool  # the kernel counts what each thread writes
        self.load_count = io_threads
        self.store_count = min(STORE_THREADS_MAX, io_threads)
        self.loads = make_pool(self.load_count, f"nvme{number}-load", gives_way=True)
        self.stores = make_pool(self.store_count, f"nvme{number}-store", gives_way=True)
        self.scrub = make_pool(1, f"nvme{number}-scrub", gives_way=True)
        self.index_reader = make_pool(1, f"nvme{number}-find", gives_way=False)
        self.index_writer = make_pool(1, f"nvme{number}-index", gives_way=False)

    def stop(self) -> None:
        """Let the threads end as soon as they are idle; no calls after this. Does not wait."""
        for pool in (self.loads, self.stores, self.scrub, self.index_reader, self.index_writer):
            pool.shutdown(wait=False)


async def call(where: Executor, work: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Run `work` on a thread of that pool and wait for it."""
    return await asyncio.get_running_loop().run_in_executor(where, partial(work, *args, **kwargs))


async def call_all(calls: Iterable[Awaitable[T]]) -> list[T | DeviceError]:
    """Wait until every call has ended, then give what each returned or which device error it raised."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    results: list[T | DeviceError] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, DeviceError):
            raise outcome
        results.append(outcome)
    return results


class Calls:
    """Calls under way. One that is cancelled goes on to its end, and its caller waits for that."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that threads take part in: they stop touching memory and files before this returns."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                try:
                    await asyncio.wait([task])
                except asyncio.CancelledError:
                    continue
            if not task.cancelled():
                task.exception()  # who left does not want to know
            raise

    async def ended(self, timeout_s: float = 0.0) -> bool:
        """Wait for the calls that are under way now; whether they ended in time (0: however long it takes)."""
        if not self._tasks:
            return True
        return not (await asyncio.wait(set(self._tasks), timeout=timeout_s or None))[1]
