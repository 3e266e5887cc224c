"""Demotion and promotion: nothing is lost on the way down, nothing is read twice on the way up."""

import asyncio

import pytest

from kvstored.errors import NotFound
from kvstored.policy.watermarks import Watermarks
from kvstored.store.outcomes import HIT, MISS, NO_ROOM, PENDING, RESERVED, THROTTLED
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain
from kvstored.testing.waiting import turns, until
from kvstored.tiers.base import Health

FULL = Watermarks(high=1.0, low=0.99, batch=1.0)


async def test_a_burst_of_three_times_dram_loses_nothing():
    async with Node(blocks=8, below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        names = [chain(f"c{i}", 4) for i in range(6)]
        for hashes in names:
            left = list(hashes)
            while left:
                outcomes = list(await node.put(session, space, left, wait_s=60))
                assert set(outcomes) <= {RESERVED, HIT, THROTTLED}
                left = [h for h, outcome in zip(left, outcomes, strict=True) if outcome == THROTTLED]
        await node.settle()
        for hashes in names:
            held = await node.get(session, space, hashes, wait_s=60)
            assert held.blocks == 4
            node.store.reads.release(session, [held.leases[0].lease_id])
        assert not node.counters["evicted_lost_blocks"]


async def test_demotion_runs_from_the_high_to_the_low_watermark_and_takes_the_coldest():
    async with Node(blocks=20, below=MemoryTier(), watermarks=Watermarks(0.9, 0.5, 0.1)) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("old", 8))
        await node.put(session, space, chain("new", 8))
        await node.settle()
        assert node.parts.dram.usage().blocks == 16
        await node.put(session, space, chain("more", 2))
        await node.settle()
        assert node.parts.dram.usage().blocks == 10
        assert {hash_ for _, hash_ in node.lower.blocks} == set(chain("old", 8))
        found = await node.store.reads.lookup([space], chain("old", 8))
        assert (found.ready_blocks, found.nvme_blocks) == (8, 8)


async def test_clean_blocks_are_dropped_in_steps_with_a_turn_for_others_between(monkeypatch):
    monkeypatch.setattr("kvstored.mover.demotion.STEP_BLOCKS_MAX", 2)
    async with Node(blocks=20, below=MemoryTier(), watermarks=Watermarks(0.9, 0.5, 0.5)) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 16))
        await node.parts.below.mover.flush(5)
        await node.settle()
        await node.put(session, space, chain("b", 2))
        seen = set()
        for _ in range(50):
            seen.add(node.parts.dram.usage().blocks)
            await asyncio.sleep(0)
        assert seen == {18, 16, 14, 12, 10}


async def test_a_flush_goes_in_steps_and_says_what_is_left(monkeypatch):
    monkeypatch.setattr("kvstored.mover.flush_order.STEP_BLOCKS_MAX", 2)
    async with Node(blocks=20, below=MemoryTier(4 * BLOCK_BYTES), watermarks=FULL) as node:
        session = await node.session()
        space, other = await node.space(session), await node.space(session, model="other")
        await node.put(session, space, chain("a", 5))
        await node.put(session, other, chain("b", 2))
        assert await node.parts.below.mover.flush(5) == (4, 3)
        assert node.lower.calls["store"] == 3
        node.clock.now += 100
        node.lower.capacity_bytes = 1 << 20
        assert await node.parts.below.mover.flush(5) == (3, 0)
        assert await node.parts.below.mover.flush(5) == (0, 0)


async def test_a_block_that_moves_down_while_the_index_is_asked_is_not_overlooked():
    async with Node(blocks=8, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 4)
        await node.put_below(session, space, hashes[2:])
        await node.put(session, space, hashes[:2])
        await node.parts.below.mover.flush(5)
        looking = asyncio.ensure_future(node.store.reads.lookup([space], hashes))
        await asyncio.sleep(0)  # the index is being asked for the last two
        node.parts.room.evict([space.entries[hash_] for hash_ in hashes[:2]], "test")
        assert (await looking).ready_blocks == 4


async def test_without_a_working_lower_tier_eviction_drops_and_says_so():
    async with Node(blocks=4, below=MemoryTier(), watermarks=FULL) as node:
        node.lower.health = Health.READ_ONLY
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        assert list(await node.put(session, space, chain("b", 4))) == [RESERVED] * 4
        assert node.counters["evicted_lost_blocks"] == 4
        assert node.parts.history.why(space, chain("a", 1)[0]).reason == "evicted"


async def test_a_lower_tier_that_stores_nothing_does_not_stop_the_writers():
    async with Node(blocks=4, below=MemoryTier(), watermarks=FULL) as node:
        node.lower.fail_stores = True
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        assert RESERVED in await node.put(session, space, chain("b", 4), wait_s=60)
        assert node.counters["demote_failed_blocks"]


async def test_a_block_leased_while_it_is_demoted_stays():
    async with Node(blocks=4, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        node.lower.gate.clear()
        node.parts.below.mover.demand("alice", BLOCK_BYTES, 4)
        await until(lambda: node.lower.calls["store"])
        held = await node.get(session, space, chain("a", 2))
        assert held.blocks == 2
        node.lower.gate.set()
        await node.settle()
        assert set(space.entries) == set(chain("a", 2))


async def test_a_block_deleted_while_it_is_demoted_does_not_come_back():
    async with Node(blocks=2, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 2))
        node.lower.gate.clear()
        node.parts.below.mover.demand("alice", BLOCK_BYTES, 2)
        await until(lambda: node.lower.calls["store"])
        deleting = asyncio.ensure_future(node.store.writes.delete(session, space, chain("a", 2)))
        await turns()
        node.lower.gate.set()
        assert await deleting == 2
        assert not node.lower.blocks


async def test_however_many_wait_a_block_is_read_once():
    async with Node(blocks=8, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put_below(session, space, chain("a", 4))
        node.lower.gate.clear()
        gets = [asyncio.ensure_future(node.get(session, space, chain("a", 4), wait_s=60)) for _ in range(5)]
        await turns()
        node.lower.gate.set()
        assert [held.blocks for held in await asyncio.gather(*gets)] == [4] * 5
        assert sorted(node.lower.loaded) == chain("a", 4)


async def test_a_get_that_does_not_wait_starts_the_read_and_says_pending():
    async with Node(blocks=8, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put_below(session, space, chain("a", 4))
        held = await node.get(session, space, chain("a", 4))
        assert (held.blocks, held.next) == (0, PENDING)
        await node.settle()
        assert (await node.get(session, space, chain("a", 4))).blocks == 4


async def test_an_unreadable_block_is_a_miss():
    async with Node(blocks=8, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put_below(session, space, chain("a", 4))
        node.lower.fail_loads = True
        held = await node.get(session, space, chain("a", 4), wait_s=60)
        assert (held.blocks, held.next) == (0, MISS)
        assert node.parts.dram.usage().used_bytes == 0


async def test_a_get_is_cut_where_there_is_no_room_and_never_evicts_its_own_start():
    async with Node(blocks=4, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 6)
        await node.put_below(session, space, hashes[:4])
        await node.put_below(session, space, hashes[4:])
        held = await node.get(session, space, hashes, wait_s=60)
        assert (held.blocks, held.next) == (4, THROTTLED)


async def test_two_long_gets_at_once_do_not_wait_for_each_other():
    async with Node(blocks=6, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put_below(session, space, chain("a", 4))
        await node.put_below(session, space, chain("b", 4))
        async with asyncio.timeout(30):
            held = await asyncio.gather(*(node.get(session, space, chain(n, 4), wait_s=60) for n in "ab"))
        assert [h.blocks for h in held] == [4, 2]


async def test_prefetch_brings_blocks_up_and_tells_when():
    async with Node(blocks=8, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put_below(session, space, chain("a", 4))
        started = await node.store.prefetches.start(session, [space], chain("a", 4), 0, 0)
        assert (started.outcome, started.queued_blocks) == (PENDING, 4)
        job = await node.store.prefetches.poll(session, started.prefetch_id, 60)
        assert (job.done.done(), job.ready_blocks) == (True, 4)
        with pytest.raises(NotFound):
            await node.store.prefetches.poll(session, started.prefetch_id, 0)
        again = await node.store.prefetches.start(session, [space], chain("a", 4), 0, 0)
        assert (again.outcome, again.resident_blocks) == (HIT, 4)


async def test_prefetched_chains_are_evicted_leaf_first():
    async with Node(blocks=8, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put_below(session, space, chain("a", 6))
        started = await node.store.prefetches.start(session, [space], chain("a", 6), 0, 0)
        await node.store.prefetches.poll(session, started.prefetch_id, 60)
        await node.put(session, space, chain("b", 4), wait_s=60)
        assert set(space.entries) >= set(chain("a", 4))


async def test_a_cancelled_prefetch_gives_its_slots_back_and_spares_what_others_wait_for():
    async with Node(blocks=8, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put_below(session, space, chain("a", 4))
        await node.put_below(session, space, chain("b", 4))
        promoter = node.parts.below.promoter
        promoter.queue.inflight_limit_bytes = 1  # one read at a time
        node.lower.gate.clear()
        first = await node.store.prefetches.start(session, [space], chain("a", 4), 0, 0)
        second = await node.store.prefetches.start(session, [space], chain("b", 4), 0, 0)
        cancelling = asyncio.ensure_future(node.store.prefetches.cancel(session, first.prefetch_id))
        job = await node.store.prefetches.cancel(session, second.prefetch_id)
        assert (job.done.done(), job.failed_blocks) == (True, 4)
        await asyncio.sleep(0)
        assert not cancelling.done()  # its copy still runs
        node.lower.gate.set()
        assert (await cancelling).ready_blocks == 4


async def test_a_prefetch_past_its_deadline_is_dropped():
    async with Node(blocks=8, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put_below(session, space, chain("a", 4))
        await node.put_below(session, space, chain("b", 4))
        node.parts.below.promoter.queue.inflight_limit_bytes = 1
        node.lower.gate.clear()
        await node.store.prefetches.start(session, [space], chain("a", 4), 0, 0)
        late = await node.store.prefetches.start(session, [space], chain("b", 4), 0, 1.0)
        node.clock.now += 2
        node.lower.gate.set()
        job = await node.store.prefetches.poll(session, late.prefetch_id, 60)
        assert job.failed_blocks == 4
        assert set(space.entries) == set(chain("a", 4))


async def test_the_queue_of_reads_is_bounded_and_half_of_it_is_for_those_who_wait():
    async with Node(blocks=32, below=MemoryTier(), watermarks=FULL, queue_blocks=8) as node:
        session = await node.session()
        space = await node.space(session)
        for name in "ab":
            await node.put_below(session, space, chain(name, 9))
        promoter = node.parts.below.promoter
        promoter.queue.inflight_limit_bytes = 1  # one read at a time
        node.lower.gate.clear()
        gets = [asyncio.ensure_future(node.get(session, space, chain("a", 1), wait_s=60))]
        await until(lambda: promoter.inflight_bytes)
        started = await node.store.prefetches.start(session, [space], chain("a", 9), 0, 0)
        assert (started.queued_blocks, promoter.queued_blocks) == (4, 4)
        gets.append(asyncio.ensure_future(node.get(session, space, chain("b", 9), wait_s=60)))
        await until(lambda: promoter.queued_blocks == 8)
        node.lower.gate.set()
        assert [held.blocks for held in await asyncio.gather(*gets)] == [1, 4]


async def test_a_demand_read_overtakes_a_prefetch():
    async with Node(blocks=12, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        for name in "abc":
            await node.put_below(session, space, chain(name, 4))
        node.parts.below.promoter.queue.inflight_limit_bytes = 1
        node.lower.gate.clear()
        for name in "ab":
            await node.store.prefetches.start(session, [space], chain(name, 4), 0, 0)
        getting = asyncio.ensure_future(node.get(session, space, chain("c", 4), wait_s=60))
        await turns()
        node.lower.gate.set()
        assert (await getting).blocks == 4
        await node.settle()
        assert node.lower.loaded[4:8] == chain("c", 4)


async def test_the_session_of_a_prefetch_may_end():
    async with Node(blocks=8, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put_below(session, space, chain("a", 4))
        node.lower.gate.clear()
        await node.store.prefetches.start(session, [space], chain("a", 4), 0, 0)
        node.store.end_session(session)
        node.lower.gate.set()
        await node.settle()
        node.audit()


async def test_another_block_size_takes_over_segments_that_are_no_longer_used():
    async with Node(blocks=16, segment_blocks=4, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 16))
        writes = node.store.writes
        hashes, sizes = chain("big", 4), [2 * BLOCK_BYTES] * 4
        reserved = await writes.reserve(session, space, hashes, sizes, b"", 60)
        for _ in range(20):
            if reserved.reservation_id:
                break
            reserved = await writes.reserve(session, space, hashes, sizes, b"", 60)
        assert reserved.outcomes[0] == RESERVED
        assert {hash_ for _, hash_ in node.lower.blocks} >= set(chain("a", 16)) - set(space.entries)
        assert not node.counters["evicted_lost_blocks"]


async def test_a_block_that_fits_no_segment_is_refused_for_good():
    async with Node(blocks=4, below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        reserved = await node.store.writes.reserve(session, space, chain("big", 1), [5 * BLOCK_BYTES], b"", 5)
        assert list(reserved.outcomes) == [NO_ROOM]


@pytest.fixture
def small_pieces(monkeypatch):
    for module in ("mover.promoter", "store.reads", "store.prefetches", "store.writes"):
        monkeypatch.setattr(f"kvstored.{module}.PIECE_BLOCKS", 2)


async def test_long_calls_are_planned_in_pieces_and_answered_whole(small_pieces):
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 7)
        assert list(await node.put(session, space, hashes)) == [RESERVED] * 7
        await node.put_below(session, space, hashes)
        held = await node.get(session, space, hashes, wait_s=60)
        assert (held.blocks, held.next) == (7, HIT)
        node.store.reads.release(session, [held.leases[0].lease_id])
        node.parts.room.evict(list(space.entries.values())[3:], "test")
        started = await node.store.prefetches.start(session, [space], hashes, 0, 0)
        assert (started.resident_blocks, started.queued_blocks) == (3, 4)
        assert (await node.store.prefetches.poll(session, started.prefetch_id, 60)).ready_blocks == 4


async def test_a_piece_without_room_ends_a_long_call(small_pieces):
    async with Node(blocks=5, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 9)
        for part in (hashes[:4], hashes[4:8], hashes[8:]):
            await node.put_below(session, space, part)
        held = await node.get(session, space, hashes, wait_s=60)
        assert (held.blocks, held.next) == (5, THROTTLED)
        outcomes = list(await node.put(session, space, chain("b", 9)))
        assert outcomes == [THROTTLED] * 9


async def test_a_session_that_ends_between_two_pieces_keeps_nothing(small_pieces):
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session, other = await node.session(), await node.session()
        space = await node.space(session)
        await node.space(other)
        await node.put_below(other, space, chain("a", 8))
        calls = [
            asyncio.ensure_future(node.reserve(session, space, chain("b", 8))),
            asyncio.ensure_future(node.store.prefetches.start(session, [space], chain("a", 8), 0, 0)),
        ]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        node.store.end_session(session)
        await asyncio.gather(*calls)
        node.store.end_session(other)
        await node.settle()
        node.audit()


async def test_a_prefetch_whose_session_ended_while_it_was_planned_is_forgotten(small_pieces):
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put_below(session, space, chain("a", 8))
        node.lower.gate.clear()
        starting = asyncio.ensure_future(node.store.prefetches.start(session, [space], chain("a", 8), 0, 0))
        await until(lambda: node.lower.calls["load"])  # its first piece is being read
        assert not starting.done()
        node.store.end_session(session)
        assert (await starting).prefetch_id == 0
        assert not session.prefetches
        node.lower.gate.set()


async def test_a_reservation_ended_between_two_pieces_costs_no_slot(small_pieces):
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        reserving = asyncio.ensure_future(node.reserve(session, space, chain("a", 8)))
        await until(lambda: session.reservations)
        node.store.writes.abort(session, *session.reservations, [])
        with pytest.raises(NotFound):
            await reserving
        node.store.end_session(session)
        node.audit()
