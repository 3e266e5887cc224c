"""One extent in memory: a row of the index, and what is being done with it at the moment."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from kvstored.device.buffer import ALIGN_BYTES
from kvstored.tiers.base import Usage
from kvstored.tiers.formats import ExtentFlags, ExtentRow, State

GENERATION_FIRST: Final = 1


class Extent:
    """One extent. Bytes: `append` is where the next block goes, `writing` are placed and not yet settled."""

    __slots__ = (
        "append_bytes",
        "clean",
        "flags",
        "generation",
        "header_bytes",
        "hits",
        "live_blocks",
        "live_bytes",
        "number",
        "pins",
        "sealable",
        "sealing",
        "sequence",
        "state",
        "tenant",
        "writing_bytes",
    )

    def __init__(self, row: ExtentRow) -> None:
        self.number = row.extent
        self.generation = row.generation
        self.tenant = row.tenant
        self.state = row.state
        self.sequence = row.sequence
        self.append_bytes = row.append_bytes
        self.header_bytes = row.header_bytes
        self.live_bytes = row.live_bytes
        self.live_blocks = row.live_blocks
        self.flags = row.flags
        self.writing_bytes = 0
        self.pins = 0
        self.sealing = False
        self.sealable = True
        # Where no record of this generation lies, the file holds zeros or nothing: nobody's earlier bytes.
        self.clean = False
        self.hits: bytearray | None = None  # a bit for each 4 KiB at which a block begins that was read

    def hit(self, offset: int, extent_bytes: int) -> None:
        """A block that begins there was read."""
        if self.hits is None:
            self.hits = bytearray(-(-extent_bytes // (8 * ALIGN_BYTES)))
        page = offset // ALIGN_BYTES
        self.hits[page >> 3] |= 1 << (page & 7)

    def was_hit(self, offset: int) -> bool:
        """Whether it was, since the extent was begun or last looked at."""
        page = offset // ALIGN_BYTES
        return self.hits is not None and bool(self.hits[page >> 3] & 1 << (page & 7))

    def begin(self, *, sealed: bool) -> None:
        """What it is to hold from here on. It stays pure only as long as nothing but encrypted blocks comes in."""
        self.flags = (self.flags | ExtentFlags.SEALED) if sealed else ExtentFlags.NONE

    @property
    def idle(self) -> bool:
        """Whether nobody reads, writes or seals it."""
        return not (self.pins or self.writing_bytes or self.sealing)


def oldest_or_empty(extents: Sequence[Extent]) -> Extent | None:
    """Of extents that come oldest first one with nothing alive, else the oldest."""
    return next((extent for extent in extents if not extent.live_blocks), next(iter(extents), None))


def recount(extents: Collection[Extent], usage: Usage, extent_bytes: int) -> None:
    """Count a volume's bytes extent by extent and compare with its running totals; AssertionError where they differ."""
    assert usage.used_bytes == sum(e.live_bytes + e.writing_bytes for e in extents)
    assert usage.blocks == sum(e.live_blocks for e in extents)
    dead = 0
    for e in extents:
        filled = {State.FREE: 0, State.OPEN: e.append_bytes}.get(e.state, extent_bytes)
        assert e.live_bytes + e.writing_bytes <= filled, f"extent {e.number} holds more than it has"
        dead += filled - e.live_bytes - e.writing_bytes
    assert usage.dead_bytes == dead
    assert usage.balanced()
