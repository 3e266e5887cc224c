"""Work of the store that is not to be cancelled with whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Work that goes on whoever stops waiting for it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def keep(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Let it run, whoever waits."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def to_its_end(self, work: Awaitable[T]) -> T:
        """Wait for it; a caller that is cancelled does not end it."""
        return await asyncio.shield(self.keep(work))

    async def drained(self) -> None:
        """When nothing of it runs any more."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
