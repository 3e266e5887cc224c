"""What is to come up from the lower tier for one get or prefetch: plain state of the promoter."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import msgspec

from kvstored.catalog import Entry, Space
from kvstored.tiers.base import Record

Found = dict[bytes, Record]
Short = tuple[str, int, int]  # tenant, slot bytes, slots


class Search(msgspec.Struct, eq=False):
    """Where the blocks of one space are: in DRAM, or found below."""

    space: Space
    hashes: list[bytes]
    found: Found

    deleted: set[bytes] = msgspec.field(default_factory=set)  # since it began: what the index says of them may be old

    def missing(self) -> list[bytes]:
        """Those that were seen nowhere yet."""
        entries, found = self.space.entries, self.found
        return [hash_ for hash_ in self.hashes if hash_ not in entries and hash_ not in found]

    def answered(self, asked: Sequence[bytes], records: Sequence[Record | None]) -> list[Record]:
        """Take an answer of the index, which ends before the first that is nowhere; returns what is void of it."""
        void: list[Record] = []
        for hash_, record in zip(asked, records, strict=False):
            if record is not None and hash_ in self.deleted:
                void.append(record)
            elif record is not None:
                self.found[hash_] = record
        nowhere = self.deleted.intersection(asked).union(asked[len(records) : len(records) + 1])
        if nowhere:
            self._end_before(nowhere)
        return void

    def forget(self, hashes: Collection[bytes]) -> list[Record]:
        """These were deleted; returns what was found of them."""
        self.deleted.update(hashes)
        void = [self.found.pop(hash_) for hash_ in hashes if hash_ in self.found]
        self._end_before(hashes)
        return void

    def _end_before(self, nowhere: Collection[bytes]) -> None:
        first = next((index for index, hash_ in enumerate(self.hashes) if hash_ in nowhere), len(self.hashes))
        del self.hashes[first:]


class Batch(msgspec.Struct, eq=False):
    """Blocks of one space that are read with one call."""

    space: Space
    entries: list[Entry]
    records: list[Record]
    size_bytes: int = 0


class Job:
    """What one get or prefetch brings up: its batches and how far they are."""

    def __init__(self, priority: int, deadline_s: float) -> None:
        self.priority = priority
        self.deadline_s = deadline_s  # monotonic; 0 is none
        self.batches: list[Batch] = []
        self.entries: list[Entry] = []
        self.ready_blocks = self.failed_blocks = 0
        self.running = 0
        self.planning = False  # more is to come: not done, even where nothing is under way
        self.short: Short | None = None
        self.done = asyncio.get_running_loop().create_future()

    @property
    def total_blocks(self) -> int:
        """How many blocks it set out to bring."""
        return len(self.entries)

    def settle(self) -> None:
        """Note that batches ended; done when none is left."""
        if self.idle and not self.done.done():
            self.done.set_result(None)

    @property
    def idle(self) -> bool:
        """Nothing is under way and nothing is to come."""
        return not (self.batches or self.running or self.planning)


class Plan(msgspec.Struct):
    """The leading blocks that are in DRAM, on their way there, or just queued: one run per space."""

    runs: list[list[Entry]]
    cut: bool  # there was more to bring, but no room or no place in the queue
