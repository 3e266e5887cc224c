"""Footers of a volume's extents, read from their files; and whether an index is older than they are.

Blocks, and with them footers, are written before the index knows of them, but never long before. An
index that says of an extent what was true earlier (put back from a copy, or from another time of a
file system that was) must not be gone on with: it would bring back what was deleted, write over
blocks that it does not know, and have files removed that hold what counts.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kvstored.device.file import FileDevice
from kvstored.errors import CorruptData
from kvstored.keys import slot_bytes
from kvstored.tiers.formats import (
    TRAILER_BYTES,
    ExtentRow,
    State,
    footer_bytes,
    unpack_headers,
)
from kvstored.tiers.sources import Source
from kvstored.tiers.trailer import Trailer, unpack_trailer

_EXTENT_FILE: Final = re.compile(r"(\d{8})\.ext")

Footer = tuple[Trailer, bytes]
"""A sealed extent's trailer and headers."""


def extent_files(device: FileDevice, source: Source) -> list[int]:
    """The numbers of the extents that have a file; raises DeviceError."""
    matches = (_EXTENT_FILE.fullmatch(name) for name in device.names(source.extents))
    return sorted(int(match[1]) for match in matches if match)


def read_footers(device: FileDevice, source: Source) -> Iterator[tuple[int, Footer]]:
    """Footers that are whole and say that they are this very extent's."""
    for extent in extent_files(device, source):
        try:
            footer = _footer(source, extent)
        except OSError:
            continue  # unreadable: free space until it is written again
        if footer is not None:
            yield extent, footer


def check_age(device: FileDevice, source: Source, rows: Iterable[ExtentRow]) -> None:
    """Raises CorruptData where an extent's footer is from after its row."""
    known = {row.extent: row for row in rows}
    for extent in extent_files(device, source):
        try:
            newer = _is_newer(source, extent, known.get(extent))
        except OSError:
            continue
        if newer:
            raise CorruptData(f"the index is older than extent {extent}")


def _is_newer(source: Source, extent: int, row: ExtentRow | None) -> bool:
    """Whether the extent was sealed, with blocks in it, after the row was written."""
    trailer = _trailer(source, extent)
    if trailer is None or not trailer.records:
        return False
    if row is None or trailer.generation != row.generation:
        return row is None or trailer.generation > row.generation
    if row.state is not State.OPEN:
        return row.state is State.FREE
    # Sealed, and the process ended before the index could note it; or an index from before its last blocks.
    footer = _footer(source, extent)
    ends = [] if footer is None else [h.offset + slot_bytes(h.size_bytes) for h, _ in unpack_headers(footer[1])]
    return max(ends, default=0) > row.append_bytes


def _trailer(source: Source, extent: int) -> Trailer | None:
    with _path(source, extent).open("rb") as file:
        file.seek(source.extent_bytes - TRAILER_BYTES)
        trailer = unpack_trailer(file.read(TRAILER_BYTES))
    ours = trailer is not None and (trailer.volume, trailer.extent) == (source.identity, extent)
    return trailer if ours else None


def _footer(source: Source, extent: int) -> Footer | None:
    trailer = _trailer(source, extent)
    size = 0 if trailer is None else footer_bytes(trailer.header_bytes)
    if trailer is None or size > source.extent_bytes:
        return None
    with _path(source, extent).open("rb") as file:
        file.seek(source.extent_bytes - size)
        headers = file.read(trailer.header_bytes)
    return (trailer, headers) if zlib.crc32(headers) == trailer.headers_crc else None


def _path(source: Source, extent: int) -> Path:
    return source.extents / f"{extent:08d}.ext"
