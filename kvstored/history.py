"""Why a block is not there: a bounded memory of what went away.

A leaf like `errors` and `clock`: whoever removes blocks notes it here, `explain` asks.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Gone(msgspec.Struct, frozen=True, gc=False):
    """Why a block is not there: the verdict of `explain`, when, and by which rule."""

    verdict: str
    rule: str
    wall_s: float


class History:
    """The last blocks that went away, so that a miss can be explained. Bounded: the oldest are dropped."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._gone: dict[tuple[bytes, bytes], Gone] = {}

    def note(self, digest: bytes, hashes: Iterable[bytes], gone: Gone) -> None:
        """Remember why these are gone; one `Gone` is shared by a batch."""
        table = self._gone
        for hash_ in hashes:
            table.pop((digest, hash_), None)
            table[digest, hash_] = gone
        if len(table) > self._limit:
            # Drop a quarter at once: deleting one by one from the front of a dict is quadratic.
            keep = list(table.items())[self._limit // 4 :]
            table.clear()
            table.update(keep)

    def why(self, digest: bytes, hash_: bytes) -> Gone | None:
        """What is known of a block that is not there."""
        return self._gone.get((digest, hash_))
