"""A token in a file: it is read at each connect, so that a token that is rotated needs no restart of an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvstored_client.errors import Unavailable

TOKEN_FILE_VARIABLE: Final = "KVSTORED_TOKEN_FILE"
TOKEN_BYTES_MAX: Final = 4096


def token_path(token: str | None, token_file: str | os.PathLike[str] | None) -> Path | None:
    """The file to read the token from: `token_file`, else KVSTORED_TOKEN_FILE; None where `token` says it already.

    Raises ValueError where both are given, or an empty path.
    """
    if token is not None:
        if token_file is not None:
            raise ValueError("token and token_file exclude each other")
        return None
    if token_file is not None and not os.fspath(token_file):
        raise ValueError("token_file is an empty path: leave it out, or name a file")
    named = token_file if token_file is not None else os.environ.get(TOKEN_FILE_VARIABLE)
    return Path(named) if named else None


def read_token_file(path: Path) -> str:
    """The token in the file, without the white space around it. Raises Unavailable where there is none to be had."""
    try:
        with path.open("rb") as file:
            token = file.read(TOKEN_BYTES_MAX + 1).decode().strip()
    except (OSError, ValueError) as error:  # ValueError: no path, as one with a zero byte
        reason = "it is no text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise Unavailable(f"reading token file {path}: {reason}") from None
    if not token or len(token) > TOKEN_BYTES_MAX:
        raise Unavailable(f"token file {path}: it is {'empty' if not token else 'too large'}: write the token into it")
    return token
