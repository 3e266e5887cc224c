"""Blocks of an earlier process: verified before anybody reads them, and only what was committed."""

import asyncio
import os

import pytest

from kvstored.catalog.catalog import READY, REVIVING
from kvstored.mover.recency import Recency
from kvstored.store.outcomes import HIT, MISS, PENDING, RESERVED, THROTTLED
from kvstored.testing.keeping import MemoryKeeper
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain, payload
from kvstored.tiers.dram import DramTier


@pytest.fixture
def keeper():
    made = MemoryKeeper()
    yield made
    made.close()


def node_on(keeper, **settings):
    return Node(64, segment_blocks=16, keeper=keeper, **settings)


async def killed(keeper, *names, ranks=True, blocks=10):
    """Memory as a killed daemon leaves it that had stored these chains, in this order."""
    async with node_on(keeper) as node:
        session = await node.session()
        space = await node.space(session)
        for name in names:
            await node.put(session, space, chain(name, blocks))
        if ranks:
            await Recency(node.parts.catalog, node.parts.dram).note_all()
        return keeper.snapshot()


def cold_first(node):
    (order,) = node.parts.catalog.orders.values()
    return [entry.hash for entry in order]


async def test_every_committed_block_is_there_again_and_is_verified_before_it_is_read(keeper):
    left = await killed(keeper, "a", "b")
    async with node_on(left) as node:
        revival = node.parts.revival
        assert revival.left_blocks == 20
        session = await node.session()
        space = await node.space(session)
        found = node.store.reads.lookup([space], chain("a", 10))
        assert (found.prefix_blocks, found.pending_blocks, found.ready_blocks, found.next) == (10, 10, 0, HIT)
        assert {entry.state for entry in space.entries.values()} == {REVIVING}
        verifying = asyncio.create_task(revival.run())
        held = await node.get(session, space, chain("a", 10))
        assert (held.blocks, held.next) == (10, HIT)
        await verifying
        assert {entry.state for entry in space.entries.values()} == {READY}
        assert node.counters["dram_adopted_blocks"] == 20
        assert not revival.active
    left.close()


async def test_what_is_half_written_at_the_kill_is_not_there(keeper):
    async with node_on(keeper) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        reserved = await node.reserve(session, space, chain("half", 3))
        left = keeper.snapshot()
        await node.commit(session, reserved, chain("half", 3))
    async with node_on(left) as node:
        session = await node.session()
        space = await node.space(session)
        await node.parts.revival.run()
        assert node.store.reads.lookup([space], chain("half", 3)).prefix_blocks == 0
        assert (await node.get(session, space, chain("a", 2))).blocks == 2
        assert await node.put(session, space, chain("half", 3)) == bytes([RESERVED] * 3)
        assert node.parts.dram.adoption.dropped == {"half_written": 3}
    left.close()


async def test_a_block_whose_bytes_changed_is_a_miss_that_is_counted_and_explained(keeper):
    left = await killed(keeper, "a")
    victim = payload(chain("a", 10)[4])
    for name, fd in left.held.items():
        at = os.pread(fd, 1 << 20, 0).find(victim) if name.startswith("seg") else -1
        if at >= 0:
            os.pwrite(fd, b"!", at + 100)
    async with node_on(left) as node:
        session = await node.session()
        space = await node.space(session)
        verifying = asyncio.create_task(node.parts.revival.run())
        held = await node.get(session, space, chain("a", 10))
        assert (held.blocks, held.next) == (4, MISS)
        await verifying
        assert node.counters["corrupt_blocks"] == 1
        gone = node.parts.history.why(space, chain("a", 10)[4])
        assert gone.reason == "corrupt"
        assert "after a restart" in gone.rule
        assert node.parts.dram.usage().blocks == 9
    left.close()


async def test_the_eviction_order_is_what_it_was(keeper):
    async with node_on(keeper) as node:
        session = await node.session()
        space = await node.space(session)
        for name in "abc":
            await node.put(session, space, chain(name, 5))
        node.store.reads.touch(space, chain("a", 5))
        before = cold_first(node)
        await Recency(node.parts.catalog, node.parts.dram).note_all()
        left = keeper.snapshot()
    async with node_on(left) as node:
        await node.parts.revival.run()
        assert cold_first(node) == before
    left.close()


async def test_blocks_that_were_in_no_order_yet_come_back_as_the_warmest_children_colder_than_parents(keeper):
    async with node_on(keeper) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("old", 5))
        await Recency(node.parts.catalog, node.parts.dram).note_all()
        await node.put(session, space, chain("new", 5))
        left = keeper.snapshot()
    async with node_on(left) as node:
        await node.parts.revival.run()
        assert cold_first(node) == chain("old", 5)[::-1] + chain("new", 5)[::-1]
    left.close()


async def test_what_somebody_asks_for_is_verified_first(keeper):
    left = await killed(keeper, "a", "b", "c")
    async with node_on(left) as node:
        session = await node.session()
        space = await node.space(session)
        revival = node.parts.revival
        revival.hurry([space.entries[hash_] for hash_ in chain("b", 3)])
        assert [entry.hash for entry in revival._next()] == chain("b", 3)[::-1]
        revival._waiting.update(entry.slot for entry in space.entries.values())  # as if it had not been taken
        await revival.run()
    left.close()


async def test_a_block_deleted_while_it_waits_to_be_verified_stays_deleted(keeper):
    left = await killed(keeper, "a")
    async with node_on(left) as node:
        session = await node.session()
        space = await node.space(session)
        assert await node.store.writes.delete(session, space, chain("a", 10)[5:]) == 5
        await node.parts.revival.run()
        assert (await node.get(session, space, chain("a", 10))).blocks == 5
        assert node.parts.dram.usage().blocks == 5
        again = left.snapshot()
    async with node_on(again) as node:
        assert node.parts.revival.left_blocks == 5
        await node.parts.revival.run()
    for each in (left, again):
        each.close()


async def test_a_block_deleted_while_somebody_reads_it_does_not_come_back(keeper):
    async with node_on(keeper) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        held = await node.get(session, space, chain("a", 4))
        await node.store.writes.delete(session, space, chain("a", 4)[2:])
        left = keeper.snapshot()
        node.store.reads.release(session, [held.leases[0].lease_id])
    async with node_on(left) as node:
        await node.parts.revival.run()
        session = await node.session()
        space = await node.space(session)
        assert (await node.get(session, space, chain("a", 4))).blocks == 2
    left.close()


async def test_blocks_of_a_namespace_that_nobody_noted_are_dropped(keeper, monkeypatch):
    async def forget(self, namespaces):
        pass

    monkeypatch.setattr(DramTier, "remember_namespaces", forget)
    left = await killed(keeper, "a")
    async with node_on(left) as node:
        assert node.parts.revival.left_blocks == 0
        assert node.parts.dram.adoption.dropped == {"namespace_unknown": 10}
        assert node.parts.dram.usage().used_bytes == 0
        node.parts.dram.audit()
    left.close()


async def test_a_put_of_a_block_that_waits_to_be_verified_is_pending_and_takes_no_slot(keeper):
    left = await killed(keeper, "a")
    async with node_on(left) as node:
        session = await node.session()
        space = await node.space(session)
        assert await node.put(session, space, chain("a", 10)) == bytes([PENDING] * 10)
        await node.parts.revival.run()
        assert await node.put(session, space, chain("a", 10)) == bytes([HIT] * 10)
    left.close()


async def test_what_nvme_has_too_is_known_again(keeper):
    below = MemoryTier()
    async with node_on(keeper, below=below) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 10))
        await node.parts.below.mover.flush(5.0)
        await node.put(session, space, chain("b", 10))
        left = keeper.snapshot()
    async with node_on(left, below=below) as node:
        await node.parts.revival.run()
        (space,) = node.parts.catalog.spaces.values()
        assert all(space.entries[hash_].below for hash_ in chain("a", 10))
        assert not any(space.entries[hash_].below for hash_ in chain("b", 10))
    left.close()


async def test_a_tier_that_is_full_of_unverified_blocks_takes_new_ones_as_they_are_verified(keeper):
    left = await killed(keeper, "a", blocks=64)
    async with node_on(left) as node:
        session = await node.session()
        space = await node.space(session)
        assert set(await node.put(session, space, chain("new", 2))) == {THROTTLED}  # nothing can go yet
        await node.parts.revival.run()
        assert set(await node.put(session, space, chain("new", 2))) == {RESERVED}
        assert chain("a", 64)[-1] not in space.entries
    left.close()


async def test_restart_after_restart_nothing_is_lost(keeper):
    left = await killed(keeper, "a", "b")
    for _ in range(3):
        async with node_on(left) as node:
            again = left.snapshot()  # killed before anything was verified
        left.close()
        left = again
    async with node_on(left) as node:
        await node.parts.revival.run()
        session = await node.session()
        space = await node.space(session)
        for name in "ab":
            assert (await node.get(session, space, chain(name, 10))).blocks == 10
    left.close()


async def test_a_walk_that_is_overtaken_by_a_use_ends_and_the_next_one_is_whole(keeper, monkeypatch):
    monkeypatch.setattr("kvstored.mover.recency.PIECE_BLOCKS", 3)
    monkeypatch.setattr("kvstored.mover.recency.PAUSE_S", 0.0)
    async with node_on(keeper) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 9))
        (order,) = node.parts.catalog.orders.values()
        recency = Recency(node.parts.catalog, node.parts.dram)
        walking = asyncio.create_task(recency._walk(order))
        await asyncio.sleep(0)
        held = await node.get(session, space, chain("a", 9)[:6])
        await walking
        node.store.reads.release(session, [held.leases[0].lease_id])
        await recency._walk(order)
        left = keeper.snapshot()
        before = cold_first(node)
    async with node_on(left) as node:
        await node.parts.revival.run()
        assert cold_first(node) == before
        assert node.parts.dram.usage().used_bytes == 9 * BLOCK_BYTES
    left.close()


async def test_two_that_verify_at_once_share_the_work_and_both_end(keeper):
    left = await killed(keeper, "a", "b")
    async with node_on(left) as node:
        revival = node.parts.revival
        await asyncio.gather(revival.run(), revival.run())
        assert revival.left_blocks == 0
        ended = asyncio.create_task(revival.run())
        await asyncio.sleep(0)
        assert ended.done()
    left.close()


async def test_asking_again_and_again_makes_no_longer_queue(keeper):
    left = await killed(keeper, "a")
    async with node_on(left) as node:
        session = await node.session()
        space = await node.space(session)
        for _ in range(3):
            node.store.reads.lookup([space], chain("a", 10))
        assert len(node.parts.revival._urgent) == 10
    left.close()
