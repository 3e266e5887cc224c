"""A number that is shared by all: whoever comes finds some left, however much others would take."""

from __future__ import annotations

from collections import Counter


class FairShare:
    """So many at once, all together. Nobody has more than are left free then, but for its first, unless it is `alone`.

    So one has half at most, a second half of the rest, and who has least is kept out last.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken: Counter[str] = Counter()

    def take(self, who: str, count: int = 1, *, alone: bool = False) -> bool:
        """Take so many; False where it is more than this one's part. They are given back by `leave`."""
        left = self.most - self._taken.total() - count
        taken = self._taken[who]
        if left < 0 or (taken and not alone and taken + count > left):
            return False
        self._taken[who] += count
        return True

    def leave(self, who: str, count: int = 1) -> None:
        """Give them back."""
        assert self._taken[who] >= count, "given back once"
        self._taken[who] -= count
        if not self._taken[who]:
            del self._taken[who]
