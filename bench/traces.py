"""Reads prefix traces: which blocks each request of a recorded workload asks for.

A trace is a gzipped text file. Its first line is a JSON header with `block_tokens` and
`partial` (whether the last block of a request may be covered in part). Each further line is

    session,t_ms,input_tokens,output_tokens,back,shared

The request's first `shared` block ids are those of the request `back` lines earlier; the rest
are fresh. Ids stand for block contents: equal ids, equal prefixes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

TRACES_VARIABLE = "KVSTORED_TRACES"


def find_trace(name: str) -> Path:
    """The trace file: the path itself, or a file of that name in $KVSTORED_TRACES.

    Raises FileNotFoundError that says where it was looked for.
    """
    directory = os.environ.get(TRACES_VARIABLE)
    candidates = [Path(name)] + ([Path(directory) / Path(name).name] if directory else [])
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked = ", ".join(map(str, candidates))
    raise FileNotFoundError(f"no trace at {looked}; give a path or set {TRACES_VARIABLE} to the traces' directory")


def read_trace(path: Path, limit: int | None = None) -> Iterator[list[int]]:
    """The block ids of each request in order, at most `limit` requests.

    Raises ValueError, with the line's number, for a line that is not of the format.
    """
    with gzip.open(path, "rt") as file:
        header = json.loads(file.readline())
        yield from _requests(file, header["block_tokens"], header["partial"], limit)


def _requests(lines: Iterable[str], block_tokens: int, partial: bool, limit: int | None) -> Iterator[list[int]]:
    history: list[list[int]] = []
    fresh = 0
    for index, line in enumerate(lines):
        if index == limit:
            return
        try:
            _session, _t_ms, tokens, _output, back, shared = map(int, line.split(","))
        except ValueError:
            raise ValueError(f"line {index + 2}: {line.strip()!r} is not six integers") from None
        if not 0 <= back <= index or (back == 0) != (shared == 0):
            raise ValueError(f"line {index + 2}: back {back} and shared {shared} do not fit")
        if back and shared > len(history[index - back]):
            raise ValueError(f"line {index + 2}: shares {shared} of {len(history[index - back])} blocks")
        count = -(-tokens // block_tokens) if partial else tokens // block_tokens
        ids = history[index - back][:shared] if back else []
        new = max(0, count - len(ids))
        ids = [*ids, *range(fresh, fresh + new)]
        fresh += new
        history.append(ids)
        yield ids


def block_hash(block_id: int) -> bytes:
    """The 32-byte block hash that stands for an id."""
    return hashlib.sha256(b"trace block %d" % block_id).digest()
