"""What is expected to be asked for comes up before it is: only where it costs nobody anything."""

import asyncio

from kvstored.policy.quota import Quota
from kvstored.policy.watermarks import Watermarks
from kvstored.store import hints
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain
from kvstored.testing.waiting import until

MARKS = Watermarks(high=0.9, low=0.1, batch=0.05)


def node_of(blocks=32, **settings):
    return Node(blocks=blocks, below=MemoryTier(), predicts=True, watermarks=MARKS, **settings)


async def talk(node, session, space, name, turns, *, interval_s=100.0):
    """A conversation of two blocks a turn; its hashes."""
    hashes = chain(name, 2 * turns)
    for turn in range(turns):
        have, fresh = hashes[: 2 * turn], hashes[2 * turn : 2 * turn + 2]
        if have:
            held = await node.get(session, space, have, wait_s=60)
            assert held.blocks == len(have)
            node.store.reads.release(session, [lease.lease_id for lease in held.leases])
        await node.put(session, space, fresh, parent=have[-1] if have else b"", wait_s=60)
        node.clock.now += interval_s
    return hashes


async def sink(node, space, hashes):
    await node.parts.below.mover.flush(5.0)
    node.parts.room.evict([space.entries[hash_] for hash_ in hashes if hash_ in space.entries], "test")


async def expect(node):
    """All that is due by now has come, or not."""
    await node.store.predictions.look()
    await node.settle()


async def test_a_regular_conversation_is_there_before_it_goes_on():
    async with node_of() as node:
        session = await node.session()
        space = await node.space(session)
        hashes = await talk(node, session, space, "a", 4)
        await sink(node, space, hashes)
        node.clock.now -= 20  # the next turn is 20 s away
        await expect(node)
        assert not space.entries
        node.clock.now += 15
        await expect(node)
        assert set(space.entries) == set(hashes)
        assert (node.counters["predicted_turns"], node.counters["predicted_blocks"]) == (1, 8)
        loads = node.lower.calls["load"]
        assert (await node.get(session, space, hashes)).blocks == 8
        assert node.lower.calls["load"] == loads


async def test_the_daemon_looks_by_itself_when_a_turn_is_due(monkeypatch):
    monkeypatch.setattr("kvstored.policy.turns.INTERVAL_S_MIN", 0.0)
    async with node_of() as node:
        session = await node.session()
        space = await node.space(session)
        predictions = node.store.predictions
        begin, due = predictions._begin, asyncio.Event()
        monkeypatch.setattr(predictions, "_begin", due.set)
        hashes = await talk(node, session, space, "a", 4, interval_s=0.05)
        await sink(node, space, hashes)
        await due.wait()  # however long that took, it is looked only now
        begin()
        await until(lambda: hashes[-1] in space.entries)
        await node.settle()
        assert set(space.entries) == set(hashes)


async def test_a_conversation_that_is_said_to_be_over_is_not_expected():
    async with node_of() as node:
        session = await node.session()
        space = await node.space(session)
        hashes = await talk(node, session, space, "a", 4)
        await node.store.hints.hint(session, space, hashes[-2:], hints.Wish(final=True))
        await sink(node, space, hashes)
        await expect(node)
        assert not space.entries


async def test_it_is_off_by_default():
    async with Node(blocks=32, below=MemoryTier(), watermarks=MARKS) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = await talk(node, session, space, "a", 4)
        await sink(node, space, hashes)
        await expect(node)
        assert not space.entries
        assert not node.parts.turns


async def test_only_free_room_below_the_high_mark_is_taken_and_nobody_pays():
    async with node_of(blocks=20) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = await talk(node, session, space, "a", 4)
        await sink(node, space, hashes)
        await node.put(session, space, chain("hot", 12))
        await node.parts.below.mover.flush(5.0)  # they could be evicted at no cost
        await expect(node)
        assert set(space.entries) == {*chain("hot", 12), *hashes[:5]}, "17 of 20: a step below the high mark"
        assert not node.counters["evictions_inline_blocks"]
        assert not node.counters["demotions_watermark_blocks"]
        assert not +node.lower.pins


async def test_a_tenant_at_its_limit_does_not_pay_for_its_own_expectations():
    quotas = {"alice": Quota(limit_bytes=8 * BLOCK_BYTES)}
    async with node_of(blocks=32, quotas=quotas) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = await talk(node, session, space, "a", 4)
        await sink(node, space, hashes)
        await node.put(session, space, chain("hot", 6), wait_s=60)
        await node.parts.below.mover.flush(5.0)
        await expect(node)
        assert set(space.entries) == {*chain("hot", 6), *hashes[:2]}


async def test_what_is_gone_below_is_not_expected_any_more():
    async with node_of() as node:
        session = await node.session()
        space = await node.space(session)
        hashes = await talk(node, session, space, "a", 4)
        await sink(node, space, hashes)
        node.lower.blocks.clear()
        await expect(node)
        assert not space.entries


async def test_tenants_are_remembered_apart_and_forgotten_when_they_leave():
    async with node_of() as node:
        alice, bob = await node.session("alice"), await node.session("bob")
        for session in (alice, bob):
            await talk(node, session, await node.space(session), "a", 2)
        assert set(node.parts.turns) == {"alice", "bob"}
        assert len(node.parts.turns["alice"]) == 1


async def test_a_prediction_yields_to_whoever_asks():
    async with node_of() as node:
        session = await node.session()
        space = await node.space(session)
        hashes = await talk(node, session, space, "a", 4)
        await sink(node, space, hashes)
        await node.put(session, space, chain("b", 2), wait_s=60)
        await sink(node, space, chain("b", 2))
        node.parts.below.promoter.queue.inflight_limit_bytes = 1
        node.lower.gate.clear()
        await node.store.prefetches.start(session, [space], chain("b", 1), -(1 << 31), 0)
        await node.store.predictions.look()
        prefetched = await node.store.prefetches.start(session, [space], chain("b", 2), -(1 << 31), 0)
        assert prefetched.queued_blocks == 1
        node.lower.gate.set()
        await node.settle()
        assert node.lower.loaded[:2] == chain("b", 2), "the lowest priority that a client can give goes before"
        assert set(hashes) <= set(space.entries)


async def test_a_stop_ends_what_is_planned():
    async with node_of() as node:
        session = await node.session()
        space = await node.space(session)
        hashes = await talk(node, session, space, "a", 4)
        await sink(node, space, hashes)
        await node.store.predictions.stop()
        await expect(node)
        assert not space.entries
