"""The format in which the daemon records its own traffic: JSON lines, the first a header.

Each line is an object with one of these:

    kvstored_recording   the header: the format's number, and when it began (seconds since 1970)
    namespace            number of a namespace that calls name from here on, of its tenant, and tokens a block
    kind                 a call: lookup, get or put
    dropped              so many calls are not on record before this line, since the writer could not keep up
    ended                why the recording ended: stopped, size, time, stopping, or a device's failure

Keys are 8 bytes each, packed, in base64: block hashes hashed again under a random key that the daemon forgets
when the recording ends. So they say which blocks are the same within one recording and one tenant, and nothing
else. Tenants, namespaces and sessions are numbered in the order of their first call.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Iterator
from typing import Final

import msgspec

from kvstored.policy.calls import Call, Numbered, Request, Time

FORMAT: Final = 1
MARK: Final = '"kvstored_recording"'
KEY_BYTES: Final = 8
NAMESPACE_SHIFT: Final = 8 * KEY_BYTES
LOOKUP: Final = "lookup"
GET: Final = "get"
PUT: Final = "put"


class Header(msgspec.Struct, frozen=True):
    """The first line."""

    kvstored_recording: int
    began: float = 0.0


class Line(msgspec.Struct, omit_defaults=True, gc=False):
    """Any other line."""

    t: Time = 0.0  # milliseconds since the recording began
    kind: str = ""
    session: int = 0
    namespaces: list[int] = msgspec.field(default_factory=list)
    keys: str = ""
    found: int = 0  # of a get or a lookup: leading blocks
    parent: str = ""  # of a put: the key before its first
    bytes: int = 0  # of a put: all blocks together
    namespace: int = 0
    tenant: int = 0
    block_tokens: int = 0
    dropped: int = 0
    ended: str = ""


def pack(keys: bytes) -> str:
    """Packed keys as text."""
    return binascii.b2a_base64(keys, newline=False).decode()


def unpack(text: str) -> list[int]:
    """The keys as numbers; raises ValueError where they are cut."""
    keys = binascii.a2b_base64(text, strict_mode=True)
    return list(struct.unpack(f">{len(keys) // KEY_BYTES}Q", keys)) if keys else []


def parse(number: int, first: str, lines: Numbered) -> Iterator[Call]:
    """Gets and puts; lookups use no block and are passed over. A last line that is cut is passed over too.

    `first` is the line of that number, the header. A get over several namespaces is one get in each of them.
    Raises ValueError, with the line's number.
    """
    try:
        header = msgspec.json.decode(first, type=Header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"line {number} is no header of a recording: {error}") from None
    if header.kvstored_recording != FORMAT:
        raise ValueError(f"line {number}: format {header.kvstored_recording} of recordings is not known; {FORMAT} is")
    decoder = msgspec.json.Decoder(Line)
    chains = _Chains()
    for number, text in lines:
        if not text.endswith("\n"):
            return  # it was being written when the daemon was killed
        try:
            line = decoder.decode(text)
            if line.kind == GET:
                yield from chains.got(line)
            elif line.kind == PUT:
                yield chains.put(line)
        except (msgspec.DecodeError, RecursionError, ValueError, struct.error) as error:
            raise ValueError(f"line {number} is no line of a recording: {error}") from None


class _Chains:
    """Puts name only what they store, and the block before it: the rest of their chain is found here."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._gets: dict[tuple[int, int], tuple[int, Request]] = {}  # session, namespace -> number, ids of the last
        self._calls = 0

    def got(self, line: Line) -> Iterator[Call]:
        keys = unpack(line.keys)
        for namespace in line.namespaces:
            ids = _in(namespace, keys)
            self._parents.update(zip(ids[1:], ids, strict=False))
            self._gets[line.session, namespace] = (self._calls, ids)
            self._calls += 1
            yield Call(ids=ids, t_ms=line.t, puts=False, found=min(line.found, len(ids)))

    def put(self, line: Line) -> Call:
        (namespace,) = line.namespaces
        new = _in(namespace, unpack(line.keys))
        above = self._up(_in(namespace, unpack(line.parent)))
        if new:
            self._parents.update(
                zip(new, [*above[-1:], *new], strict=False) if above else zip(new[1:], new, strict=False)
            )
        number, ids = self._gets.get((line.session, namespace), (-1, []))
        follows = number >= 0 and new[:1] == ids[len(above) : len(above) + 1] and above == ids[: len(above)]
        self._calls += 1
        after = number if follows else -1
        return Call(ids=above + new, t_ms=line.t, gets=False, start=len(above), after=after, size_bytes=line.bytes)

    def _up(self, parent: list[int]) -> list[int]:
        """The chain down to a block, as far as it was seen."""
        chain, seen = parent, set(parent)
        while chain and (above := self._parents.get(chain[-1])) is not None and above not in seen:
            chain.append(above)
            seen.add(above)
        return chain[::-1]


def _in(namespace: int, keys: list[int]) -> list[int]:
    """Ids of a chain's blocks. Who asks for a block twice in one call uses it once."""
    return [namespace << NAMESPACE_SHIFT | key for key in dict.fromkeys(keys)]
