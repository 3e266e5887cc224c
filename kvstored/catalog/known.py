"""The run that was found last in a space, kept while nothing of it changes.

Who gets blocks has looked them up just before, or gets them again. To find a run is a look at each hash, each entry and
each slot, none of which is in a cache after a pause: more than half of the time of a get of 512 blocks.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from kvstored.catalog.spaces import Entry


KNOWN_BLOCKS_MAX: Final = 1024  # in a run, as many as a session remembers hashes of


class Places(msgspec.Struct, frozen=True):
    """Where the blocks of a run lie."""

    slots: array[int]
    runs: list[tuple[int, int]]  # first slot and number of those that lie side by side


class KnownRun(msgspec.Struct, eq=False):
    """Entries that are all readable, in the order of the hashes."""

    hashes: tuple[bytes, ...]  # the very tuple that was asked with
    entries: list[Entry]  # nobody may change it
    places: Places | None = None  # once somebody wanted to know

    def right(self, entries: dict[bytes, Entry]) -> bool:
        """Whether it is what one would find now; for tests."""
        there = all(entries.get(hash_) is entry for hash_, entry in zip(self.hashes, self.entries, strict=True))
        slots = [entry.slot for entry in self.entries]
        return there and (self.places is None or list(self.places.slots) == slots)
