"""The hits of a tier that knows the future: what no eviction order can exceed."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence


def ideal_hits(requests: Sequence[Sequence[Hashable]], capacity_blocks: int) -> list[int]:
    """Hits of each request by Belady's rule: what is needed again last, goes first.

    A new block may go at once. Of blocks that are needed by the same request next, the deeper
    goes first; so a child always goes before its parent, and every hit is a leading one.
    """
    never = len(requests)
    following = _following(requests)
    next_use: dict[Hashable, int] = {}  # of what is in the tier
    heap: list[tuple[int, int, Hashable]] = []  # latest and deepest first; stale where `next_use` says otherwise
    hits: list[int] = []
    for ids, after in zip(requests, following, strict=True):
        leading = next((place for place, block_id in enumerate(ids) if block_id not in next_use), len(ids))
        hits.append(leading)
        for place, block_id in enumerate(ids):
            if after[place] < never:
                next_use[block_id] = after[place]
                heapq.heappush(heap, (-after[place], -place, block_id))
            else:
                next_use.pop(block_id, None)  # worth nothing from now on
        while len(next_use) > capacity_blocks:
            when, _, block_id = heapq.heappop(heap)
            if next_use.get(block_id) == -when:
                del next_use[block_id]
    return hits


def _following(requests: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """For each block of each request the number of the next request that names it; else that of all."""
    never = len(requests)
    upcoming: dict[Hashable, int] = {}
    following: list[list[int]] = []
    for index in range(len(requests) - 1, -1, -1):
        following.append([upcoming.get(block_id, never) for block_id in requests[index]])
        upcoming.update(dict.fromkeys(requests[index], index))
    following.reverse()
    return following
