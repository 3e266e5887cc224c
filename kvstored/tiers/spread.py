"""One call's blocks, spread over the volumes of the NVMe tier."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvstored.tiers.base import Health, Store
from kvstored.tiers.volume import Volume


async def spread_store(
    volumes: Sequence[Volume], tenant: str, stores: Sequence[Store], wanted: Sequence[int], share_blocks: int
) -> list[bool]:
    """Store the blocks at the positions `wanted`; what one volume cannot take is offered to the others.

    Returns, for each of `stores`, whether it was stored now.
    """
    done = [False] * len(stores)
    rest = list(volumes)
    while wanted and (shares := _share(rest, wanted, share_blocks)):
        parts = await asyncio.gather(*(v.store(tenant, [stores[i] for i in share]) for v, share in shares))
        for (volume, share), part in zip(shares, parts, strict=True):
            for position, stored in zip(share, part, strict=True):
                done[position] = stored
            if not all(part):
                rest.remove(volume)
        wanted = [i for i in wanted if not done[i]]
    return done


def _share(
    volumes: Sequence[Volume], positions: Sequence[int], share_blocks: int
) -> list[tuple[Volume, Sequence[int]]]:
    """Consecutive blocks for each healthy volume: first where most is empty, then where least was written.

    Not by free bytes: the volume that recycled last would always have most, and the others' blocks grow old.
    """
    healthy = [volume for volume in volumes if volume.health is Health.OK]
    healthy.sort(key=lambda volume: (-volume.table.free_extents, volume.table.placed_bytes))
    count = min(len(healthy), -(-len(positions) // share_blocks))
    size = -(-len(positions) // count) if count else 0
    shares = [(healthy[i], positions[i * size : (i + 1) * size]) for i in range(count)]
    return [(volume, share) for volume, share in shares if share]


def scatter(count: int, positions: Sequence[Sequence[int]], parts: Sequence[Sequence[bool]]) -> list[bool]:
    """Results of shares, back in the order of the whole."""
    results = [False] * count
    for chosen, part in zip(positions, parts, strict=True):
        for position, result in zip(chosen, part, strict=True):
            results[position] = result
    return results
