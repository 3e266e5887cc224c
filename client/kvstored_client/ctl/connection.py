"""How every command reaches the daemon, and how it fails: one line, one exit code.

The commands speak only the public API: the client's verbs, and its `call` for what an engine
does not need.
"""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from kvstored_client import Client
from kvstored_client.errors import KVStoredClientError, Timeout, Unavailable
from kvstored_client.token_file import read_token_file


class Exit(enum.IntEnum):
    """Exit codes, the same for every command."""

    OK = 0
    NO = 1  # the answer is no, or the operation failed
    USAGE = 2
    CORRUPT = 3
    UNREACHABLE = 4


class Failure(Exception):
    """Ends a command with one line on standard error."""

    def __init__(self, message: str, code: Exit = Exit.NO) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Options:
    """What was said before or after any command."""

    address: str
    timeout_s: float
    token: str | None
    output: Literal["table", "json"]


def options_of(context: typer.Context) -> Options:
    """The global options of this run."""
    options = context.obj
    assert isinstance(options, Options)
    return options


def read_token(path: Path | None) -> str | None:
    """The token in a file; a file, because command lines are visible to every user of the machine."""
    if path is None:
        return None
    try:
        return read_token_file(path)
    except Unavailable as error:
        raise Failure(str(error), Exit.USAGE) from error


def _explained(error: Exception) -> Exception:
    """What kept the client from connecting, with what to look at; only where there is nobody, or no way in."""
    if not isinstance(error, Unavailable) or not str(error).startswith("connecting to "):
        return error
    if str(error).endswith(os.strerror(errno.EACCES)):
        return Unavailable(f"{error}: join the group that the socket belongs to, or be its owner")
    return Unavailable(f"{error}: is kvstored running, and done populating its memory? (--address: another socket)")


@contextmanager
def connected(options: Options, doing: str, *, wait_s: float = 0.0, staging_bytes: int = 0) -> Iterator[Client]:
    """A client for the length of one command.

    `doing` starts the line of any failure ("getting status"); `wait_s` is what the daemon may
    take for the work itself, on top of the time-out.
    """
    try:
        client = Client(
            options.address,
            token=options.token,
            name="kvstorectl",
            staging_bytes=staging_bytes,
            timeout_s=options.timeout_s + wait_s,
            connect_timeout_s=options.timeout_s,
        )
    except ValueError as error:
        raise Failure(str(error), Exit.USAGE) from error
    try:
        if client.connect_error is not None:
            raise _explained(client.connect_error)
        yield client
    except (Unavailable, Timeout) as error:
        raise Failure(f"{doing}: {error}", Exit.UNREACHABLE) from error
    except KVStoredClientError as error:
        raise Failure(f"{doing}: {error}") from error
    finally:
        client.close()
