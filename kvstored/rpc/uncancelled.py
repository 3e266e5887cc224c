"""Operations that go to their end although their caller left.

gRPC cancels the handler of a call whose client hung up or ran out of time. An operation stopped
half-way would keep what it had taken, or free memory that a thread still writes to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")
_left_alone: Final[set[asyncio.Future[Any]]] = set()  # the loop itself holds tasks only weakly


async def to_its_end(
    work: Awaitable[T], undo: Callable[[T], object] = lambda result: None, left: Callable[[], object] = lambda: None
) -> T:
    """The result of `work`. If the caller is cancelled, `left` is called, work goes on and `undo` gets its result."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        left()
        leave_alone(task, undo)
        raise


def leave_alone(work: Awaitable[T], then: Callable[[T], object] = lambda result: None) -> None:
    """Let work go on that nobody waits for; `then` gets its result. Its failure is nobody's concern."""
    task = asyncio.ensure_future(work)
    _left_alone.add(task)
    task.add_done_callback(lambda done: _settle(done, then))


def _settle(task: asyncio.Future[T], then: Callable[[T], object]) -> None:
    _left_alone.discard(task)
    if not task.cancelled() and task.exception() is None:
        then(task.result())
