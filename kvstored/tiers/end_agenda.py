"""When each extent of a volume is to be looked at for blocks that have ended: see `end_sweep`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvstored.lifetime import Expiry


class EndAgenda:
    """When each extent of a volume is to be looked at."""

    def __init__(self) -> None:
        self._due_s: dict[int, float] = {}

    def note(self, number: int, when_s: float) -> None:
        """Not later than then."""
        self._due_s[number] = min(when_s, self._due_s.get(number, when_s))

    def look_at(self, numbers: Collection[int]) -> None:
        """As soon as possible: nothing is known of these."""
        self._due_s.update(dict.fromkeys(numbers, 0.0))

    def note_all(self, ends: Iterable[tuple[int, Expiry | None]]) -> None:
        """Blocks that were written: the extent and the end of each."""
        for number, expiry in ends:
            if expiry is not None:
                self.note(number, expiry.expires_s)

    def next(self, now_s: float) -> int | None:
        """One that is due, which is taken off."""
        number = next((number for number, due_s in self._due_s.items() if due_s <= now_s), None)
        if number is not None:
            del self._due_s[number]
        return number
