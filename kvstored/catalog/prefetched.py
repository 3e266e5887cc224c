"""What came of reads ahead of time: bytes by who wanted them and by what became of them.

Each block that is read ahead ends in one of four ways. Useful: a get had it before it was evicted. Late: a get asked
for it while it was on its way, or it could not have come by its deadline. Wasted: it left DRAM without a get.
Dropped: it did not come, for it was cancelled or could not be read. What is in none of them is there, or coming,
and not asked for yet; a space knows which those are, so that a get elsewhere pays one test of a dictionary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from kvstored.catalog.spaces import PROMOTING, Entry, Space

LOOKUP: Final = "lookup"
EXPLICIT: Final = "explicit"
PREDICTED: Final = "predicted"
SOURCES: Final = (LOOKUP, EXPLICIT, PREDICTED)
ENDS: Final = ("useful", "late", "wasted", "dropped")


class PrefetchAccount:
    """Counters `prefetch_SOURCE_bytes`, of what was begun, and `prefetch_SOURCE_END_bytes`."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters

    def begun(self, space: Space, entries: Sequence[Entry], source: str) -> None:
        """These are to be read, and nobody waits for them."""
        space.prefetched.update(dict.fromkeys(entries, source))
        self._counters[f"prefetch_{source}_bytes"] += space.slot_bytes_of(entries)

    def used(self, space: Space, entries: Iterable[Entry]) -> None:
        """A get has them."""
        self._end(space, entries, "useful")

    def late(self, space: Space, entries: Iterable[Entry]) -> None:
        """A get waits for them, or they cannot come in time."""
        self._end(space, entries, "late")

    def gone(self, space: Space, entry: Entry) -> None:
        """It is about to be forgotten, whatever the reason."""
        self._end(space, (entry,), "dropped" if entry.state == PROMOTING else "wasted")

    def _end(self, space: Space, entries: Iterable[Entry], end: str) -> None:
        prefetched, counters = space.prefetched, self._counters
        for entry in entries:
            source = prefetched.pop(entry, None)
            if source is not None:
                counters[f"prefetch_{source}_{end}_bytes"] += entry.pool.slot_bytes
