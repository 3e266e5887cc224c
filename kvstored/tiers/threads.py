"""Blocking work in threads, waited for to its very end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_to_end(function: Callable[..., T], *args: object) -> T:
    """Run a function in a thread; returns or raises only when the thread is done with it.

    A cancelled caller gets its CancelledError after that: until then the thread uses the
    memory that it was given, and nobody may take it back.
    """
    future = asyncio.get_running_loop().run_in_executor(None, function, *args)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        future.exception()  # nobody is left to be told
        raise
