"""Blocks that end: never served after their time, in whatever tier and state, and their room comes back."""

import asyncio
import random

import pytest

from kvstored.catalog.catalog import DEAD, REVIVING
from kvstored.catalog.history import Reason
from kvstored.catalog.spaces import Entry
from kvstored.catalog.timers import Timers
from kvstored.errors import InvalidArgument
from kvstored.lifetime import EndClock, Expiry, Lifetime, capped, expiry_of, step_down
from kvstored.store.outcomes import HIT, MISS, RESERVED
from kvstored.tenancy.merge import Change, Changes
from kvstored.testing.keeping import MemoryKeeper
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import Node, chain
from kvstored.testing.waiting import turns

HOUR = Lifetime(3600.0)
SLIDING = Lifetime(100.0, sliding=True)


async def put(node, session, space, hashes, lifetime=None):
    reserved = node.store.writes.reserve(session, space, hashes, [4096] * len(hashes), b"", 0.0, lifetime=lifetime)
    reserved = await reserved if asyncio.iscoroutine(reserved) else reserved
    if reserved.reservation_id:
        await node.commit(session, reserved, hashes)
    return bytes(reserved.outcomes)


async def found(node, session, space, hashes, wait_s=0.0):
    held = await node.get(session, space, hashes, wait_s)
    node.store.reads.release(session, [lease.lease_id for lease in held.leases])
    return held.blocks


def ages(node, max_age_s):
    """From now on alice's blocks have a maximum age."""
    fields = {"max_age_s": max_age_s, "uids": [1]}
    node.parts.tenants.become(Changes({"alice": Change("alice", fields=fields, made=True)}))


# ---- lifetimes ----


def test_what_is_kept_of_an_expiry_comes_back_and_is_never_later():
    for wall_s in (1.7e9 + 0.3, 1.7e9 + 0.99, 3.5e9):
        expiry = expiry_of(Lifetime(10.0, sliding=True), 50.0, wall_s)
        assert Expiry.of(expiry.word, expiry.limit_s) == expiry
        assert wall_s + 10.0 - 0.125 <= expiry.expires_s <= wall_s + 10.0
        assert (expiry.sliding_s, expiry.limit_s) == (10, int(wall_s + 50.0))
    assert Expiry.of(0, 0) is None


@pytest.mark.parametrize(
    "lifetime", [Lifetime(0), Lifetime(-1), Lifetime(1e12), Lifetime(0.5, True), Lifetime(2**25, True)]
)
def test_a_lifetime_that_cannot_be_kept_is_refused(lifetime):
    with pytest.raises(InvalidArgument):
        lifetime.check()


def test_the_maximum_age_is_a_limit_to_every_lifetime():
    assert expiry_of(None, 0.0, 1000.0) is None
    assert expiry_of(None, 60.0, 1000.0) == Expiry(1060.0)
    assert expiry_of(Lifetime(100.0), 60.0, 1000.0) == Expiry(1060.0)
    assert expiry_of(Lifetime(10.0), 60.0, 1000.0) == Expiry(1010.0)
    assert expiry_of(Lifetime(10.0, True), 60.0, 1000.0) == Expiry(1010.0, 10, 1060)
    assert capped(Expiry(1010.0, 10, 0), 1005.0) == Expiry(1005.0, 10, 1005)
    assert capped(None, 5.0) == Expiry(5.0)
    assert capped(Expiry(3.0), 0.0) == Expiry(3.0)


class TwoClocks:
    def __init__(self):
        self.wall_s, self.monotonic_s = 5000.0, 10.0

    def wall(self):
        return self.wall_s

    def monotonic(self):
        return self.monotonic_s


def test_a_clock_that_is_set_back_prolongs_nothing_and_one_set_forward_counts():
    clock = TwoClocks()
    ends = EndClock(clock)
    clock.wall_s, clock.monotonic_s = 4000.0, 70.0
    assert ends.now_s() == 5060.0
    clock.wall_s = 9000.0
    assert ends.now_s() == 9000.0
    clock.wall_s, clock.monotonic_s = 5120.0, 130.0
    assert ends.now_s() == 5120.0


# ---- timers ----


def entry(expires_s):
    return Entry(hash=b"h", parent=b"", pool=None, slot=0, size_bytes=1, state=0, expires_s=expires_s)


def test_timers_give_what_is_due_and_nothing_else_whatever_came_and_went():
    rng, timers, alive, now_s = random.Random(1), Timers(), dict[int, Entry](), 0.0  # by number: the same in every run
    for number in range(4000):
        dice = rng.random()
        if dice < 0.5:
            made = entry(step_down(now_s + rng.randrange(1, 400) / 8))
            timers.add(made)
            alive[number] = made
        elif dice < 0.7 and alive:
            timers.discard(alive.pop(rng.choice(list(alive))))
        elif dice < 0.8 and alive:
            alive[rng.choice(list(alive))].expires_s += rng.randrange(1, 100) / 8
        else:
            now_s += rng.random()
            while timers.first_s <= now_s:
                ended, _ = timers.due(now_s, 3)
                assert all(each.expires_s <= now_s for each in ended)
                alive = {key: each for key, each in alive.items() if each not in ended}
            assert all(each.expires_s > now_s for each in alive.values())
        assert len(timers) == len(alive)
        assert len(timers._steps) <= 2 * len(timers._buckets) + 64


def test_what_ends_at_the_same_time_is_given_in_an_order_that_repeats():
    timers, entries = Timers(), [entry(8.0) for _ in range(50)]
    for each in entries:
        timers.add(each)
    timers.discard(entries.pop(20))
    ended, moved = timers.due(8.0, 100)
    assert (ended, moved) == (entries[::-1], [])


# ---- in DRAM ----


async def test_a_block_is_there_until_its_end_and_not_after_it_swept_or_not():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("a", 2), HOUR)
        await put(node, session, space, chain("b", 2))
        node.clock.now += 3599.0
        assert await found(node, session, space, chain("a", 2)) == 2
        node.clock.now += 1.0
        assert await found(node, session, space, chain("a", 2)) == 0
        assert node.parts.history.why(space, chain("a", 1)[0]).reason == Reason.EXPIRED
        assert (await node.store.reads.contains(space, chain("a", 2)))[0] == bytes([MISS, MISS])
        assert node.parts.dram.usage().blocks == 2
        assert await found(node, session, space, chain("b", 2)) == 2
        assert await put(node, session, space, chain("a", 2)) == bytes([RESERVED] * 2)
        node.clock.now += 1e6
        assert await found(node, session, space, chain("a", 2)) == 2


@pytest.mark.parametrize("look", ["get", "lookup", "contains", "reserve", "touch", "prefetch"])
async def test_each_call_sees_that_a_block_has_ended(look):
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 2)
        await put(node, session, space, hashes, HOUR)
        node.clock.now += 3600.0
        if look == "get":
            assert await found(node, session, space, hashes) == 0
        elif look == "lookup":
            assert node.store.reads.lookup([space], hashes).prefix_blocks == 0
        elif look == "contains":
            assert HIT not in (await node.store.reads.contains(space, hashes))[0]
        elif look == "reserve":
            assert (await node.reserve(session, space, hashes)).outcomes == bytes([RESERVED] * 2)
        elif look == "touch":
            assert node.store.reads.touch(space, hashes) == 0
        else:
            assert (await node.store.prefetches.start(session, [space], hashes, 0, 0.0)).resident_blocks == 0


async def test_the_sweep_takes_what_nobody_asks_for_in_pieces():
    async with Node(blocks=64) as node:
        session = await node.session()
        space = await node.space(session)
        for number in range(4):
            await put(node, session, space, chain(f"c{number}", 8), Lifetime(10.0 + number))
        node.clock.now += 12.0
        await node.store.expiries.sweep()
        assert node.parts.dram.usage().blocks == 8
        assert node.counters["expired_blocks"] == 24
        node.clock.now += 5.0
        await node.store.expiries.sweep()
        assert node.parts.dram.usage().blocks == 0
        assert not node.parts.catalog.timed


async def test_a_leased_block_that_ends_is_leased_to_nobody_else_and_goes_with_its_lease():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("a", 2), HOUR)
        held = await node.get(session, space, chain("a", 2))
        entries = held.leases[0].entries
        node.clock.now += 3600.0
        assert await found(node, session, space, chain("a", 2)) == 0
        assert [each.state for each in entries] == [DEAD, DEAD]
        assert node.parts.dram.usage().blocks == 2
        node.store.reads.release(session, [held.leases[0].lease_id])
        assert node.parts.dram.usage().blocks == 0


async def test_what_ends_before_its_commit_is_not_served():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        hashes = chain("a", 2)
        reserved = node.store.writes.reserve(session, space, hashes, [4096] * 2, b"", 0.0, lifetime=Lifetime(5.0))
        node.clock.now += 6.0
        await node.store.expiries.sweep()
        assert await node.commit(session, reserved, hashes) == bytes([MISS, MISS])
        assert await found(node, session, space, hashes) == 0


async def test_a_block_that_is_stored_already_keeps_the_end_that_it_has():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("a", 1), HOUR)
        assert await put(node, session, space, chain("a", 1), Lifetime(1.0)) == bytes([HIT])
        node.clock.now += 100.0
        assert await found(node, session, space, chain("a", 1)) == 1
        node.clock.now += 3500.0
        assert await found(node, session, space, chain("a", 1)) == 0


async def test_a_sliding_end_moves_with_gets_and_touches_but_not_with_looks():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        for name in "abc":
            await put(node, session, space, chain(name, 1), SLIDING)
        for _ in range(3):
            node.clock.now += 60.0
            await node.store.expiries.sweep()
            assert await found(node, session, space, chain("a", 1)) == 1
            assert node.store.reads.touch(space, chain("b", 1)) == 1
            node.store.reads.lookup([space], chain("c", 1))
        assert not space.entries.keys() & set(chain("c", 1))
        node.clock.now += 100.0
        assert await found(node, session, space, chain("a", 1)) == 0


async def test_no_use_moves_a_sliding_end_beyond_the_maximum_age():
    async with Node() as node:
        ages(node, 150.0)
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("a", 1), SLIDING)
        node.clock.now += 90.0
        assert await found(node, session, space, chain("a", 1)) == 1
        node.clock.now += 59.0
        assert await found(node, session, space, chain("a", 1)) == 1
        node.clock.now += 1.5
        assert await found(node, session, space, chain("a", 1)) == 0


async def test_a_maximum_age_that_is_set_while_blocks_are_there_counts_from_then_on():
    async with Node(blocks=32, segment_blocks=8, below=MemoryTier()) as node:
        session = await node.session()
        space, other = await node.space(session), await node.space(await node.session("bob"))
        await put(node, session, space, chain("a", 2))
        await put(node, session, space, chain("b", 2), Lifetime(10.0))
        await put(node, await node.session("bob"), other, chain("a", 2))
        ages(node, 50.0)
        await asyncio.gather(*node.store.expiries._changes)
        node.clock.now += 11.0
        assert await found(node, session, space, chain("b", 2)) == 0
        assert await found(node, session, space, chain("a", 2)) == 2
        node.clock.now += 40.0
        await node.store.expiries.sweep()
        assert not space.entries
        assert len(other.entries) == 2


async def test_a_bump_takes_the_timers_along():
    async with Node() as node:
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("a", 2), HOUR)
        await node.store.bumps.bump("alice", "m")
        assert space.timers is None
        await put(node, session, space, chain("a", 2), Lifetime(1e5))
        node.clock.now += 3600.0
        await node.store.expiries.sweep()
        assert node.parts.dram.usage().blocks == 2
        assert await found(node, session, space, chain("a", 2)) == 2


# ---- below ----


async def test_a_block_ends_on_nvme_when_it_does_in_dram():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("a", 2), HOUR)
        await node.parts.below.mover.flush(1.0)
        for each in list(space.entries.values()):
            node.parts.room.forget(each)
        node.clock.now += 3000.0
        assert await found(node, session, space, chain("a", 2), 1.0) == 2
        node.clock.now += 600.0
        assert await found(node, session, space, chain("a", 2), 1.0) == 0
        assert await put(node, session, space, chain("a", 2)) == bytes([RESERVED] * 2)


async def test_a_block_that_ends_on_its_way_up_does_not_arrive():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("a", 2), HOUR)
        await node.parts.below.mover.flush(1.0)
        for each in list(space.entries.values()):
            node.parts.room.forget(each)
        node.lower.gate.clear()
        getting = asyncio.create_task(node.get(session, space, chain("a", 2), wait_s=60))
        await turns()
        node.clock.now += 3600.0
        await node.store.expiries.sweep()
        node.lower.gate.set()
        assert (await getting).blocks == 0
        assert not space.entries


async def test_the_copy_on_nvme_of_a_block_that_was_used_ends_later_too():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("a", 1), SLIDING)
        await node.parts.below.mover.flush(1.0)
        before = [record.expiry.expires_s for _, record, _ in node.lower.blocks.values()]
        node.clock.now += 60.0
        assert await found(node, session, space, chain("a", 1)) == 1
        await node.parts.below.mover.flush(1.0)
        assert [record.expiry.expires_s for _, record, _ in node.lower.blocks.values()] == [before[0] + 60.0]


async def test_the_maximum_age_counts_for_what_was_on_nvme_before_it():
    async with Node(below=MemoryTier()) as node:
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("a", 2))
        await node.parts.below.mover.flush(1.0)
        for each in list(space.entries.values()):
            node.parts.room.forget(each)
        ages(node, 50.0)
        node.clock.now += 20.0
        assert await found(node, session, space, chain("a", 2), 1.0) == 2
        node.clock.now += 31.0
        assert await found(node, session, space, chain("a", 2), 1.0) == 0


# ---- over a restart ----


async def restarted(keeping, now_s, **settings):
    after = Node(keeper=keeping, **settings)
    after.clock.now = now_s
    return after


async def test_ends_outlive_the_process_as_they_were_and_as_uses_have_moved_them():
    keeping = MemoryKeeper()
    async with Node(keeper=keeping) as node:
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("absolute", 1), HOUR)
        await put(node, session, space, chain("soon", 1), Lifetime(50.0))
        await put(node, session, space, chain("sliding", 1), SLIDING)
        await put(node, session, space, chain("never", 1))
        for _ in range(2):
            node.clock.now += 60.0
            await found(node, session, space, chain("sliding", 1))
            await node.store.expiries.sweep()
        await put(node, session, space, chain("soon", 1), Lifetime(50.0))
        now_s = node.clock.now
    async with await restarted(keeping, now_s + 60.0) as after:
        session = await after.session()
        space = await after.space(session)
        await after.parts.revival.run()
        names = ("absolute", "soon", "sliding", "never")
        assert [await found(after, session, space, chain(name, 1)) for name in names] == [1, 0, 1, 1]
        after.clock.now += 101.0
        assert [await found(after, session, space, chain(name, 1)) for name in names] == [1, 0, 0, 1]
        after.clock.now += 3600.0
        assert [await found(after, session, space, chain(name, 1)) for name in names] == [0, 0, 0, 1]


async def test_what_has_ended_while_no_daemon_was_there_does_not_come_back():
    keeping = MemoryKeeper()
    async with Node(keeper=keeping) as node:
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("a", 4), HOUR)
        now_s = node.clock.now
    async with await restarted(keeping, now_s + 3600.0) as after:
        assert after.parts.dram.adoption.dropped["expired"] == 4
        assert after.parts.dram.usage().blocks == 0


async def test_what_is_still_to_be_verified_ends_too():
    keeping = MemoryKeeper()
    async with Node(keeper=keeping) as node:
        session = await node.session()
        space = await node.space(session)
        await put(node, session, space, chain("a", 4), HOUR)
        now_s = node.clock.now
    async with await restarted(keeping, now_s + 10.0) as after:
        session = await after.session()
        space = await after.space(session)
        assert {each.state for each in space.entries.values()} == {REVIVING}
        after.clock.now += 3600.0
        await after.store.expiries.sweep()
        await after.parts.revival.run()
        assert not space.entries
