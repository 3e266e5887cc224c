"""Holds on blocks of the engine's own memory while they are saved."""

from __future__ import annotations

from typing import Any, Protocol


class Pins(Protocol):
    """A hold on blocks of the engine: it gives them to nobody, whatever becomes of their request."""

    def hold(self, block_ids: list[int]) -> None:
        """Once more."""

    def release(self, block_ids: list[int]) -> None:
        """Once less."""


class BlockPins:
    """See `Pins`: by the engine's own counts of who uses a block."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def hold(self, block_ids: list[int]) -> None:
        """Once more."""
        self._pool.touch([self._pool.blocks[block] for block in block_ids])

    def release(self, block_ids: list[int]) -> None:
        """Once less; the last of a sequence leaves first, as where the engine frees them."""
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(block_ids)])
