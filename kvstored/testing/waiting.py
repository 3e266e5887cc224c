"""Waiting in tests: as long as it takes, on a machine that has its time for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

PATIENCE_S: Final = 60.0  # for what takes no time; reached where it does not happen at all
_EAGER_TURNS: Final = 1000
_POLL_S: Final = 0.001


async def turns(count: int = _EAGER_TURNS) -> None:
    """Let all run that is ready, and what that makes ready: what waits for no thread, timer or socket is done."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Wait for what nothing signals, in turns that take no time, then with pauses: it may be up to a thread."""
    end_s = time.monotonic() + PATIENCE_S
    turn = 0
    while not condition():
        assert time.monotonic() < end_s, f"not so within {PATIENCE_S:g} s"
        turn += 1
        await asyncio.sleep(0 if turn < _EAGER_TURNS else _POLL_S)
