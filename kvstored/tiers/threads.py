"""Threads for a volume's blocking calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from kvstored.errors import DeviceError

T = TypeVar("T")
STORE_THREADS_MAX: Final = 2


class VolumeThreads:
    """Pools of one volume. Stores have threads of their own, so that loads never queue behind them."""

    def __init__(self, number: int, io_threads: int) -> None:
        self.load_count = io_threads
        self.store_count = min(STORE_THREADS_MAX, io_threads)
        self.loads = ThreadPoolExecutor(self.load_count, f"nvme{number}-load")
        self.stores = ThreadPoolExecutor(self.store_count, f"nvme{number}-store")
        self.index_reader = ThreadPoolExecutor(1, f"nvme{number}-find")
        self.index_writer = ThreadPoolExecutor(1, f"nvme{number}-index")

    def stop(self) -> None:
        """Wait for the threads to end; blocks while one is busy."""
        for pool in (self.loads, self.stores, self.index_reader, self.index_writer):
            pool.shutdown()


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
