"""Finds and reads traces; `kvstored.policy.trace` knows the formats."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.common import BadInput
from kvstored.policy.trace import Request, parse, text_lines

TRACES_VARIABLE: Final = "KVSTORED_TRACES"
_GZIP_MAGIC: Final = b"\x1f\x8b"


class NoTrace(BadInput, FileNotFoundError):
    """There is no file of that name."""


def find_trace(name: str) -> Path:
    """The trace file: the path itself, or a file of that name in $KVSTORED_TRACES.

    Raises NoTrace that says where it was looked for.
    """
    directory = os.environ.get(TRACES_VARIABLE)
    candidates = [Path(name)] + ([Path(directory) / Path(name).name] if directory else [])
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = ", ".join(map(str, candidates))
    raise NoTrace(f"no trace at {looked}; give a path or set {TRACES_VARIABLE} to the traces' directory")


def read_trace(path: Path, limit: int | None = None) -> Iterator[Request]:
    """The block ids of each request in order, at most `limit` requests. The file may be gzipped.

    Raises BadInput, with the file and the line's number, for a line that is not of the format.
    """
    try:
        yield from _requests(path, limit)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise BadInput(f"reading trace {path}: {error}") from error


def _requests(path: Path, limit: int | None) -> Iterator[Request]:
    with path.open("rb") as probe:
        zipped = probe.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    with gzip.open(path) if zipped else path.open("rb") as file:
        yield from parse(text_lines(file), limit)


def block_hash(block_id: int | str) -> bytes:
    """The 32-byte block hash that stands for an id."""
    return hashlib.sha256(f"trace block {block_id}".encode()).digest()
