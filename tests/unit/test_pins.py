"""Records found below are pinned, and every pin comes back: `Node` checks it at its end."""

import asyncio

import pytest

from kvstored.catalog.catalog import READY
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import Node, chain
from kvstored.testing.waiting import until


async def on_nvme_only(node, session, space, hashes):
    await node.put(session, space, hashes)
    await node.parts.below.mover.flush(5)
    node.parts.room.evict(list(space.entries.values()), "test")


@pytest.mark.parametrize("verb", ["lookup", "get", "prefetch", "contains", "delete"])
async def test_a_hash_that_is_asked_for_twice_is_let_go(verb):
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await on_nvme_only(node, session, space, chain("a", 2))
        twice = chain("a", 2) * 3
        if verb == "lookup":
            assert (await node.store.reads.lookup([space], twice)).nvme_blocks == 6
        elif verb == "get":
            assert (await node.get(session, space, twice, wait_s=60)).blocks == 6
        elif verb == "prefetch":
            assert (await node.store.prefetches.start(session, [space], twice, 0, 0)).queued_blocks == 2
        elif verb == "contains":
            await node.store.reads.contains(space, twice)
        else:
            assert await node.store.writes.delete(session, space, twice) == 2
        await node.settle()
        assert not +node.lower.pins


@pytest.mark.parametrize("turns", range(6))
async def test_a_lookup_that_is_cancelled_at_any_moment_lets_go(turns):
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        spaces = [await node.space(session), await node.space(session, "other")]
        for space in spaces:
            await on_nvme_only(node, session, space, chain("a", 2))
        asking = asyncio.ensure_future(node.store.reads.lookup(spaces, chain("a", 2)))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: not +node.lower.pins)


@pytest.mark.parametrize("verb", ["lookup", "get"])
@pytest.mark.parametrize("turns", range(8))
async def test_a_block_that_moves_down_at_any_moment_of_the_question_is_found(verb, turns):
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await on_nvme_only(node, session, space, chain("a", 4))
        await node.get(session, space, chain("a", 2), wait_s=60)
        node.store.reads.release(session, list(session.group.leases))
        reads = node.store.reads
        asked = chain("a", 4)
        asking = reads.lookup([space], asked) if verb == "lookup" else reads.get(session, [space], asked, 5)
        question = asyncio.ensure_future(asking)
        for _ in range(turns):
            await asyncio.sleep(0)
        node.parts.room.evict([e for e in list(space.entries.values()) if e.state == READY and not e.holds], "test")
        answer = await question
        assert (answer.prefix_blocks if verb == "lookup" else answer.blocks) == 4
