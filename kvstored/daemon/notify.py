"""What the daemon tells its service manager: that it serves, how it is, that it stops, that its loop still turns.

Without a service manager all of it does nothing.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

from kvstored.device.service_manager import NotifySocket

EXTEND_EVERY_S: Final = 5.0
EXTEND_BY_S: Final = 20.0  # the stop may take so much longer, seen from each turn of the loop
STATUS_CHARS_MAX: Final = 200


class Notifier:
    """Tells, inside `with`, from the event loop: a loop that is stuck is silent, and the manager restarts it."""

    def __init__(self, socket: NotifySocket | None, watchdog_s: float) -> None:
        self._socket = socket
        self._alive_every_s = watchdog_s / 2
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __enter__(self) -> Self:
        if self._alive_every_s:
            self._repeat("WATCHDOG=1", self._alive_every_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def status(self, text: str) -> None:
        """One line for people: what it is doing, or what went wrong."""
        self._send(_status(text))

    def ready(self, text: str) -> None:
        """It serves."""
        self._send("READY=1", _status(text))

    def stopping(self, text: str) -> None:
        """It stops; from here on the time for it is extended as long as the loop turns."""
        self._send("STOPPING=1", _status(text))
        self._repeat(f"EXTEND_TIMEOUT_USEC={int(EXTEND_BY_S * 1_000_000)}", EXTEND_EVERY_S)

    def _repeat(self, assignment: str, every_s: float) -> None:
        if self._socket is not None:
            self._send(assignment)
            again = asyncio.get_running_loop().call_later(every_s, self._repeat, assignment, every_s)
            self._timers[assignment] = again

    def _send(self, *assignments: str) -> None:
        if self._socket is not None:
            self._socket.send(*assignments)  # not sent: the next one will be, or the manager sees to it


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())[:STATUS_CHARS_MAX]
