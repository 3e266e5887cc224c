"""Ending tasks that run beside serving."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

# `asyncio.wait_for` before Python 3.12 forgets a cancellation that comes with what it waits for: it is told again.
AGAIN_S: Final = 5.0


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until each has ended; how they ended is nobody's business."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
