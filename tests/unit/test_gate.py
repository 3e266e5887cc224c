"""What the store does with what may not go below, and which of the three ways of making room it used."""

import pytest

from kvstored.catalog.history import Reason
from kvstored.mover.gate import NO_KEY, OVER_BUDGET, Gate
from kvstored.policy.admission import make_admission
from kvstored.policy.forecast import Forecast
from kvstored.policy.watermarks import Watermarks
from kvstored.store.outcomes import RESERVED
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain

FULL = Watermarks(high=1.0, low=0.99, batch=1.0)
MARKS = Watermarks(0.9, 0.5, 0.1)


def gate(name, **settings):
    return Gate(make_admission(name), name=name, **settings)


async def release(node, session, held):
    node.store.reads.release(session, [lease.lease_id for lease in held.leases])


async def test_what_was_asked_for_once_is_dropped_in_a_step_at_the_high_mark_and_the_rest_written_to_the_low_one():
    async with Node(20, below=MemoryTier(), watermarks=MARKS, gate=gate("second_hit")) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("used", 4))
        await release(node, session, await node.get(session, space, chain("used", 4)))
        await node.put(session, space, chain("once", 4))
        await node.put(session, space, chain("new", 10))
        await node.settle()
        assert {hash_ for _, hash_ in node.lower.blocks} == set(chain("used", 4))
        assert node.parts.dram.usage().blocks == 14, "what NVMe does not take is kept: nobody needs the room"
        await node.put(session, space, chain("more", 4))
        await node.settle()
        assert node.parts.dram.usage().blocks == 16, "one step of two"
        assert node.counters["not_admitted_blocks"] == 2
        assert node.counters["not_admitted_bytes"] == 2 * BLOCK_BYTES
        why = node.parts.history.why(space, chain("once", 4)[3])
        assert (why.reason, why.rule) == (Reason.EVICTED, "not admitted to NVMe (policy.admission is second_hit)")
        assert node.counters["demotions_watermark_blocks"] == 6


@pytest.mark.parametrize("overdrawn", [False, True])
async def test_what_may_not_go_below_goes_only_for_room_that_is_needed(overdrawn):
    left = (-BLOCK_BYTES, 100 * BLOCK_BYTES)
    keeping = gate("admit_all", budget=lambda: left, budgeted=True) if overdrawn else gate("second_hit")
    forecast = Forecast(5.0)
    async with Node(100, below=MemoryTier(), watermarks=MARKS, gate=keeping, forecast=forecast) as node:
        session = await node.session()
        space = await node.space(session)
        forecast.demoted(BLOCK_BYTES, 1.0)
        least = 100
        for number in range(300):
            await node.put(session, space, chain(f"c{number}", 1), wait_s=60)
            await node.settle()
            least = min(least, node.parts.dram.usage().blocks) if number >= 90 else 100
        assert not node.lower.blocks
        assert least >= 80, "from the high mark (90) one step (10), not to the low mark (50)"
        assert not node.counters["demotions_forecast_blocks"]
        assert not node.counters["throttled_puts"]


async def test_what_comes_a_second_time_after_it_was_dropped_is_written():
    async with Node(4, below=MemoryTier(), watermarks=FULL, gate=gate("second_hit")) as node:
        session = await node.session()
        space = await node.space(session)
        for name in ("a", "b", "a"):
            assert not node.lower.blocks
            assert list(await node.put(session, space, chain(name, 4))) == [RESERVED] * 4
            await node.settle()
        await node.put(session, space, chain("c", 4), wait_s=60)
        await node.put(session, space, chain("c", 4), wait_s=60)
        assert {hash_ for _, hash_ in node.lower.blocks} == set(chain("a", 4))


async def test_a_refused_block_makes_room_in_line_without_a_wait():
    async with Node(4, below=MemoryTier(), watermarks=FULL, gate=gate("hinted")) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        space.entries[chain("a", 4)[0]].hint = True
        await node.settle()  # one went by the watermark
        assert list(await node.put(session, space, chain("b", 3))) == [RESERVED] * 3
        assert node.counters["evictions_inline_blocks"] == 2
        assert node.counters["evictions_inline_bytes"] == 2 * BLOCK_BYTES
        for name in ("c", "d"):
            await node.settle()
            await node.put(session, space, chain(name, 4), wait_s=60)
        assert {hash_ for _, hash_ in node.lower.blocks} == {chain("a", 4)[0]}


async def test_a_durable_put_and_a_flush_are_written_whatever_admission_says():
    async with Node(8, below=MemoryTier(), watermarks=FULL, gate=gate("hinted")) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        durable = node.store.writes.durability.persist_hashes(space, chain("a", 2))
        assert await durable == [True, True]
        await node.put(session, space, chain("b", 2))
        assert await node.parts.below.mover.flush(5) == (2, 0)


async def test_over_budget_stores_are_shed_by_value_durable_ones_written_and_loads_go_on():
    left = [100 * BLOCK_BYTES, 100 * BLOCK_BYTES]
    budget = gate("admit_all", budget=lambda: tuple(left), budgeted=True)
    async with Node(20, below=MemoryTier(), watermarks=MARKS, gate=budget) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("kept", 4))
        await node.parts.below.mover.flush(5)
        left[0] = 40 * BLOCK_BYTES  # short: what was used again is still written
        await node.put(session, space, chain("used", 2))
        await release(node, session, await node.get(session, space, chain("used", 2)))
        await node.put(session, space, chain("once", 4))
        await node.put(session, space, chain("more", 8))
        await node.settle()
        await node.put(session, space, chain("yet more", 6))
        await node.settle()
        assert {hash_ for _, hash_ in node.lower.blocks} == set(chain("kept", 4) + chain("used", 2))
        assert node.counters["shed_blocks"] == 2
        assert node.parts.history.why(space, chain("once", 4)[3]).rule == OVER_BUDGET
        left[0] = -BLOCK_BYTES
        written = set(node.lower.blocks)
        await node.put(session, space, chain("late", 12), wait_s=60)
        await node.settle()
        assert set(node.lower.blocks) == written
        assert await node.store.writes.durability.persist_hashes(space, chain("late", 1)) == [True]
        held = await node.get(session, space, chain("kept", 4), wait_s=60)
        assert held.blocks == 4


async def test_each_of_a_step_takes_its_part_of_the_budget():
    budget = gate("admit_all", budget=lambda: (52 * BLOCK_BYTES, 100 * BLOCK_BYTES), budgeted=True)
    async with Node(20, below=MemoryTier(), watermarks=FULL, gate=budget) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 6))
        entries = list(space.entries.values())
        assert budget.admitted(entries) == entries[:3]  # down to a half of the day's
        assert [budget.refusal(entry) for entry in entries] == [""] * 6


async def test_what_one_tenant_asks_for_decides_nothing_for_another():
    second = gate("second_hit", memory_keys=4)
    async with Node(20, below=MemoryTier(), segment_blocks=4, watermarks=FULL, gate=second) as node:
        alice, bob = await node.session("alice"), await node.session("bob")
        ours, theirs = await node.space(alice), await node.space(bob)
        for _ in range(2):
            second.asked(ours, chain("a", 1))
        second.asked(theirs, chain("a", 1) + chain("x", 15))
        await node.put(alice, ours, chain("a", 1))
        await node.put(bob, theirs, chain("a", 1))
        assert second.times_asked(ours.entries[chain("a", 1)[0]]) == 3
        assert second.times_asked(theirs.entries[chain("a", 1)[0]]) == 1


async def test_with_admit_all_nothing_is_noted():
    async with Node(8, below=MemoryTier()) as node:
        assert node.parts.note_asked is None
    async with Node(8, below=MemoryTier(), gate=gate("second_hit")) as node:
        assert node.parts.note_asked is not None


async def test_the_coldest_of_all_orders_goes_first_not_the_largest():
    async with Node(20, below=MemoryTier(), segment_blocks=2, watermarks=MARKS) as node:
        alice, bob = await node.session("alice"), await node.session("bob")
        ours, theirs = await node.space(alice), await node.space(bob)
        await node.put(bob, theirs, chain("old", 6))
        await node.put(alice, ours, chain("new", 12))
        await node.settle()
        assert node.parts.dram.usage().blocks == 10
        assert {hash_ for _, hash_ in node.lower.blocks} == set(chain("old", 6) + chain("new", 12)[10:])


async def test_room_that_runs_out_faster_than_it_is_made_is_made_early():
    forecast = Forecast(5.0)
    async with Node(100, below=MemoryTier(), watermarks=MARKS, forecast=forecast) as node:
        session = await node.session()
        space = await node.space(session)
        forecast.demoted(BLOCK_BYTES, 1.0)  # a second a block: a batch takes ten
        node.parts.below.mover.kick()
        await node.settle()
        await node.put(session, space, chain("a", 60))  # 60 blocks at once: 8 a second, decayed
        await node.settle()
        assert node.counters["demotions_forecast_blocks"] == 10  # to the low mark, though the high one is far
        assert node.counters["demotions_forecast_bytes"] == 10 * BLOCK_BYTES
        assert not node.counters["demotions_watermark_blocks"]
        assert len(node.lower.blocks) == 10
        node.clock.now += 3600
        node.parts.below.mover.kick()
        await node.settle()
        await node.put(session, space, chain("b", 1))
        await node.settle()
        assert node.counters["demotions_forecast_blocks"] == 10


async def test_a_tenant_whose_key_is_missing_lives_in_dram_alone_and_holds_up_nobody():
    lower = MemoryTier()
    async with Node(20, below=lower, watermarks=FULL, segment_blocks=10) as node:
        lower.barred.add("alice")
        alice, bob = await node.session("alice"), await node.session("bob")
        hers, his = await node.space(alice), await node.space(bob)
        await node.put(alice, hers, chain("a", 10))
        await node.put(bob, his, chain("b", 10))
        await node.settle()
        assert list(await node.put(alice, hers, chain("c", 2), wait_s=60)) == [RESERVED] * 2
        assert list(await node.put(bob, his, chain("d", 1), wait_s=60)) == [RESERVED]
        assert {owner for owner, _, _ in lower.blocks.values()} == {"bob"}
        assert node.counters["demote_failed_blocks"] == 0
        assert node.counters["barred_blocks"] >= 2
        assert node.parts.history.why(hers, chain("a", 10)[9]).rule == NO_KEY
        await node.parts.below.mover.flush(1.0)
        assert {owner for owner, _, _ in lower.blocks.values()} == {"bob"}
