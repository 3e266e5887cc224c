"""What a verb asks of whoever runs it: the only places where it may have to wait.

Each verb is a generator that yields these and gets their answers; `client` runs it in threads,
`aio` in an event loop. Failures arrive in the generator as KVStoredClientError. A generator may be
closed at any yield, so its `finally` blocks post one-way messages and yield nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from kvstored_client.connection import Connection
from kvstored_client.errors import Unavailable
from kvstored_client.tickets import Late, Ticket

R = TypeVar("R", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connect:
    """A live session. Answered with a Connection; raises Unavailable at once while the breaker is open."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The reply of a request that was started. Answered with the reply's body."""

    connection: Connection
    ticket: Ticket
    timeout_s: float
    # Where the daemon uses the caller's memory until it has answered: asks for that to be soon. Who is cancelled
    # meanwhile calls it, and waits all the same.
    hurry: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Something that moves `size_bytes` or maps as many: not for an event loop's thread when large."""

    action: Callable[[], Any]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """A pause, in seconds."""

    seconds: float
    whole: bool = False  # whoever is cancelled meanwhile waits all the same: the caller's memory may be in use


Effect = Connect | Finish | Work | Sleep
Verb = Generator[Effect, Any, T]
CONNECT = Connect()
LOST_PAUSE_S = 1.0  # after a connection was lost in mid-copy: the worker ends with its daemon, in far less


def finish(
    connection: Connection,
    ticket: Ticket,
    reply_type: type[R],
    timeout_s: float,
    hurry: Callable[[], None] | None = None,
) -> Verb[R]:
    """Wait for a reply and parse it."""
    body = yield Finish(connection, ticket, timeout_s, hurry)
    try:
        return reply_type.FromString(body)
    except DecodeError:
        raise Unavailable(f"the daemon's answer is not a {reply_type.DESCRIPTOR.name}") from None


def call(
    connection: Connection,
    operation: int,
    request: Message,
    reply_type: type[R],
    timeout_s: float,
    late: Late | None = None,
    hurry: Callable[[], None] | None = None,
) -> Verb[R]:
    """Ask and wait. `late` undoes what the reply gives where nobody waits for it any more; `hurry`: see `Finish`."""
    ticket = connection.start(operation, request, late)
    try:
        return (yield from finish(connection, ticket, reply_type, timeout_s, hurry))
    except BaseException:  # before anybody waited for it, too
        connection.abandon(ticket)
        raise
