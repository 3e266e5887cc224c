"""Threads that may not be had: at a limit of processes or of memory starting one raises, which is no engine's business.

An executor keeps what it was given although it could not start a thread for it, and does it when it has one later. By
then its caller has been told that nothing is done, and what it was to fill may be somebody else's; so here it is taken
back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kvstored_client.errors import Unavailable

T = TypeVar("T")
_NO_THREAD: Final = (RuntimeError, MemoryError)  # of a pool that is shut down the first, too


class Handed(Protocol):
    """What a pool's `submit` returns: a future of threads or of an event loop."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """See `Future`."""


def start(run: Callable[[], None], name: str) -> threading.Thread:
    """Run it in a thread of its own, which does not keep the process. Raises Unavailable where there is none."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except _NO_THREAD as error:
        raise Unavailable(f"no thread to copy or wait in: {error}") from None
    return thread


def submit(hand_over: Callable[[Callable[[], None]], Handed], action: Callable[[], T]) -> Future[T]:
    """Do it in a thread of a pool, whose `submit` is `hand_over`.

    Raises Unavailable where there is none, and then it is never done. So does its result where the pool drops it later.
    """
    future: Future[T] = Future()
    try:
        handed = hand_over(partial(_run, future, action))
    except _NO_THREAD as error:
        if future.cancel():  # else one of the pool's threads has taken it already
            raise Unavailable(f"no thread to copy or wait in: {error}") from None
    else:
        handed.add_done_callback(partial(_over, future))
    return future


def _over(future: Future[T], handed: Any) -> None:
    """It is done, or the pool was shut down or broke before: then whoever waits would wait for ever."""
    why = "it was shut down" if handed.cancelled() else handed.exception()
    if why is not None and not future.done():
        with suppress(InvalidStateError):
            future.set_exception(Unavailable(f"no thread of the pool will do it: {why}"))


def _run(future: Future[T], action: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = action()
    except BaseException as error:
        future.set_exception(error)
        del future, action  # the exception knows this frame: no circle
    else:
        future.set_result(result)
