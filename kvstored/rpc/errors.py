"""From an exception to what a client sees: one code and one sentence."""

from __future__ import annotations

from typing import Final

from kvstored.errors import KVStoredError

INTERNAL: Final = 13


def describe(error: BaseException) -> tuple[int, str]:
    """The google.rpc.Code of an error and its text. An unexpected one tells nothing of the daemon's inside."""
    if isinstance(error, KVStoredError):
        return error.code, str(error)
    return INTERNAL, "internal error: see the daemon's log"
