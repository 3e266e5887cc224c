"""Traces: which blocks each request of a recorded workload asks for. Three formats, told apart by their first line.

JSONL, as Mooncake publishes it: a line has `timestamp`, `input_length`, `output_length` and
`hash_ids`, one id a block.

Compact: the first line is a JSON header with `block_tokens` and `partial` (whether the last block
of a request may be covered in part). Each further line is

    session,t_ms,input_tokens,output_tokens,back,shared

The request's first `shared` block ids are those of the request `back` lines earlier; the rest are
fresh. Ids stand for block contents: equal ids, equal prefixes.

The third is what the daemon records of its own traffic: see `recording`. Blank lines are passed over in all.
Whatever a line says is bounded before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Annotated, Final

import msgspec

from kvstored.policy import recording
from kvstored.policy.calls import TIME_MS_MAX, Call, Numbered, Request, Time

__all__ = ["Call", "Request", "parse", "parse_calls", "text_lines"]

BLOCKS_MAX: Final = 1 << 20  # of one request of a compact trace, where a few digits make that many
UNREADABLE: Final = (msgspec.DecodeError, RecursionError)


class Header(msgspec.Struct, frozen=True):
    """The first line of a compact trace."""

    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    partial: bool


class Line(msgspec.Struct, frozen=True):
    """What is read of a line of a JSONL trace."""

    hash_ids: list[int | str]
    timestamp: Time = 0.0  # milliseconds


def text_lines(file: Iterable[bytes]) -> Iterator[str]:
    """The lines of a file that was opened to read bytes.

    Raises ValueError, with the line's number, where one is no text.
    """
    for number, line in enumerate(file, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is no text in UTF-8: {error.reason}") from None


def parse(lines: Iterable[str], limit: int | None = None) -> Iterator[Request]:
    """The block ids of each request in order, at most `limit` requests.

    Raises ValueError, with the line's number, for a line that is of none of the formats.
    """
    return islice((call.ids for call in parse_calls(lines) if call.gets), limit)


def parse_calls(lines: Iterable[str]) -> Iterator[Call]:
    """The calls in order. Raises ValueError as `parse` does."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    number, first = next(numbered, (0, ""))
    if not number:
        raise ValueError("it is empty")
    if recording.MARK in first:
        return recording.parse(number, first, numbered)
    if '"hash_ids"' in first:
        return _jsonl(chain([(number, first)], numbered))
    return _compact(number, first, numbered)


def _jsonl(lines: Numbered) -> Iterator[Call]:
    decoder = msgspec.json.Decoder(Line)
    for number, text in lines:
        try:
            line = decoder.decode(text)
        except UNREADABLE as error:
            raise ValueError(f"line {number} is no request with hash_ids: {error}") from None
        if len(set(line.hash_ids)) < len(line.hash_ids):
            raise ValueError(f"line {number}: an id stands twice in hash_ids; each must name a prefix")
        yield Call(ids=line.hash_ids, t_ms=line.timestamp)


def _compact(number: int, first: str, lines: Numbered) -> Iterator[Call]:
    try:
        header = msgspec.json.decode(first, type=Header)
    except UNREADABLE as error:
        raise ValueError(
            f"line {number} is neither a JSON object with hash_ids nor a header with block_tokens and partial: {error}"
        ) from None
    history: list[list[int]] = []
    fresh = 0
    for number, line in lines:
        t_ms, tokens, back, shared = _row(line, number, len(history))
        if back and shared > len(history[-back]):
            raise ValueError(f"line {number}: shares {shared} of {len(history[-back])} blocks")
        count = -(-tokens // header.block_tokens) if header.partial else tokens // header.block_tokens
        if count > BLOCKS_MAX:
            raise ValueError(f"line {number}: a request of {count} blocks; {BLOCKS_MAX} are allowed")
        ids = history[-back][:shared] if back else []
        new = max(0, count - len(ids))
        ids = [*ids, *range(fresh, fresh + new)]
        fresh += new
        history.append(ids)
        yield Call(ids=ids, t_ms=t_ms)


def _row(line: str, number: int, rows: int) -> tuple[int, int, int, int]:
    try:
        _session, t_ms, tokens, _output, back, shared = map(int, line.split(","))
    except ValueError:
        raise ValueError(f"line {number}: {line.strip()[:80]!r} is not six integers") from None
    if tokens < 0 or shared < 0 or not 0 <= back <= rows or (back == 0) != (shared == 0):
        raise ValueError(f"line {number}: back {back} and shared {shared} do not fit")
    if abs(t_ms) > TIME_MS_MAX:
        raise ValueError(f"line {number}: t_ms is out of range")
    return t_ms, tokens, back, shared
