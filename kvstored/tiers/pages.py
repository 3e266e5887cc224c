"""LMDB's data file read without LMDB: what can still be had of a damaged one.

Pages carry no checksum and LMDB trusts them, so a damaged file can end or hang whoever opens it.
This looks at each page by itself, follows nothing, and gives whatever looks like a key and a
value; the CRC in the value tells what is one. Pages that are not in use any more are still in
the file, so that what comes may be older than what counted last.
"""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = resource.getpagesize()
PIECE_BYTES: Final = 64 * PAGE_BYTES
# page number, padding, flags, end of the pointers, begin of the nodes
_PAGE: Final = struct.Struct("<QHHHH")
# low and high half of the value's size, flags, bytes of the key
_NODE: Final = struct.Struct("<HHHH")
_LEAF: Final = 0x02
_ELSEWHERE: Final = 0x01  # the value is on pages of its own; its number stands here


def entries(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of all leaves that can be read, in no order; raises OSError where there is no such file."""
    with path.open("rb", buffering=0) as file:
        for offset in range(0, os.fstat(file.fileno()).st_size, PIECE_BYTES):
            piece = _read(file.fileno(), offset)
            for at in range(0, len(piece) - PAGE_BYTES + 1, PAGE_BYTES):
                page = piece[at : at + PAGE_BYTES]
                if page[10] & _LEAF:
                    yield from _nodes(page)


def _read(descriptor: int, offset: int) -> bytes:
    """A piece of a file, with zeros for pages that cannot be read."""
    with suppress(OSError):
        return os.pread(descriptor, PIECE_BYTES, offset)
    pages: list[bytes] = []
    for at in range(offset, offset + PIECE_BYTES, PAGE_BYTES):
        try:
            page = os.pread(descriptor, PAGE_BYTES, at)
        except OSError:
            page = bytes(PAGE_BYTES)
        pages.append(page)
    return b"".join(pages)


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
