"""What came of reads ahead of time: useful, late, wasted or dropped, by who wanted them."""

import asyncio

import pytest

from kvstored.catalog.prefetched import ENDS, EXPLICIT, LOOKUP, PREDICTED, SOURCES
from kvstored.policy.turns import Foretold
from kvstored.policy.watermarks import Watermarks
from kvstored.store.lookups import Wish
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain
from kvstored.testing.waiting import turns

FULL = Watermarks(high=1.0, low=0.0)


def counted(node, source):
    """Blocks begun, and what became of them."""
    names = ("bytes", *(f"{end}_bytes" for end in ENDS))
    return tuple(node.counters[f"prefetch_{source}_{name}"] // BLOCK_BYTES for name in names)


async def start(node, session, space, hashes, source, deadline_s=0.0):
    """A read ahead of time by whichever way."""
    if source == LOOKUP:
        await node.store.reads.lookups.look(session, [space], hashes, Wish(prefetch=True, deadline_s=deadline_s))
    elif source == EXPLICIT:
        await node.store.prefetches.start(session, [space], hashes, 0, deadline_s)
    else:
        until_s = node.clock.now + deadline_s if deadline_s else 0.0
        await node.store.predictions._bring(node.parts.below, space, Foretold(b"", hashes, until_s))


@pytest.fixture
async def below():
    """A node, a session, and a chain of four that is only on the lower tier."""
    async with Node(blocks=24, below=MemoryTier(), watermarks=FULL) as node:
        session = await node.session()
        space = await node.space(session)
        await node.put(session, space, chain("a", 4))
        await node.parts.below.mover.flush(5.0)
        node.parts.room.evict(list(space.entries.values()), "test")
        yield node, session, space, chain("a", 4)
        begun = sum(counted(node, source)[0] for source in SOURCES)
        ended = sum(sum(counted(node, source)[1:]) for source in SOURCES)
        assert begun == ended + len(space.prefetched)


@pytest.mark.parametrize("source", SOURCES)
async def test_what_a_get_has_before_it_is_evicted_was_useful_once(below, source):
    node, session, space, hashes = below
    await start(node, session, space, hashes, source)
    await node.settle()
    assert counted(node, source) == (4, 0, 0, 0, 0)
    for _ in range(2):
        assert (await node.get(session, space, hashes[:3])).blocks == 3
    assert counted(node, source) == (4, 3, 0, 0, 0)


@pytest.mark.parametrize("source", SOURCES)
async def test_what_a_get_has_to_wait_for_was_late(below, source):
    node, session, space, hashes = below
    node.lower.gate.clear()
    await start(node, session, space, hashes, source)
    getting = asyncio.ensure_future(node.get(session, space, hashes, wait_s=60))
    await turns()
    node.lower.gate.set()
    assert (await getting).blocks == 4
    assert counted(node, source) == (4, 0, 4, 0, 0)


@pytest.mark.parametrize("source", SOURCES)
async def test_what_cannot_come_by_its_deadline_was_late(below, source):
    node, session, space, hashes = below
    node.parts.below.promoter.reads.note(4 * BLOCK_BYTES, 5.0)
    await start(node, session, space, hashes, source, deadline_s=1.0)
    assert counted(node, source) == (4, 0, 4, 0, 0)
    assert not space.entries


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("how", ["evicted", "deleted", "of an earlier epoch"])
async def test_what_goes_without_a_get_was_wasted(below, source, how):
    node, session, space, hashes = below
    await start(node, session, space, hashes, source)
    await node.settle()
    assert (await node.store.reads.contains(space, hashes))[1] == bytes([3] * 4), "to look is no use"
    if how == "evicted":
        node.parts.room.evict([space.entries[hash_] for hash_ in hashes[2:]], "test")
    elif how == "deleted":
        await node.store.writes.delete(session, space, hashes[2:])
    else:
        old = space.retire(b"another digest..")
        assert not space.prefetched
        for hash_ in hashes[2:]:
            node.parts.room.forget(old.entries[hash_])
        assert counted(node, source) == (4, 0, 0, 2, 0)
        for hash_ in hashes[:2]:
            node.parts.room.forget(old.entries[hash_])
        return
    assert counted(node, source) == (4, 0, 0, 2, 0)


async def test_what_is_cancelled_or_unreadable_was_dropped(below):
    node, session, space, hashes = below
    node.lower.fail_loads = True
    await start(node, session, space, hashes[:2], PREDICTED)
    await node.settle()
    assert counted(node, PREDICTED) == (2, 0, 0, 0, 2)
    node.lower.fail_loads = False
    node.parts.below.promoter.queue.inflight_limit_bytes = 1
    node.lower.gate.clear()
    await start(node, session, space, hashes[:1], EXPLICIT)
    started = await node.store.prefetches.start(session, [space], hashes, 0, 0.0)
    await node.store.prefetches.cancel(session, started.prefetch_id)
    assert counted(node, EXPLICIT) == (4, 0, 0, 0, 3)
    node.lower.gate.set()
    await node.settle()


async def test_a_get_that_reads_for_itself_counts_nothing(below):
    node, session, space, hashes = below
    assert (await node.get(session, space, hashes, wait_s=60)).blocks == 4
    assert [counted(node, source) for source in SOURCES] == [(0,) * 5] * 3
    assert not space.prefetched


async def test_who_was_first_has_the_credit(below):
    node, session, space, hashes = below
    node.lower.gate.clear()
    await start(node, session, space, hashes[:2], EXPLICIT)
    await start(node, session, space, hashes, LOOKUP)
    node.lower.gate.set()
    await node.settle()
    await node.get(session, space, hashes)
    assert counted(node, EXPLICIT) == (2, 2, 0, 0, 0)
    assert counted(node, LOOKUP) == (2, 2, 0, 0, 0)
