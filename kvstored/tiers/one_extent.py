"""One extent in memory: a row of the index, and what is being done with it at the moment."""

from __future__ import annotations

from typing import Final

from kvstored.tiers.formats import ExtentRow

GENERATION_FIRST: Final = 1


class Extent:
    """One extent. Bytes: `append` is where the next block goes, `writing` are placed and not yet settled."""

    __slots__ = (
        "append_bytes",
        "generation",
        "header_bytes",
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
        self.writing_bytes = 0
        self.pins = 0
        self.sealing = False
        self.sealable = True

    @property
    def idle(self) -> bool:
        """Whether nobody reads, writes or seals it."""
        return not (self.pins or self.writing_bytes or self.sealing)
