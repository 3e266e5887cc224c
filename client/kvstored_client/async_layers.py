"""Transfers that were begun, for `AsyncClient`; see `layers`."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from kvstored_client.layers import LoadBegun, LoadUnderWay, StoreBegun, StoreUnderWay
from kvstored_client.loop import LoopDriver
from kvstored_client.results import PutResult


class AsyncLoading(LoadUnderWay):
    """See `LoadUnderWay`. Who is cancelled while it waits may ask again: the load goes on."""

    def __init__(self, driver: LoopDriver, begun: LoadBegun, layers: int) -> None:
        super().__init__(begun, layers)
        self._driver = driver
        self._finishing: asyncio.Task[int] | None = None

    async def result(self) -> int:
        """See `Loading.result`."""
        if self._finishing is None:
            self._finishing = asyncio.create_task(self._finish())
        return await asyncio.shield(self._finishing)

    async def _finish(self) -> int:
        return self._over(await self._driver.data(self._begun.finish(), 0, begun=True))


class AsyncStoring(StoreUnderWay):
    """See `StoreUnderWay`: `async with await transfers.start_store(...) as storing`.

    Who is cancelled while it waits may ask again; what has begun to end goes on.
    """

    def __init__(self, driver: LoopDriver, begun: StoreBegun, layers: int) -> None:
        super().__init__(begun, layers)
        self._driver = driver
        self._finishing: asyncio.Task[PutResult] | None = None

    async def result(self) -> PutResult:
        """See `Storing.result`."""
        self._check_all_ready()
        return await self._finish(cancel=False)

    async def cancel(self) -> PutResult:
        """See `Storing.cancel`; of a store whose result was asked for this waits for that."""
        return await self._finish(cancel=True)

    async def _finish(self, *, cancel: bool) -> PutResult:
        if self._finishing is None:
            self._over = True
            ending = self._driver.run(self._begun.finish(cancel=cancel), begun=True)
            self._finishing = asyncio.create_task(ending)
        return await asyncio.shield(self._finishing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if error is not None:
            await self.cancel()
