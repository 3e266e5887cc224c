"""Room between tenants and block sizes: who gives up a segment, and who does not have to."""

import asyncio

import pytest

from kvstored.policy.watermarks import Watermarks
from kvstored.store.outcomes import MISS, NO_ROOM, RESERVED, THROTTLED
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain

FULL = Watermarks(high=1.0, low=0.99, batch=1.0)


async def two_tenants(node):
    alice, bob = await node.session("alice"), await node.session("bob")
    return alice, await node.space(alice), bob, await node.space(bob)


async def put_at_last(node, session, space, hashes, tries=4000):
    """Put and try again, as clients do when they are throttled; outcomes of every try."""
    tried = []
    for _ in range(tries):
        tried.append(list(await node.put(session, space, hashes)))
        if RESERVED in tried[-1]:
            return tried
        await asyncio.sleep(0.005)  # a retired segment's memory is made in a thread
    raise AssertionError(f"no room after {tries} tries: {tried[-1]}")


@pytest.mark.parametrize("below", [False, True])
async def test_the_first_put_of_another_tenant_finds_room_in_a_full_tier(below):
    async with Node(blocks=16, segment_blocks=4, below=MemoryTier() if below else None, watermarks=FULL) as node:
        alice, hers, bob, his = await two_tenants(node)
        await node.put(alice, hers, chain("a", 16))
        tried = await put_at_last(node, bob, his, chain("b", 4))
        assert not any(NO_ROOM in outcomes for outcomes in tried), (
            "room comes: nobody is told that waiting is of no use"
        )
        assert node.parts.dram.tenant_usage()["alice"][1] >= 11  # a segment, and a block at the watermark
        assert bool(node.counters["evicted_lost_blocks"]) is not below


@pytest.mark.parametrize("below", [False, True])
async def test_segments_that_a_tenant_emptied_serve_another(below):
    async with Node(blocks=16, segment_blocks=4, below=MemoryTier() if below else None, watermarks=FULL) as node:
        alice, hers, bob, his = await two_tenants(node)
        await node.put(alice, hers, chain("a", 16))
        await node.store.writes.delete(alice, hers, chain("a", 16))
        for name in range(4000):
            await put_at_last(node, bob, his, chain(f"b{name}", 4))
            if node.parts.dram.tenant_usage()["bob"] == (16 * BLOCK_BYTES, 16):
                break
            await asyncio.sleep(0.005)  # memory is made anew
        else:
            raise AssertionError("bob never got all of the tier")


async def test_a_lease_on_the_oldest_segment_sends_reclaim_to_the_next():
    async with Node(blocks=16, segment_blocks=4) as node:
        alice, hers, bob, his = await two_tenants(node)
        for name in ("a", "b", "c", "d"):
            await node.put(alice, hers, chain(name, 4))
        held = await node.get(alice, hers, chain("a", 1))
        await put_at_last(node, bob, his, chain("e", 4))
        assert (await node.get(alice, hers, chain("a", 4))).blocks == 4
        assert (await node.get(alice, hers, chain("b", 4))).blocks == 0
        node.store.reads.release(alice, [held.leases[0].lease_id])


async def test_a_segment_that_is_being_filled_does_not_keep_its_tenant_from_more():
    async with Node(blocks=16, segment_blocks=4) as node:
        alice, hers, bob, his = await two_tenants(node)
        await node.put(alice, hers, chain("a", 16))
        for _ in range(4000):  # reserved and not committed: its segment has no last use yet
            reserved = await node.reserve(bob, his, chain("c", 4))
            if reserved.reservation_id:
                break
            await asyncio.sleep(0.005)
        await put_at_last(node, bob, his, chain("d", 4))


async def test_a_block_that_fits_no_segment_evicts_nothing():
    async with Node(blocks=16, segment_blocks=4) as node:
        alice, hers, bob, his = await two_tenants(node)
        await node.put(alice, hers, chain("a", 16))
        for session, space in ((alice, hers), (bob, his)):
            reserved = node.store.writes.reserve(session, space, chain("big", 1), [5 * BLOCK_BYTES], b"", 0)
            assert list(reserved.outcomes) == [NO_ROOM]
        assert (await node.get(alice, hers, chain("a", 16))).blocks == 16


async def test_a_segment_too_small_for_the_block_is_left_alone():
    # The last segment has two blocks only.
    async with Node(blocks=10, segment_blocks=4) as node:
        alice, hers, bob, his = await two_tenants(node)
        await node.put(alice, hers, chain("z", 8))
        await node.put(alice, hers, chain("small", 2))
        small = hers.entries[chain("small", 1)[0]].slot >> 20
        node.parts.catalog.segment_used[small] = 0  # the oldest of all
        reserved = node.store.writes.reserve(bob, his, chain("big", 1), [3 * BLOCK_BYTES], b"", 0)
        assert list(reserved.outcomes) == [THROTTLED]
        assert (await node.get(alice, hers, chain("small", 2))).blocks == 2
        assert (await node.get(alice, hers, chain("z", 8))).next == MISS


async def test_an_idle_tenants_blocks_are_demoted_before_the_writers_own():
    async with Node(blocks=16, segment_blocks=4, below=MemoryTier(), watermarks=FULL) as node:
        alice, hers, bob, his = await two_tenants(node)
        await node.put(alice, hers, chain("a", 12))
        for number in range(4000):
            await node.put(bob, his, chain(f"b{number}", 2), wait_s=60)
            if node.parts.dram.tenant_usage()["bob"][1] >= 12:
                break
            await asyncio.sleep(0.005)  # memory is made anew
        else:
            raise AssertionError(f"bob never got more than he began with: {node.parts.dram.tenant_usage()}")
        assert not node.counters["evicted_lost_blocks"]


async def test_whoever_waits_for_room_does_not_ask_again_and_again():
    async with Node(blocks=8, below=MemoryTier(), watermarks=Watermarks(0.9, 0.7, 0.25)) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 8))
        held = await node.get(session, space, chain("a", 8))
        asked = 0
        find = node.lower.find

        async def counted(*args, **kwargs):
            nonlocal asked
            asked += 1
            return await find(*args, **kwargs)

        node.lower.find = counted
        waiting = asyncio.create_task(node.put(session, space, chain("b", 2), wait_s=60))
        for _ in range(200):
            await asyncio.sleep(0)
        assert asked <= 2
        node.store.reads.release(session, [held.leases[0].lease_id])
        assert list(await asyncio.wait_for(waiting, 30)) == [RESERVED] * 2


async def test_whoever_waits_for_room_hears_of_blocks_that_came_to_rest():
    async with Node(blocks=4, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        await node.parts.below.mover.flush(5)
        node.parts.room.evict(list(space.entries.values()), "test")
        node.lower.gate.clear()
        await node.store.prefetches.start(session, [space], chain("a", 4), 0, 0)
        waiting = asyncio.create_task(node.put(session, space, chain("b", 2), wait_s=60))
        for _ in range(20):
            await asyncio.sleep(0)
        early = waiting.done()
        node.lower.gate.set()
        assert not early, "all of DRAM is on its way up"
        assert list(await asyncio.wait_for(waiting, 30)) == [RESERVED] * 2
