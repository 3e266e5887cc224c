"""A block that was deleted does not come back, wherever it was at that moment."""

import asyncio

from kvstored.outcomes import HIT, MISS
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import Node, chain


async def on_nvme_only(node, session, space, hashes):
    await node.put(session, space, hashes)
    await node.parts.below.mover.flush(5)
    node.parts.room.evict(list(space.entries.values()), "test")


async def test_a_block_deleted_on_its_way_up_does_not_arrive():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await on_nvme_only(node, session, space, chain("a", 4))
        node.lower.gate.clear()
        await node.store.prefetches.start(session, [space], chain("a", 4), 0, 0)
        await asyncio.sleep(0)
        deleted = await node.store.writes.delete(session, space, chain("a", 4)[2:])
        node.lower.gate.set()
        assert deleted == 2
        held = await node.get(session, space, chain("a", 4), wait_s=5)
        assert (held.blocks, held.next) == (2, MISS)
        assert list(await node.put(session, space, chain("a", 4)[:2])) == [HIT] * 2
        node.store.reads.release(session, [held.leases[0].lease_id])
