"""Drain: puts are refused, what is held ends, what is only in DRAM is flushed, the most valuable first."""

import asyncio

import pytest

from kvstored.mover.flush_order import hottest_first
from kvstored.policy.watermarks import Watermarks
from kvstored.store.outcomes import RESERVED, THROTTLED
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain
from kvstored.testing.waiting import until

FULL = Watermarks(high=1.0, low=0.99, batch=1.0)


def deep(blocks=32, capacity_blocks=1000):
    return Node(blocks, below=MemoryTier(capacity_blocks * BLOCK_BYTES), watermarks=FULL)


def written(node):
    """Hashes in the order in which they were written."""
    return [hash_ for _, hash_ in node.lower.blocks]


def order_of(node):
    return [entry.hash for entry in node.parts.catalog.order("alice", BLOCK_BYTES)]


# ---- the order of a flush ----


async def test_a_flush_begins_at_the_warm_end_and_writes_parents_before_children():
    async with deep() as node:
        session = await node.session()
        space = await node.space(session)
        for name in ("old", "new"):
            await node.put(session, space, chain(name, 4))
        held = await node.get(session, space, chain("old", 2))
        node.store.reads.release(session, [held.leases[0].lease_id])
        before = order_of(node)
        assert (await node.parts.below.mover.flush(5)) == (8, 0)
        assert written(node) == [*chain("old", 2), *chain("new", 4), *chain("old", 4)[2:]]
        assert order_of(node) == before, "a flush is no use"


async def test_a_child_that_is_warmer_than_its_parents_waits_for_them():
    async with deep() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        await node.put(session, space, chain("b", 4))
        node.parts.catalog.touch([space.entries[chain("a", 4)[3]]])
        assert await node.parts.below.mover.flush(5) == (8, 0)
        assert written(node) == [*chain("a", 4), *chain("b", 4)]


async def test_several_orders_are_written_in_turns(monkeypatch):
    monkeypatch.setattr("kvstored.mover.flush_order.SLICE_BLOCKS", 2)
    async with Node(32, below=MemoryTier(), segment_blocks=8, watermarks=FULL) as node:
        sessions = [await node.session(tenant) for tenant in ("alice", "bob")]
        for session, name in zip(sessions, "ab", strict=True):
            await node.put(session, await node.space(session), chain(name, 4))
        steps = [entry.hash for step in hottest_first(node.parts.catalog) for entry in step]
        a, b = chain("a", 4), chain("b", 4)
        assert steps == [*a[:2], *b[:2], *a[2:], *b[2:]]


@pytest.mark.parametrize("walked", [0, 100])
async def test_an_order_too_long_to_walk_is_written_too_and_the_newest_first(walked, monkeypatch):
    monkeypatch.setattr("kvstored.mover.flush_order.WALK_BLOCKS_MAX", walked)
    async with deep() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 3))
        await node.put(session, space, chain("b", 3))
        steps = [entry.hash for step in hottest_first(node.parts.catalog) for entry in step]
        assert steps == [*chain("b", 3), *chain("a", 3)]


# ---- drain ----


async def test_a_drain_waits_for_what_is_held_and_flushes_also_what_was_committed_meanwhile():
    async with deep() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        held = await node.get(session, space, chain("a", 4))
        reserved = await node.reserve(session, space, chain("late", 2))
        draining = asyncio.create_task(node.store.drains.drain(5.0))
        await until(lambda: len(node.lower.blocks) == 4)
        assert list(await node.put(session, space, chain("b", 1))) == [THROTTLED]
        assert node.counters["drained_puts"] == 1
        assert not draining.done()
        await node.commit(session, reserved, chain("late", 2))
        node.store.reads.release(session, [held.leases[0].lease_id])
        drained = await draining
        assert drained.complete
        assert (drained.written_blocks, drained.left_blocks) == (6, 0)
        assert (await node.get(session, space, chain("late", 2))).blocks == 2, "gets are served"


async def test_what_is_still_held_or_left_at_the_deadline_is_told():
    async with deep(capacity_blocks=1) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        await node.get(session, space, chain("a", 2))
        await node.reserve(session, space, chain("b", 2))
        draining = asyncio.create_task(node.store.drains.drain(5.0))
        await until(lambda: node.lower.calls["store"])
        node.clock.now += 6
        drained = await draining
        assert not drained.complete
        assert (drained.leases, drained.reservations) == (1, 1)
        assert (drained.written_blocks, drained.left_blocks) == (1, 3)


async def test_a_drain_that_is_taken_back_ends_at_once_and_puts_are_taken():
    async with deep() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        await node.get(session, space, chain("a", 2))
        draining = asyncio.create_task(node.store.drains.drain(1000.0))
        await until(lambda: len(node.lower.blocks) == 2)
        node.store.drains.end()
        drained = await draining
        assert (drained.leases, drained.left_blocks) == (1, 0)
        assert list(await node.put(session, space, chain("b", 1))) == [RESERVED]


async def test_a_drain_that_is_taken_back_before_its_first_turn_is_none():
    """Both were asked for in one turn: what was said last counts."""
    async with deep() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        await node.get(session, space, chain("a", 2))
        draining = asyncio.ensure_future(node.store.drains.drain(1000.0))
        assert node.store.writes.draining
        node.store.drains.end()
        assert (await draining).leases == 1
        assert list(await node.put(session, space, chain("b", 1))) == [RESERVED]


async def test_a_drain_whose_caller_left_stops_flushing_and_holds_nothing():
    async with deep() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        node.lower.gate.clear()
        draining = asyncio.create_task(node.store.drains.drain(1000.0))
        await until(lambda: node.lower.calls["store"])
        draining.cancel()
        node.lower.gate.set()
        await asyncio.wait([draining])
        assert not any(entry.holds for entry in space.entries.values())


async def test_a_drain_without_a_lower_tier_waits_for_leases_only():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        drained = await node.store.drains.drain(5.0)
        assert drained.complete
        assert not drained.written_blocks
