"""What is to come up from the lower tier for one get or prefetch: plain state of the promoter."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from kvstored.catalog.catalog import Entry, Space
from kvstored.tiers.base import Record

Found = dict[bytes, Record]
Short = tuple[str, int, int]  # tenant, slot bytes, slots

# Priorities; those of prefetches that a client starts lie between the last two.
DEMAND: Final = 1 << 31  # somebody waits for it
LOOKUP: Final = DEMAND - 1  # somebody has looked it up and is about to ask for it
PREDICTED: Final = -DEMAND - 1  # nobody has asked for it yet: below all of those, and evicts nothing


class Search(msgspec.Struct, eq=False):
    """Where the blocks of one space are: in DRAM, or found below."""

    space: Space
    hashes: list[bytes]
    found: Found

    over: bool = False  # its space began anew: whatever the index says is of an earlier epoch
    deleted: set[bytes] = msgspec.field(default_factory=set)  # since it began: what the index says of them may be old

    def missing(self) -> list[bytes]:
        """Those that were seen nowhere yet."""
        entries, found = self.space.entries, self.found
        return [hash_ for hash_ in self.hashes if hash_ not in entries and hash_ not in found]

    def answered(self, asked: Sequence[bytes], records: Sequence[Record | None]) -> list[Record]:
        """Take an answer of the index, which ends before the first that is nowhere; returns what is void of it."""
        if self.over:
            return [record for record in records if record is not None]
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

    def end(self) -> list[Record]:
        """Its space began anew: nothing is to be found any more; returns what was."""
        void = list(self.found.values())
        self.over = True
        self.hashes.clear()
        self.found.clear()
        return void

    def _end_before(self, nowhere: Collection[bytes]) -> None:
        first = next((index for index, hash_ in enumerate(self.hashes) if hash_ in nowhere), len(self.hashes))
        del self.hashes[first:]


class Job:
    """What one get or prefetch brings up: its batches and how far they are."""

    def __init__(self, priority: int, deadline_s: float, source: str = "") -> None:
        self.priority = priority
        self.source = source  # of a prefetch, as `catalog.prefetched` counts it
        self.deadline_s = deadline_s  # monotonic; 0 is none
        self.batches: dict[Batch, None] = {}  # that wait for their turn
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


class Batch(msgspec.Struct, eq=False):
    """Blocks of one space that are read with one call."""

    space: Space
    job: Job
    entries: list[Entry]
    records: list[Record]
    priority: int  # the highest of those who want it
    deadline_s: float  # monotonic, the latest of theirs; 0: none
    size_bytes: int = 0
    waiting: bool = True  # neither begun nor dropped
    speculative: bool = False  # begun for nobody who waits


class Plan(msgspec.Struct):
    """The leading blocks that are in DRAM, on their way there, or just queued: one run per space."""

    runs: list[list[Entry]]
    cut: bool  # there was more to bring, but no room or no place in the queue
