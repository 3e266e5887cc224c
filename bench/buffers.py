"""Buffers as an engine has them.

Page-aligned, every page touched before a clock runs, cut into block slots. Slots are used in a
shuffled order, as a paged KV pool would: no two neighbours of a chain lie side by side.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Iterable
from typing import Final

import numpy as np
from kvstored_client import Addresses

_LIBC: Final = ctypes.CDLL(None)
_MEMCMP: Final = _LIBC.memcmp
_MEMCMP.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Pool:
    """A faulted, page-aligned buffer of `blocks` slots; `order` says which slot block i uses."""

    def __init__(self, blocks: int, block_bytes: int, *, seed: int = 0) -> None:
        self.blocks, self.block_bytes = blocks, block_bytes
        self._memory = mmap.mmap(-1, blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._anchor = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._anchor)
        self.clear()
        order = list(range(blocks))
        random.Random(seed).shuffle(order)
        whole = memoryview(self._memory)
        self.views = [whole[slot * block_bytes : (slot + 1) * block_bytes] for slot in order]
        self.addresses = [self.address + slot * block_bytes for slot in order]

    def clear(self) -> None:
        """Zero every byte, which also faults every page in."""
        ctypes.memset(self.address, 0, self.blocks * self.block_bytes)

    def spans(self) -> Addresses:
        """The blocks as an engine names them, by pointer; made anew for each call, inside of what is timed."""
        return Addresses(self.addresses, self.block_bytes)

    def fill(self, seed: int) -> None:
        """Give every block its own pseudo-random bytes."""
        for index, view in enumerate(self.views):
            piece = random.Random(seed << 32 | index).randbytes(4096)
            for start in range(0, self.block_bytes, len(piece)):
                stamp = (index << 32 | start).to_bytes(8, "little")
                view[start : start + len(piece)] = stamp + piece[8:]

    def wrong_blocks(self, other: Pool, blocks: int | None = None) -> int:
        """How many blocks differ from the other pool's, of the first `blocks` or of all."""
        pairs = zip(self.addresses[:blocks], other.addresses[:blocks], strict=True)
        return sum(_MEMCMP(a, b, self.block_bytes) != 0 for a, b in pairs)

    @property
    def size_bytes(self) -> int:
        """All blocks together."""
        return self.blocks * self.block_bytes


def addresses_of(views: Iterable[memoryview]) -> list[int]:
    """Where the bytes of read-only views lie; good for as long as the views are."""
    return [np.frombuffer(view, dtype=np.uint8).ctypes.data for view in views]
