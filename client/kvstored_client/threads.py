"""Threads that may not be had: at a limit of processes or of memory starting one raises, which is no engine's business.

An executor keeps what it was given although it could not start a thread for it, and does it when it has one later. By
then its caller has been told that nothing is done, and what it was to fill may be somebody else's; so here it is taken
back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from kvstored_client.errors import Unavailable

T = TypeVar("T")
_NO_THREAD: Final = (RuntimeError, MemoryError)  # of a pool that is shut down the first, too


def start(run: Callable[[], None], name: str) -> threading.Thread:
    """Run it in a thread of its own, which does not keep the process. Raises Unavailable where there is none."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except _NO_THREAD as error:
        raise Unavailable(f"no thread to copy or wait in: {error}") from None
    return thread


def submit(hand_over: Callable[[Callable[[], None]], object], action: Callable[[], T]) -> Future[T]:
    """Do it in a thread of a pool, whose `submit` is `hand_over`.

    Raises Unavailable where there is none, and then it is never done.
    """
    future: Future[T] = Future()
    try:
        hand_over(partial(_run, future, action))
    except _NO_THREAD as error:
        if future.cancel():  # else one of the pool's threads has taken it already
            raise Unavailable(f"no thread to copy or wait in: {error}") from None
    return future


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
