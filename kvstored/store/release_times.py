"""How long it takes to give back what somebody held, from the cause to the last byte: the histogram `release_seconds`.

A session ends in one turn of the loop, but not all that it held is back then: leases of many blocks end in turns,
a copy that runs goes on to its end, staging memory is unmapped by a thread. Each of these is a part of the release,
which is over when the last part is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from kvstored.clock import Clock


class Cause(enum.StrEnum):
    """Why something is given back; labels of the histogram."""

    CLOSED = "closed"  # the client ended its session
    DISCONNECT = "disconnect"  # the client is gone
    TIMEOUT = "timeout"  # nothing was heard of it for too long
    ERROR = "error"  # it broke the protocol, or could not be served any more
    CANCEL = "cancel"  # of one call, whose client did not wait for the answer
    PREEMPTED = "preempted"  # an admin, or its tenant, ended the session
    PURGE = "purge"  # it held what is purged past the deadline
    SHUTDOWN = "shutdown"  # the daemon stops
    RESTART = "restart"  # of an earlier daemon's client, which did not come back


class Releasing:
    """One release. `part` is called before whatever ends later, and what it returns when that has ended."""

    def __init__(self, cause: Cause, clock: Clock, observe: Callable[[str, float], None]) -> None:
        self._cause = cause
        self._clock = clock
        self._observe = observe
        self._begun_s = clock.monotonic()
        self._parts = 1  # until `begun`

    def part(self) -> Callable[[], None]:
        """Something more to wait for; call the result once."""
        self._parts += 1
        return self.ended

    def ended(self) -> None:
        """A part has ended."""
        self._parts -= 1
        assert self._parts >= 0, "a part ends once"
        if not self._parts:
            self._observe(self._cause.value, self._clock.monotonic() - self._begun_s)


class ReleaseTimes:
    """Begins releases; `observe`, which the daemon sets, hears how long each took."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.observe: Callable[[str, float], None] = lambda cause, seconds: None

    def begin(self, cause: Cause) -> Releasing:
        """The cause is there: the clock runs until as many `ended` as parts, and one more."""
        return Releasing(cause, self._clock, self.observe)
