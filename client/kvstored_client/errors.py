"""Errors of the client.

What is normal (a miss, no room, no daemon) is a result of the data verbs, never an exception.
The tree, for `Client.call` and for what happens inside:

    KVStoredClientError
    +-- Unavailable   no daemon answers, or it went away during the call
    +-- Timeout       it did not answer in time
    +-- Refused       it answered with an error: `code` (a google.rpc.Code) and `message`

Programmer errors raise TypeError and ValueError; use after a fork raises RuntimeError. Where this process itself runs
out of something (memory, descriptors, threads), that is Unavailable like any other reason why no answer can be had.
"""

from __future__ import annotations

from typing import Final

FAILED_PRECONDITION: Final = 9  # a google.rpc.Code: of what the client itself refuses, knowing that the daemon would


class KVStoredClientError(Exception):
    """Base of all errors that the daemon or its absence causes."""


class Unavailable(KVStoredClientError):
    """No daemon answers on the socket, or the connection ended during the call."""


class Timeout(KVStoredClientError):
    """The daemon did not answer in time."""


class Refused(KVStoredClientError):
    """The daemon answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


SHORTAGES: Final = (MemoryError, OSError)
"""What this process has run out of: memory, descriptors."""
FAILURES: Final = (KVStoredClientError, *SHORTAGES)
"""What a verb turns into a miss."""


def failure_of(error: BaseException) -> KVStoredClientError:
    """One of `FAILURES` as the client's own."""
    if isinstance(error, KVStoredClientError):
        return error
    lacking = error.strerror or str(error) if isinstance(error, OSError) else "no memory"
    return Unavailable(f"in this process: {lacking}")
