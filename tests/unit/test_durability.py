"""Durable puts: answered when the blocks are below, few writes for many waiters, and never a lie."""

import asyncio

import pytest
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.catalog import READY
from kvstored.errors import FailedPrecondition
from kvstored.store.outcomes import HIT, MISS, NOT_DURABLE, PENDING, RESERVED, THROTTLED
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain
from kvstored.testing.waiting import turns, until
from kvstored.tiers.base import Health


async def reserve(node, session, space, hashes, parent=b"", wait_s=0.0):
    return await node.store.writes.reserve(
        session, space, hashes, [BLOCK_BYTES] * len(hashes), parent, wait_s, durable=True
    )


async def put(node, session, space, hashes, parent=b""):
    """Outcomes of a durable put, those of the commit where blocks were reserved."""
    reserved = await reserve(node, session, space, hashes, parent)
    outcomes = list(reserved.outcomes)
    if reserved.reservation_id:
        committed = iter(await node.commit(session, reserved, hashes))
        outcomes = [next(committed) if outcome == RESERVED else outcome for outcome in outcomes]
    return outcomes


def below(node):
    return {hash_ for _, hash_ in node.lower.blocks}


async def gate_reached(node, stores):
    await until(lambda: node.lower.calls["store"] >= stores)


async def test_a_durable_put_is_answered_when_its_blocks_are_below_and_readable_before():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 4)
        node.lower.gate.clear()
        putting = asyncio.create_task(put(node, session, space, hashes))
        await gate_reached(node, 1)
        assert (await node.get(session, space, hashes)).blocks == 4
        assert not putting.done()
        assert node.store.held()["reservations"] == 1
        node.lower.gate.set()
        assert await putting == [HIT] * 4
        assert below(node) == set(hashes)
        assert all(entry.below for entry in space.entries.values())
        assert node.counters["durable_blocks"] == 4
        assert node.store.held()["reservations"] == 0


async def test_a_put_in_memory_is_answered_without_a_write_below():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        assert list(await node.put(session, space, chain("a", 4))) == [RESERVED] * 4
        assert not node.lower.calls["store"]


async def test_commits_that_wait_together_share_one_write():
    async with Node(blocks=64, below=MemoryTier()) as node:
        session, other = await node.session(), await node.session()
        space = await node.space(session)
        node.lower.gate.clear()
        first = asyncio.create_task(put(node, session, space, chain("first", 1)))
        await gate_reached(node, 1)
        rest = [asyncio.create_task(put(node, session, space, chain(f"c{i}", 4))) for i in range(6)]
        rest += [asyncio.create_task(put(node, other, space, chain(f"d{i}", 4))) for i in range(6)]
        await until(lambda: sum(entry.state == READY for entry in space.entries.values()) == 49)
        await turns()
        node.lower.gate.set()
        assert await first == [HIT]
        assert all(outcomes == [HIT] * 4 for outcomes in await asyncio.gather(*rest))
        assert node.lower.calls["store"] == 2
        assert node.counters["durable_batches"] == 2


async def test_what_is_in_dram_alone_is_brought_below_before_it_is_called_a_hit():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 6)
        await node.put(session, space, hashes[:4])
        assert not below(node)
        reserved = await reserve(node, session, space, hashes[:4])
        assert (reserved.reservation_id, list(reserved.outcomes)) == (0, [HIT] * 4)
        assert below(node) == set(hashes[:4])
        assert await put(node, session, space, hashes) == [HIT] * 6
        assert below(node) == set(hashes)
        node.parts.room.evict(list(space.entries.values()), "test")
        assert list((await reserve(node, session, space, hashes)).outcomes) == [HIT] * 6


async def test_a_block_that_another_session_is_writing_is_not_called_a_hit():
    async with Node(below=MemoryTier()) as node:
        session, other = await node.session(), await node.session()
        space = await node.space(session)
        await node.reserve(other, space, chain("a", 2))
        assert list((await reserve(node, session, space, chain("a", 2))).outcomes) == [PENDING] * 2


async def test_blocks_that_could_not_be_written_are_not_durable_and_stay_in_dram():
    async with Node(below=MemoryTier(2 * BLOCK_BYTES)) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 4)
        outcomes = await put(node, session, space, hashes)
        assert outcomes == [HIT, HIT, NOT_DURABLE, NOT_DURABLE], "parents first: they are useful alone"
        assert below(node) == set(hashes[:2])
        assert (await node.get(session, space, hashes)).blocks == 4
        assert node.counters["durable_failed_blocks"] == 2
        assert list((await reserve(node, session, space, hashes)).outcomes) == outcomes, "asked again, the same"
        node.lower.capacity_bytes = 1 << 20
        assert list((await reserve(node, session, space, hashes)).outcomes) == [HIT] * 4


@pytest.mark.parametrize("health", [Health.READ_ONLY, Health.OFF])
async def test_a_tier_that_takes_nothing_makes_nothing_durable(health):
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        node.lower.health, node.lower.fail_stores = health, True
        assert await put(node, session, space, chain("a", 3)) == [NOT_DURABLE] * 3
        assert (await node.get(session, space, chain("a", 3))).blocks == 3


async def test_an_error_of_the_tier_is_no_acknowledgement_and_the_next_put_is_served(monkeypatch):
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)

        async def broken(tenant, stores):
            raise OSError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(node.lower, "store", broken)
            assert await put(node, session, space, chain("a", 3)) == [NOT_DURABLE] * 3
        assert await put(node, session, space, chain("b", 3)) == [HIT] * 3


async def test_without_a_lower_tier_durability_is_refused_at_open_and_at_reserve():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        with pytest.raises(FailedPrecondition, match=r"nvme\.paths"):
            node.store.writes.reserve(session, space, chain("a", 1), [BLOCK_BYTES], b"", 0.0, durable=True)
        with pytest.raises(FailedPrecondition, match=r"nvme\.paths"):
            await node.store.open_namespace(session, pb.NamespaceSpec(model="m"), durable=True)
        assert not node.store.held()["reservations"]


async def test_a_session_that_ends_while_its_put_waits_leaves_nothing_held():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        node.lower.gate.clear()
        putting = asyncio.create_task(put(node, session, space, chain("a", 4)))
        await gate_reached(node, 1)
        node.store.end_session(session)
        putting.cancel()
        await asyncio.wait([putting])
        node.lower.gate.set()
        await node.store.writes.durability.drained()
        await node.settle()
        assert not any(entry.holds for entry in space.entries.values())
        assert below(node) == set(chain("a", 4)), "a write that was begun is ended"


async def test_a_block_deleted_while_its_put_waits_is_a_miss_and_not_below():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 3)
        node.lower.gate.clear()
        putting = asyncio.create_task(put(node, session, space, hashes))
        await gate_reached(node, 1)
        deleting = asyncio.create_task(node.store.writes.delete(session, space, hashes[2:]))
        await asyncio.sleep(0)
        node.lower.gate.set()
        assert await putting == [HIT, HIT, MISS]
        await deleting
        assert below(node) == set(hashes[:2])


async def test_admission_has_no_say_in_durable_puts(monkeypatch):
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        mover = node.parts.below.mover
        monkeypatch.setattr(mover.gate, "admitted", lambda entries, **kwargs: [])
        await node.put(session, space, chain("plain", 2))
        assert (await mover.flush(5)) == (0, 2)
        assert await put(node, session, space, chain("durable", 2)) == [HIT] * 2
        assert below(node) == set(chain("durable", 2))


async def test_a_device_that_keeps_too_many_writes_gets_no_more_and_nothing_stays_held(monkeypatch):
    monkeypatch.setattr("kvstored.mover.mover.LATE_STEPS_MAX", 0)
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        assert await put(node, session, space, chain("a", 3)) == [NOT_DURABLE] * 3
        assert not node.lower.calls["store"]
        assert not any(entry.holds for entry in space.entries.values())


async def test_two_puts_that_wait_for_room_do_not_wake_each_other_by_what_they_bring_below(monkeypatch):
    async with Node(blocks=4, below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 5)
        await node.put(session, space, hashes[:4])
        held = await node.get(session, space, hashes[:4])
        node.lower.fail_stores = True
        waiting = []
        for _ in range(2):
            waiting.append(asyncio.create_task(reserve(node, session, space, hashes, wait_s=1.0)))
            for _ in range(500):
                await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        assert node.lower.calls["store"] <= 2, "and not again and again, without an end"
        node.clock.now += 10
        node.store.reads.release(session, [held.leases[0].lease_id])
        for reserved in await asyncio.gather(*waiting):
            assert list(reserved.outcomes[:4]) == [NOT_DURABLE] * 4


async def test_a_demotion_under_way_is_shared():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 4)
        await node.put(session, space, hashes)
        node.lower.gate.clear()
        flushing = asyncio.create_task(node.parts.below.mover.flush(5))
        await gate_reached(node, 1)
        reserving = asyncio.create_task(reserve(node, session, space, hashes))
        for _ in range(10):
            await asyncio.sleep(0)
        assert node.lower.calls["store"] == 1, "nobody writes what is on its way"
        node.lower.gate.set()
        assert list((await reserving).outcomes) == [HIT] * 4
        assert await flushing == (4, 0)


async def test_a_durable_chain_stands_in_the_eviction_order_tail_first():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 6)
        await put(node, session, space, hashes[:3])
        await put(node, session, space, hashes)
        assert [entry.hash for entry in node.parts.catalog.order("alice", BLOCK_BYTES)] == hashes[::-1]


async def test_a_draining_store_takes_no_durable_puts_either():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        node.store.writes.draining = True
        reserved = node.store.writes.reserve(session, space, chain("a", 2), [BLOCK_BYTES] * 2, b"", 0, durable=True)
        assert list(reserved.outcomes) == [THROTTLED] * 2
