"""LMDB's data file read without LMDB: what can still be had of a damaged one.

Pages carry no checksum and LMDB trusts them, so a damaged file can end or hang whoever opens it.
This looks at each page by itself, follows nothing, and gives whatever looks like a key and a
value; the CRC in the value tells what is one. Pages that are not in use any more are still in
the file, so that what comes may be older than what counted last.
"""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = resource.getpagesize()
# page number, padding, flags, end of the pointers, begin of the nodes
_PAGE: Final = struct.Struct("<QHHHH")
# low and high half of the value's size, flags, bytes of the key
_NODE: Final = struct.Struct("<HHHH")
_LEAF: Final = 0x02
_ELSEWHERE: Final = 0x01  # the value is on pages of its own; its number stands here


def entries(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of all leaves, in no order; raises OSError where the file cannot be read."""
    with path.open("rb") as file:
        while len(page := file.read(PAGE_BYTES)) == PAGE_BYTES:
            if page[10] & _LEAF:
                yield from _nodes(page)


def _nodes(page: bytes) -> Iterator[tuple[bytes, bytes]]:
    lower = _PAGE.unpack_from(page)[3]
    if not _PAGE.size <= lower <= PAGE_BYTES:
        return
    for (at,) in struct.iter_unpack("<H", page[_PAGE.size : lower - lower % 2]):
        if not _PAGE.size <= at <= PAGE_BYTES - _NODE.size:
            continue
        low, high, flags, key_bytes = _NODE.unpack_from(page, at)
        begin = at + _NODE.size + key_bytes
        size = low | high << 16
        if not flags & _ELSEWHERE and begin + size <= PAGE_BYTES:
            yield page[begin - key_bytes : begin], page[begin : begin + size]
