"""Lookup: how much of a chain is stored and where, and what loading it would cost."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from math import isfinite
from typing import Final

import msgspec

from kvstored.catalog.catalog import READY, Space
from kvstored.catalog.leases import Session
from kvstored.errors import InvalidArgument
from kvstored.explain.misses import Misses
from kvstored.mover.jobs import Found
from kvstored.policy.cost import ASSUMED_READ_BYTES_PER_S, Estimate, TransferTime, estimate
from kvstored.store.answers import IN_DRAM, ON_NVME, FoundRun, Looked
from kvstored.store.outcomes import HIT, MISS
from kvstored.store.parts import Below, Parts
from kvstored.store.prefetches import Prefetches

_PENDING: Final = 4
_NO_READS: Final = TransferTime(ASSUMED_READ_BYTES_PER_S)


class Wish(msgspec.Struct, frozen=True):
    """What a lookup asks for beside where the blocks are."""

    prefill_tokens_per_s: float = 0.0  # 0: no estimate
    prefetch: bool = False  # what is on NVMe starts coming up
    deadline_s: float = 0.0  # for that; 0: none

    def check(self) -> None:
        """Raises InvalidArgument."""
        if not (isfinite(self.prefill_tokens_per_s) and self.prefill_tokens_per_s >= 0):
            raise InvalidArgument(f"prefill_tokens_per_s is {self.prefill_tokens_per_s}: a rate is over 0 and finite")


class Lookups:
    """The lookups of all sessions. They promise nothing: `get` does."""

    def __init__(self, parts: Parts, misses: Misses, prefetches: Prefetches) -> None:
        self._parts = parts
        self._below = parts.below
        self._revival = parts.revival
        self._misses = misses
        self._prefetches = prefetches

    def lookup(self, spaces: Sequence[Space], hashes: Sequence[bytes]) -> FoundRun | Awaitable[FoundRun]:
        """The longest run from the start that all the spaces have."""
        self._parts.stats[spaces[0].tenant].lookups += 1
        resident = min(len(space.ready_run(hashes)) for space in spaces)
        if resident == len(hashes):
            self._misses.looked_up(spaces, hashes, resident)
            return FoundRun(resident, resident, resident, 0, 0, HIT)
        self._hurry(spaces, hashes)
        if self._below is None:
            return self._count(spaces, hashes, [{}] * len(spaces))
        return self._lookup_below(self._below, spaces, hashes)

    async def _lookup_below(self, below: Below, spaces: Sequence[Space], hashes: Sequence[bytes]) -> FoundRun:
        found = await below.promoter.find(spaces, hashes)
        try:
            return self._count(spaces, hashes, found)
        finally:
            below.promoter.unpin(found)

    async def look(self, session: Session, spaces: Sequence[Space], hashes: Sequence[bytes], wish: Wish) -> Looked:
        """The same, and what is wished beside it. Raises InvalidArgument where that makes no sense."""
        wish.check()
        block_s = _recompute_block_s(spaces[0], wish.prefill_tokens_per_s) if wish.prefill_tokens_per_s else 0.0
        self._parts.stats[spaces[0].tenant].lookups += 1
        self._hurry(spaces, hashes)
        below = self._below
        found = await below.promoter.find(spaces, hashes) if below is not None else [{}] * len(spaces)
        try:
            looked = Looked(self._count(spaces, hashes, found))
            if block_s:
                looked.estimate = self._estimate(spaces, hashes[: looked.run.prefix_blocks], found, block_s)
            if wish.prefetch and looked.run.dram_blocks < looked.run.prefix_blocks:
                pays = looked.run.prefix_blocks if looked.estimate is None else looked.estimate.paying_blocks
                started = await self._prefetches.follow(session, spaces, hashes[:pays], found, wish.deadline_s)
                looked.prefetch_id, looked.queued_blocks = started.prefetch_id, started.queued_blocks
        finally:
            if below is not None:
                below.promoter.unpin(found)
        return looked

    def _hurry(self, spaces: Sequence[Space], hashes: Sequence[bytes]) -> None:
        """What is not verified yet since the restart goes first."""
        if self._revival.active:
            for space in spaces:
                self._revival.hurry(space.entered_run(hashes))

    # ---- where ----

    def _count(self, spaces: Sequence[Space], hashes: Sequence[bytes], found: Sequence[Found]) -> FoundRun:
        for space in spaces:
            space.drop_ended(hashes)
        tiers = [_tiers(space, hashes, have) for space, have in zip(spaces, found, strict=True)]
        # The slowest of the spaces counts, and the run ends with the shortest.
        worst = tiers[0] if len(tiers) == 1 else list(map(max, *tiers))
        pending = worst.count(_PENDING)
        run = FoundRun(
            prefix_blocks=len(worst),
            ready_blocks=worst.index(_PENDING) if pending else len(worst),
            dram_blocks=worst.count(IN_DRAM),
            nvme_blocks=worst.count(ON_NVME),
            pending_blocks=pending,
            next=HIT if len(worst) == len(hashes) else MISS,
        )
        self._misses.looked_up(spaces, hashes, run.prefix_blocks)
        return run

    # ---- how long ----

    def _estimate(
        self, spaces: Sequence[Space], hashes: Sequence[bytes], found: Sequence[Found], block_s: float
    ) -> Estimate:
        """Of blocks that were just counted. What is pending counts as if it came from NVMe last."""
        sizes, below_sizes = [0] * len(hashes), [0] * len(hashes)
        coming_bytes = 0
        for space, have in zip(spaces, found, strict=True):
            entries = space.entries
            for index, hash_ in enumerate(hashes):
                entry = entries.get(hash_)
                size_bytes = have[hash_].size_bytes if entry is None else entry.size_bytes
                sizes[index] += size_bytes
                if entry is None or entry.state != READY:
                    below_sizes[index] += size_bytes
                if entry is not None and entry.state != READY:
                    coming_bytes += size_bytes
        reads, ahead_bytes = _NO_READS, 0
        if self._below is not None:
            reads = self._below.promoter.reads
            ahead_bytes = max(0, self._below.promoter.queue.ahead_bytes - coming_bytes)  # they are in the queue
        return estimate(sizes, below_sizes, ahead_bytes, self._parts.copies, reads, block_s)


def _tiers(space: Space, hashes: Sequence[bytes], have: Found) -> list[int]:
    """Where each block of the run is that starts here: the greater, the longer it takes."""
    entries = space.entries
    tiers: list[int] = []
    for hash_ in hashes:
        entry = entries.get(hash_)
        if entry is not None:
            tiers.append(IN_DRAM if entry.state == READY else _PENDING)
        elif hash_ in have:
            tiers.append(ON_NVME)
        else:
            break
    return tiers


def _recompute_block_s(space: Space, tokens_per_s: float) -> float:
    """How long computing one block takes. Raises InvalidArgument where the namespace does not say how large one is."""
    tokens = int(space.namespace.fields.get("block_tokens", "0"))
    if not tokens:
        raise InvalidArgument("prefill_tokens_per_s needs a namespace whose spec says block_tokens")
    return tokens / tokens_per_s
