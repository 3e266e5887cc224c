"""Errors of the daemon: broken devices, broken promises, bad input.

What is normal (a miss, no room, a throttled caller) is a result, never an exception
(`kvstored_proto` `Outcome`). The tree, and the one gRPC status each maps to:

    KVStoredError
    +-- InvalidArgument        INVALID_ARGUMENT     the caller's message makes no sense
    +-- NotFound               NOT_FOUND            a handle that is not (or no longer) the caller's
    +-- PermissionDenied       PERMISSION_DENIED    known caller, not allowed
    +-- Unauthenticated        UNAUTHENTICATED      unknown caller
    |   +-- SessionEnded       UNAUTHENTICATED      known when it asked, and gone before its call had its turn
    +-- LimitExceeded          RESOURCE_EXHAUSTED   one of the caller's limits is reached
    +-- FailedPrecondition     FAILED_PRECONDITION  not in this state (version, draining)
    +-- ConfigError            (start-up only)      a setting is wrong
    +-- DeviceError            UNAVAILABLE          a device or its file system failed
        +-- CorruptData        DATA_LOSS            stored bytes or records are not what was written
"""

from __future__ import annotations

from typing import ClassVar


class KVStoredError(Exception):
    """Base of all errors; `code` is the google.rpc.Code that a client sees."""

    code: ClassVar[int] = 13  # INTERNAL


class InvalidArgument(KVStoredError):
    """The request makes no sense; the message says what would."""

    code = 3


class NotFound(KVStoredError):
    """A handle (namespace, lease, reservation, prefetch, group) is unknown to this session."""

    code = 5


class PermissionDenied(KVStoredError):
    """The caller is known and may not do this."""

    code = 7


class LimitExceeded(KVStoredError):
    """One of the caller's limits is reached; the message names it."""

    code = 8


class FailedPrecondition(KVStoredError):
    """The daemon or the session is not in a state that allows this."""

    code = 9


class Unauthenticated(KVStoredError):
    """Nothing that the caller showed names a tenant."""

    code = 16


class SessionEnded(Unauthenticated):
    """The caller's session ended between its call and the turn of it: nobody was refused anything."""


class ConfigError(KVStoredError):
    """A setting is wrong: names the key, the value and what would be right."""


class DeviceError(KVStoredError):
    """A device or its file system failed."""

    code = 14


class CorruptData(DeviceError):
    """Stored bytes or records are not what was written."""

    code = 15
