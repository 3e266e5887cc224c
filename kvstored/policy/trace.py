"""Traces: which blocks each request of a recorded workload asks for. Two formats, told apart by their first line.

JSONL, as Mooncake publishes it: a line has `timestamp`, `input_length`, `output_length` and
`hash_ids`, one id a block.

Compact: the first line is a JSON header with `block_tokens` and `partial` (whether the last block
of a request may be covered in part). Each further line is

    session,t_ms,input_tokens,output_tokens,back,shared

The request's first `shared` block ids are those of the request `back` lines earlier; the rest are
fresh. Ids stand for block contents: equal ids, equal prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

Request = list[int] | list[int | str]


class Header(msgspec.Struct, frozen=True):
    """The first line of a compact trace."""

    block_tokens: int
    partial: bool


class Line(msgspec.Struct, frozen=True):
    """What is read of a line of a JSONL trace."""

    hash_ids: list[int | str]


def parse(lines: Iterable[str], limit: int | None = None) -> Iterator[Request]:
    """The block ids of each request in order, at most `limit` requests.

    Raises ValueError, with the line's number, for a line that is of neither format.
    """
    lines = iter(lines)
    first = next(lines, "")
    requests = _jsonl(first, lines) if '"hash_ids"' in first else _compact(first, lines)
    return islice(requests, limit)


def _jsonl(first: str, lines: Iterator[str]) -> Iterator[Request]:
    decoder = msgspec.json.Decoder(Line)
    number, text = 1, first
    while text:
        if text.strip():
            try:
                ids = decoder.decode(text).hash_ids
            except msgspec.DecodeError as error:
                raise ValueError(f"line {number} is no request with hash_ids: {error}") from None
            if len(set(ids)) < len(ids):
                raise ValueError(f"line {number}: an id stands twice in hash_ids; each must name a prefix")
            yield ids
        number, text = number + 1, next(lines, "")


def _compact(first: str, lines: Iterator[str]) -> Iterator[Request]:
    try:
        header = msgspec.json.decode(first, type=Header)
    except msgspec.DecodeError:
        raise ValueError(
            "line 1 is neither a JSON object with hash_ids nor a header with block_tokens and partial"
        ) from None
    if header.block_tokens < 1:
        raise ValueError(f"line 1: block_tokens is {header.block_tokens}: it must be 1 or more")
    history: list[list[int]] = []
    fresh = 0
    for number, line in enumerate(lines, 2):
        tokens, back, shared = _row(line, number, len(history))
        if back and shared > len(history[-back]):
            raise ValueError(f"line {number}: shares {shared} of {len(history[-back])} blocks")
        count = -(-tokens // header.block_tokens) if header.partial else tokens // header.block_tokens
        ids = history[-back][:shared] if back else []
        new = max(0, count - len(ids))
        ids = [*ids, *range(fresh, fresh + new)]
        fresh += new
        history.append(ids)
        yield ids


def _row(line: str, number: int, rows: int) -> tuple[int, int, int]:
    try:
        _session, _t_ms, tokens, _output, back, shared = map(int, line.split(","))
    except ValueError:
        raise ValueError(f"line {number}: {line.strip()[:80]!r} is not six integers") from None
    if tokens < 0 or shared < 0 or not 0 <= back <= rows or (back == 0) != (shared == 0):
        raise ValueError(f"line {number}: back {back} and shared {shared} do not fit")
    return tokens, back, shared
