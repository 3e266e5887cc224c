"""Content hashes of blocks that a device writes, taken while it writes the next ones."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from kvstored.catalog.catalog import Entry
from kvstored.device import memory
from kvstored.keys import slot_bytes
from kvstored.store.commits import INLINE_COPY_BYTES, in_copiers
from kvstored.store.parts import Parts

BEHIND_BYTES: Final = 4 << 20  # fewer are hashed when all are written: that takes less than being told


class HashesBehind:
    """Hashes what was written so far, piece by piece, in the store's threads.

    The slots must be held until `all` or `drained` has returned.
    """

    def __init__(self, parts: Parts, entries: Sequence[Entry]) -> None:
        self._parts = parts
        self._entries = entries
        self._places: list[tuple[int, int]] = []
        self._jobs: list[asyncio.Future[list[bytes]]] = []
        self._begun = 0  # blocks whose hashing has begun

    @property
    def worthwhile(self) -> bool:
        """Whether there is enough to begin before all is written."""
        return sum([entry.size_bytes for entry in self._entries]) > BEHIND_BYTES

    def prepare(self) -> None:
        """Before all else, while the first blocks are written: the rest of each slot is made zeros, as everywhere."""
        address = self._parts.dram.address
        self._places = [(address(entry.slot), entry.size_bytes) for entry in self._entries]
        memory.zero_many([(at + n, slot_bytes(n) - n) for at, n in self._places if slot_bytes(n) > n])

    def copied(self, count: int) -> None:
        """The leading `count` blocks are written."""
        assert self._places, "prepared before"
        if count > self._begun:
            piece, self._begun = self._places[self._begun : count], count
            loop = asyncio.get_running_loop()
            self._jobs.append(loop.run_in_executor(self._parts.copiers, memory.hash_many, piece))

    async def all(self) -> list[bytes]:
        """Of all blocks, which are written now."""
        rest = self._places[self._begun :]
        rest_bytes = sum(size for _, size in rest)
        if rest_bytes <= INLINE_COPY_BYTES:
            last = memory.hash_many(rest)
        else:
            last = await in_copiers(self._parts, memory.hash_many, rest, rest_bytes)
        return [content_hash for job in self._jobs for content_hash in await job] + last

    async def drained(self) -> None:
        """When nothing reads the slots any more; the hashes are of no use."""
        if self._jobs:
            await asyncio.wait(self._jobs)
