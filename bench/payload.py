"""Block contents that follow from a number, quick to make and to check whole.

A block is one of a few random patterns with every 8-byte word XORed by a word that follows
from the number, so that any two blocks differ in every word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_PATTERNS: Final = 61  # prime, so that neighbours in a chain use different ones
_MULTIPLIER: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class Payloads:
    """Makes and checks blocks of one size (a multiple of 8 bytes)."""

    def __init__(self, block_bytes: int, *, seed: int = 1) -> None:
        if block_bytes <= 0 or block_bytes % 8:
            raise ValueError(f"block_bytes is {block_bytes}: a positive multiple of 8 is needed")
        words = block_bytes // 8
        self._patterns = np.random.default_rng(seed).integers(0, 1 << 64, (_PATTERNS, words), dtype=np.uint64)
        self._scratch = np.empty((0, words), dtype=np.uint64)

    def make(self, numbers: Sequence[int]) -> Words:
        """One row of words for each number. The array is reused by the next call."""
        if len(self._scratch) < len(numbers):
            self._scratch = np.empty((len(numbers), self._patterns.shape[1]), dtype=np.uint64)
        rows = self._scratch[: len(numbers)]
        for row, number in zip(rows, numbers, strict=True):
            np.bitwise_xor(self._patterns[number % _PATTERNS], _word(number), out=row)
        return rows

    def wrong_bytes(self, number: int, block: Any) -> int:
        """How many bytes of a block (any buffer) are not what the number says."""
        expected = self._patterns[number % _PATTERNS] ^ _word(number)
        found = np.frombuffer(block, dtype=np.uint64)
        if found.shape != expected.shape:
            return int(expected.nbytes)
        if np.array_equal(found, expected):
            return 0
        return int(np.count_nonzero(found.view(np.uint8) != expected.view(np.uint8)))


def _word(number: int) -> np.uint64:
    """A word with no simple relation to its neighbours'; never the same for two numbers below 2**64."""
    return np.uint64((number + 1) * _MULTIPLIER & _MASK)
