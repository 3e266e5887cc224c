"""Asking the lower tier's index where blocks are, while they may move, be deleted, or end with their epoch."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from kvstored.catalog.catalog import Space
from kvstored.mover.jobs import Found, Search
from kvstored.tiers.base import LowerTier


class Searches:
    """Searches of the index that are under way."""

    def __init__(self, below: LowerTier) -> None:
        self._below = below
        self._searches: dict[Search, None] = {}

    async def find(self, spaces: Sequence[Space], hashes: Sequence[bytes]) -> list[Found]:
        """Index records of the blocks that are not in DRAM, per space, up to the first that is nowhere.

        They are pinned: hand each to `plan` or to `unpin`, before anything else can happen.
        """
        # Each once, however often it was asked for: what is pinned twice would have to be let go twice.
        searches = [Search(space, list(dict.fromkeys(hashes)), {}) for space in spaces]
        self._searches.update(dict.fromkeys(searches))
        try:
            # Again, because a block that was in DRAM may have moved down while the index was asked. The last
            # look is here and not in a task: nothing moves between it and the caller.
            while unfinished := [search for search in searches if search.missing()]:
                for failure in await asyncio.gather(*map(self._ask, unfinished), return_exceptions=True):
                    if failure is not None:
                        raise failure
        except BaseException:
            self.unpin([search.found for search in searches])
            raise
        finally:
            for search in searches:
                del self._searches[search]
        return [search.found for search in searches]

    async def _ask(self, search: Search) -> None:
        """Ask the index once for what is missing; the first that is nowhere ends the search there."""
        missing = search.missing()
        records = await self._below.find(search.space.tenant, search.space.digest, missing, prefix=True)
        self._below.unpin(search.answered(missing, records))

    def deleted(self, space: Space, hashes: Collection[bytes]) -> None:
        """Blocks were deleted below: what the index said of them before must not bring them up again."""
        for search in self._searches:
            if search.space is space:
                self._below.unpin(search.forget(hashes))

    def began_anew(self, space: Space) -> None:
        """What the index says of an earlier epoch must not bring anything up in the present one."""
        for search in self._searches:
            if search.space is space:
                self._below.unpin(search.end())

    def unpin(self, found: Sequence[Found]) -> None:
        """Let go of records that nobody will read."""
        self._below.unpin([record for records in found for record in records.values()])
