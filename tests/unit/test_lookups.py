"""What a lookup answers beside where the blocks are."""

import asyncio
import itertools

import pytest

from kvstored.errors import InvalidArgument
from kvstored.policy.watermarks import Watermarks
from kvstored.store.lookups import Wish
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain
from kvstored.testing.waiting import turns

FULL = Watermarks(high=1.0, low=0.0)
TOKENS = 16


async def sink(node, session, space, hashes):
    """Blocks that are only on the lower tier."""
    await node.put(session, space, hashes)
    await node.parts.below.mover.flush(5.0)
    node.parts.room.evict([space.entries[hash_] for hash_ in hashes], "test")


async def look(node, session, spaces, hashes, rate=0.0, **wish):
    return await node.store.reads.lookups.look(session, spaces, hashes, Wish(prefill_tokens_per_s=rate, **wish))


async def test_an_estimate_adds_up_what_is_copied_and_what_is_read():
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session, block_tokens=TOKENS)
        hashes = chain("a", 8)
        await sink(node, session, space, hashes[4:])
        await node.put(session, space, hashes[:4])
        looked = await look(node, session, [space], [*hashes, b"nowhere" * 2], rate=1000.0)
        copies, reads = node.parts.copies, node.parts.below.promoter.reads
        assert (looked.run.prefix_blocks, looked.run.nvme_blocks) == (8, 4)
        assert looked.estimate.load_s == pytest.approx(copies.seconds(8 * BLOCK_BYTES) + reads.seconds(4 * BLOCK_BYTES))
        assert looked.estimate.recompute_s == pytest.approx(8 * TOKENS / 1000.0)
        assert looked.estimate.paying_blocks == 8
        assert (await look(node, session, [space], hashes, rate=1e9)).estimate.paying_blocks == 0
        assert not +node.lower.pins


@pytest.mark.parametrize("wishes", [False, True])
async def test_blocks_that_were_looked_up_and_found_are_counted_apart_from_gets(wishes):
    """An engine that gets only what it found never misses with a get."""
    async with Node(blocks=16) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 8)
        await node.put(session, space, hashes[:3])
        for asked in (hashes, hashes[:3]):
            if wishes:
                await look(node, session, [space], asked)
            else:
                node.store.reads.lookups.lookup([space], asked)
        assert (await node.get(session, space, hashes[:3])).blocks == 3
        stats = node.parts.stats[space.tenant]
        assert (stats.lookups, stats.blocks_looked_up, stats.blocks_found) == (2, 11, 6)
        assert (stats.blocks_asked, stats.blocks_hit) == (3, 3)


async def test_all_shards_are_loaded_and_the_tokens_computed_once():
    async with Node(blocks=16) as node:
        session = await node.session()
        shards = [await node.space(session, tp_rank=rank, tp_size=2, block_tokens=TOKENS) for rank in (0, 1)]
        for shard in shards:
            await node.put(session, shard, chain("a", 4))
        looked = await look(node, session, shards, chain("a", 4), rate=1000.0)
        assert looked.estimate.load_s == pytest.approx(node.parts.copies.seconds(8 * BLOCK_BYTES))
        assert looked.estimate.recompute_s == pytest.approx(4 * TOKENS / 1000.0)


async def test_what_waits_at_the_device_is_counted_once():
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session, block_tokens=TOKENS)
        for name in "ab":
            await sink(node, session, space, chain(name, 4))
        reads, copies = node.parts.below.promoter.reads, node.parts.copies
        node.lower.gate.clear()
        getting = asyncio.ensure_future(node.get(session, space, chain("a", 4), wait_s=60))
        while not node.lower.calls["load"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        behind = await look(node, session, [space], chain("b", 4), rate=1000.0)
        assert behind.estimate.load_s == pytest.approx(copies.seconds(4 * BLOCK_BYTES) + reads.seconds(8 * BLOCK_BYTES))
        own = await look(node, session, [space], chain("a", 4), rate=1000.0)
        assert own.run.pending_blocks == 4
        assert own.estimate.load_s == pytest.approx(copies.seconds(4 * BLOCK_BYTES) + reads.seconds(4 * BLOCK_BYTES))
        node.lower.gate.set()
        await getting


async def test_reads_and_copies_are_measured(monkeypatch):
    monkeypatch.setattr("kvstored.store.commits.INLINE_COPY_BYTES", 1)
    monkeypatch.setattr("kvstored.store.commits.MEASURED_COPY_BYTES", 1)
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        ticks = itertools.count(1000.0, 0.001)
        node.clock.monotonic = lambda: next(ticks)
        session = await node.session()
        space = await node.space(session)
        await sink(node, session, space, chain("a", 4))
        assert node.parts.copies.samples == 1
        await node.get(session, space, chain("a", 4), wait_s=60)
        assert node.parts.below.promoter.reads.samples == 1


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
async def test_a_rate_that_is_none_is_refused(rate):
    async with Node() as node:
        session = await node.session()
        space = await node.space(session, block_tokens=TOKENS)
        with pytest.raises(InvalidArgument, match="prefill_tokens_per_s"):
            await look(node, session, [space], chain("a", 1), rate)


async def test_a_namespace_that_does_not_say_how_large_its_blocks_are_has_no_estimate():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        with pytest.raises(InvalidArgument, match="block_tokens"):
            await look(node, session, [space], chain("a", 1), 1000.0)


# ---- prefetch ----


async def test_a_lookup_starts_what_it_found_below_and_a_get_joins_it():
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 8)
        await sink(node, session, space, hashes)
        node.lower.gate.clear()
        finds = node.lower.calls["find"]
        looked = await look(node, session, [space], hashes, prefetch=True)
        assert (looked.run.nvme_blocks, looked.queued_blocks) == (8, 8)
        assert looked.prefetch_id in session.prefetches
        assert node.lower.calls["find"] == finds + 1, "what was found is not asked for again"
        again = await look(node, session, [space], hashes, prefetch=True)
        assert (again.run.pending_blocks, again.queued_blocks, again.prefetch_id) == (8, 0, 0)
        getting = asyncio.ensure_future(node.get(session, space, hashes, wait_s=60))
        await turns()
        node.lower.gate.set()
        assert (await getting).blocks == 8
        assert sorted(node.lower.loaded) == hashes, "each was read once"
        assert not session.prefetches, "nobody has to ask for its end"


async def test_a_lookup_of_what_is_in_dram_or_nowhere_starts_nothing():
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        for name in "ab":
            looked = await look(node, session, [space], chain(name, 4), prefetch=True)
            assert (looked.prefetch_id, looked.queued_blocks) == (0, 0)
        assert not node.lower.calls["load"]
        assert not +node.lower.pins


async def test_what_does_not_pay_is_not_prefetched():
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session, block_tokens=TOKENS)
        hashes = chain("a", 8)
        await sink(node, session, space, hashes)
        node.parts.below.promoter.reads.note(BLOCK_BYTES, 1.0)  # so long does each block take here
        node.parts.below.promoter.reads.note(2 * BLOCK_BYTES, 2.0)
        await look(node, session, [space], hashes, rate=TOKENS * 2.0, prefetch=True)
        assert not space.entries, "it is computed in half the time"
        looked = await look(node, session, [space], hashes, rate=TOKENS / 2.0, prefetch=True)
        assert (looked.estimate.paying_blocks, looked.queued_blocks) == (8, 8)
        await node.settle()


async def test_long_lookups_are_prefetched_in_pieces(monkeypatch):
    monkeypatch.setattr("kvstored.mover.promoter.PIECE_BLOCKS", 3)
    monkeypatch.setattr("kvstored.store.prefetches.PIECE_BLOCKS", 3)
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 8)
        await sink(node, session, space, hashes)
        assert (await look(node, session, [space], hashes, prefetch=True)).queued_blocks == 8
        await node.settle()
        assert (await node.get(session, space, hashes)).blocks == 8
        assert not +node.lower.pins


async def test_a_lookups_prefetch_can_be_polled_and_cancelled_while_it_runs():
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        for name in "ab":
            await sink(node, session, space, chain(name, 4))
        node.parts.below.promoter.queue.inflight_limit_bytes = 1
        node.lower.gate.clear()
        first = await look(node, session, [space], chain("a", 4), prefetch=True)
        second = await look(node, session, [space], chain("b", 4), prefetch=True)
        job = await node.store.prefetches.cancel(session, second.prefetch_id)
        assert job.failed_blocks == 4
        assert not (await node.store.prefetches.poll(session, first.prefetch_id, 0)).done.done()
        node.lower.gate.set()
        await node.settle()
        assert node.lower.loaded == chain("a", 4)


async def test_a_session_with_too_many_prefetches_still_has_its_lookups(monkeypatch):
    monkeypatch.setattr("kvstored.store.prefetches.PREFETCHES_PER_SESSION_MAX", 1)
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        for name in "ab":
            await sink(node, session, space, chain(name, 4))
        node.lower.gate.clear()
        assert (await look(node, session, [space], chain("a", 4), prefetch=True)).prefetch_id
        looked = await look(node, session, [space], chain("b", 4), prefetch=True)
        assert (looked.run.nvme_blocks, looked.prefetch_id, looked.queued_blocks) == (4, 0, 0)
        node.lower.gate.set()


async def test_a_session_that_ends_takes_its_lookups_prefetches_with_it():
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        for name in "ab":
            await sink(node, session, space, chain(name, 4))
        node.parts.below.promoter.queue.inflight_limit_bytes = 1
        node.lower.gate.clear()
        for name in "ab":
            await look(node, session, [space], chain(name, 4), prefetch=True)
        node.store.end_session(session)
        node.lower.gate.set()
        await node.settle()
        assert node.lower.loaded == chain("a", 4), "what had begun is read to its end"


async def test_a_prefetch_that_cannot_end_by_its_deadline_is_dropped():
    async with Node(blocks=16, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        for name in "ab":
            await sink(node, session, space, chain(name, 4))
        node.parts.below.promoter.reads.note(4 * BLOCK_BYTES, 2.0)  # so long does such a read take here
        late = await look(node, session, [space], chain("a", 4), prefetch=True, deadline_s=1.9)
        assert (late.prefetch_id, late.queued_blocks) == (0, 0)
        assert node.counters["prefetch_lookup_late_bytes"] == 4 * BLOCK_BYTES
        assert (await look(node, session, [space], chain("b", 4), prefetch=True, deadline_s=2.1)).queued_blocks == 4
        await node.settle()
        assert node.lower.loaded == chain("b", 4)
