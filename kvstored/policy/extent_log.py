"""What lies on a simulated NVMe: an append-only log of extents, the oldest recycled whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Final

EXTENTS: Final = 32  # where nothing is said of their size
REINSERT_SHARE: Final = 0.25  # as the daemon has it (nvme.reinsert_share), unless it is told otherwise


class ExtentLog:
    """Blocks in the order in which they were written; `capacity_blocks` None: without a limit.

    As on the device the oldest extent is given up, with all that lies in it, when the next one is begun: so
    between `capacity_blocks` - `extent_blocks` and `capacity_blocks` are there. Raises ValueError for a capacity
    of less than two extents.

    When an extent is begun, and there is no free one left, those blocks of the one that goes next that were hit are
    written again behind what is being written: at most `reinsert_share` of an extent, and no more than the one that
    is begun takes.
    """

    __slots__ = (
        "_extent_blocks",
        "_extents",
        "_extents_max",
        "_hit",
        "_share",
        "present",
        "recycled_blocks",
        "reinserted_blocks",
    )

    def __init__(
        self, capacity_blocks: int | None = None, extent_blocks: int = 0, *, reinsert_share: float = 0.0
    ) -> None:
        self._extent_blocks = extent_blocks or max(1, (capacity_blocks or 0) // EXTENTS)
        self._extents_max = capacity_blocks // self._extent_blocks if capacity_blocks is not None else 0
        if capacity_blocks is not None and self._extents_max < 2:
            raise ValueError(
                f"NVMe has {capacity_blocks} blocks in extents of {self._extent_blocks}: it must hold two extents"
            )
        self._extents: deque[list[Hashable]] = deque()
        self.present: set[Hashable] = set()  # to look into
        self._share = reinsert_share
        self._hit: set[Hashable] = set()
        self.recycled_blocks = 0
        self.reinserted_blocks = 0

    def __contains__(self, block_id: Hashable) -> bool:
        return block_id in self.present

    def __len__(self) -> int:
        return len(self.present)

    def append(self, block_ids: Iterable[Hashable]) -> None:
        """Write blocks that are not there."""
        if not self._extents_max:
            self.present.update(block_ids)
            return
        extents, extent_blocks = self._extents, self._extent_blocks
        begun = False
        for block_id in block_ids:
            if not extents or len(extents[-1]) >= extent_blocks:
                self._begin()
                begun = True
            extents[-1].append(block_id)
            self.present.add(block_id)
        if begun and self._share and len(extents) == self._extents_max:
            self._reinsert()

    def hit(self, block_ids: Iterable[Hashable]) -> None:
        """Blocks that are there were read."""
        if self._share and self._extents_max:
            self._hit.update(block_ids)

    def _reinsert(self) -> None:
        oldest, open_ = self._extents[0], self._extents[-1]
        most = min(int(self._share * self._extent_blocks), self._extent_blocks - len(open_))
        again = [block_id for block_id in oldest if block_id in self._hit]
        self._hit.difference_update(again)
        again = again[:most]
        left = set(again)
        self._extents[0] = [block_id for block_id in oldest if block_id not in left]
        open_ += again
        self.reinserted_blocks += len(again)

    def _begin(self) -> None:
        if len(self._extents) == self._extents_max:
            oldest = self._extents.popleft()
            self.present.difference_update(oldest)
            self._hit.difference_update(oldest)
            self.recycled_blocks += len(oldest)
        self._extents.append([])
