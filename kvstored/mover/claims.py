"""Which blocks are being written below, so that a deleted one and its successor never are at once.

A block that is deleted while its step writes it is deleted below again when the step ends, by its key. A block that
was put anew under the same key must not have been written by then: it would go as well, or be covered by the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstored.catalog.catalog import Entry


class Claims:
    """Entries by key, of all steps under way; one entry may be in two steps."""

    def __init__(self) -> None:
        self._entries: dict[tuple[bytes, bytes], list[Entry]] = {}

    def add(self, entries: Iterable[Entry]) -> None:
        """A step begins."""
        for entry in entries:
            self._entries.setdefault((entry.pool.space.digest, entry.hash), []).append(entry)

    def drop(self, entries: Iterable[Entry]) -> None:
        """It has ended, and has deleted again what it had to."""
        for entry in entries:
            key = (entry.pool.space.digest, entry.hash)
            claimed = self._entries[key]
            claimed.remove(entry)
            if not claimed:
                del self._entries[key]

    def has(self, entry: Entry) -> bool:
        """Whether a step writes this very entry."""
        return any(other is entry for other in self._of(entry))

    def rivals(self, entry: Entry) -> list[Entry]:
        """Other entries of the same key that a step writes: they were forgotten since."""
        return [other for other in self._of(entry) if other is not entry]

    def _of(self, entry: Entry) -> Sequence[Entry]:
        return self._entries.get((entry.pool.space.digest, entry.hash), ())
