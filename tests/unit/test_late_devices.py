"""A device that does not answer in time: who waits gets an answer, the memory stays busy until the device is done."""

import asyncio

import pytest

from kvstored.catalog.catalog import DEAD, READY
from kvstored.errors import DeviceError
from kvstored.policy.watermarks import Watermarks
from kvstored.store.outcomes import MISS, RESERVED
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import Node, chain
from kvstored.testing.waiting import PATIENCE_S, turns, until


def hang(node):
    """The device does not answer from here on, and nobody waits for it any longer than a moment."""
    node.lower.gate.clear()
    node.parts.below.mover._deadline_s = node.parts.below.promoter._deadline_s = 0.02


def answer(node):
    """It does again; from here on it has as much time as it takes."""
    node.parts.below.mover._deadline_s = node.parts.below.promoter._deadline_s = PATIENCE_S
    node.lower.gate.set()


async def put_below(node, session, space, hashes):
    """Blocks that are only on the lower tier."""
    await node.put(session, space, hashes)
    await node.parts.below.mover.flush(5.0)
    for entry in list(space.entries.values()):
        node.parts.room.forget(entry)


async def test_a_get_is_answered_at_the_deadline_and_its_slots_stay_busy():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 4)
        await put_below(node, session, space, hashes)
        hang(node)
        used = node.parts.dram.usage().used_bytes
        held = await node.get(session, space, hashes, wait_s=60)
        assert (held.blocks, held.next) == (0, MISS)
        assert not space.entries
        assert node.parts.dram.usage().used_bytes == used + 4 * 4096, "a thread may still write there"
        assert node.parts.below.promoter.inflight_bytes == 0, "others may be read"
        assert node.counters["promote_late_blocks"] == 4
        reads = node.parts.below.promoter.reads
        assert (reads._running, reads.samples) == (0, 0), "what hangs is not waited for by the measurement"
        answer(node)
        await node.parts.below.promoter.drained()
        assert node.parts.dram.usage().used_bytes == used
        assert (await node.get(session, space, hashes, wait_s=60.0)).blocks == 4


async def test_a_prefetch_that_is_late_is_done_and_can_be_cancelled():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await put_below(node, session, space, chain("a", 4))
        hang(node)
        started = await node.store.prefetches.start(session, [space], chain("a", 4), 0, 0.0)
        job = await node.store.prefetches.cancel(session, started.prefetch_id)
        assert (job.ready_blocks, job.failed_blocks) == (0, 4)
        answer(node)


async def test_a_demotion_that_is_late_keeps_its_blocks_in_dram_and_others_move_on():
    tier = MemoryTier()
    async with Node(below=tier, blocks=20, watermarks=Watermarks(0.9, 0.5, 0.1)) as node:
        session = await node.session()
        space = await node.space(session)
        hang(node)
        await node.put(session, space, chain("a", 19))
        mover = node.parts.below.mover
        await until(lambda: node.counters["demote_late_blocks"])
        late = [entry for entry in space.entries.values() if entry.holds]
        assert late
        assert all(entry.state == READY for entry in late)
        assert not any(entry.below for entry in late)
        assert (await node.get(session, space, chain("a", 19))).blocks == 19
        answer(node)
        await until(lambda: mover.idle and not any(entry.holds > entry.leases for entry in space.entries.values()))
        assert len(tier.blocks) >= len(late)


async def test_a_device_that_never_ends_a_step_gets_no_more_than_a_few():
    tier = MemoryTier()
    async with Node(below=tier, blocks=64, watermarks=Watermarks(0.2, 0.1, 0.05)) as node:
        session = await node.session()
        space = await node.space(session)
        hang(node)
        await node.put(session, space, chain("a", 64))
        mover = node.parts.below.mover
        await until(lambda: not mover.takes_blocks())
        assert tier.calls["store"] <= 4
        # DRAM lives on as if there were nothing below.
        assert set(await node.put(session, space, chain("b", 16))) == {RESERVED}
        answer(node)
        await until(mover.takes_blocks)


async def test_a_block_that_was_deleted_while_its_copy_was_late_does_not_come_back():
    tier = MemoryTier()
    async with Node(below=tier, blocks=20) as node:
        session = await node.session()
        space = await node.space(session)
        (hash_,) = hashes = chain("a", 1)
        await node.put(session, space, hashes)
        entry = space.entries[hash_]
        hang(node)
        assert await node.parts.below.mover.flush(5.0) == (0, 1)
        with pytest.raises(DeviceError, match="has not ended writing it"):
            await node.store.writes.delete(session, space, hashes)
        assert entry.state == DEAD
        answer(node)
        await until(lambda: not entry.holds and node.parts.below.mover.idle)
        await until(lambda: not tier.blocks)
        assert (await node.get(session, space, hashes)).blocks == 0
        assert await node.store.writes.delete(session, space, hashes) == 0, "and now that is certain"


async def test_a_block_put_anew_while_its_deleted_copy_is_late_is_not_durable_before_that_has_ended():
    tier = MemoryTier()
    async with Node(below=tier, blocks=20) as node:
        session = await node.session()
        space = await node.space(session)
        (hash_,) = hashes = chain("a", 1)
        await node.put(session, space, hashes)
        hang(node)
        mover = node.parts.below.mover
        assert await mover.flush(5.0) == (0, 1)
        with pytest.raises(DeviceError, match="has not ended writing it"):
            await node.store.writes.delete(session, space, hashes)
        await node.put(session, space, hashes)
        entry = space.entries[hash_]
        assert await node.store.writes.durability.persist([entry]) == [False], "the late step would take it away"
        answer(node)
        await until(lambda: not mover._steps)
        assert not tier.blocks
        assert await node.store.writes.durability.persist([entry]) == [True]
        await until(lambda: mover.idle)
        assert len(tier.blocks) == 1


async def test_a_durable_put_waits_for_the_step_that_writes_its_deleted_predecessor():
    tier = MemoryTier()
    async with Node(below=tier, blocks=20) as node:
        session = await node.session()
        space = await node.space(session)
        (hash_,) = hashes = chain("a", 1)
        await node.put(session, space, hashes)
        tier.gate.clear()
        mover = node.parts.below.mover
        flushing = asyncio.create_task(mover.flush(5.0))
        await until(lambda: tier.calls["store"])
        node.parts.room.forget(space.entries[hash_])
        await node.put(session, space, hashes)
        persisting = asyncio.create_task(node.store.writes.durability.persist([space.entries[hash_]]))
        await turns()
        assert tier.calls["store"] == 1
        tier.gate.set()
        await flushing
        assert await persisting == [True]
        await until(lambda: mover.idle)
        assert len(tier.blocks) == 1


async def test_a_late_flush_says_what_is_left():
    tier = MemoryTier()
    async with Node(below=tier) as node:
        session = await node.session()
        space = await node.space(session)
        assert set(await node.put(session, space, chain("a", 4))) == {RESERVED}
        hang(node)
        assert await node.parts.below.mover.flush(5.0) == (0, 4)
        answer(node)
        await until(lambda: len(tier.blocks) == 4)
        assert await node.parts.below.mover.flush(5.0) == (0, 0), "what was stored late counts"
