"""What tenants may use, in a store: guarantees that others cannot break, limits, rates and numbers."""

import asyncio

import pytest

from kvstored.catalog.history import Reason
from kvstored.catalog.leases import ADMIN_SESSIONS, Caller, Sessions
from kvstored.config.schema import Config, Tenant
from kvstored.errors import LimitExceeded
from kvstored.policy.quota import Quota
from kvstored.policy.watermarks import Watermarks
from kvstored.store.outcomes import HIT, NO_ROOM, RESERVED, THROTTLED
from kvstored.store.parts import Limits
from kvstored.store.trimming import Trimming
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain

RING_BYTES = 64 << 10  # small: larger rings are given back in a thread
FULL = Watermarks(high=1.0, low=0.99, batch=1.0)
GUARANTEED = {"alice": Quota(guaranteed_bytes=8 * BLOCK_BYTES), "bob": Quota(guaranteed_bytes=8 * BLOCK_BYTES)}


async def open_two(node):
    alice, bob = await node.session("alice"), await node.session("bob")
    return alice, await node.space(alice), bob, await node.space(bob)


async def put_within(node, session, space, hashes):
    """Put, and again while room is on its way; the outcomes of the last try."""
    for _ in range(4000):
        outcomes = await node.put(session, space, hashes)
        if THROTTLED not in outcomes:
            return list(outcomes)
        await asyncio.sleep(0.005)  # a retired segment's memory is made in a thread
        node.clock.now += 0.005
    raise AssertionError("no room")


async def spread_over_all(node, session, space, segments):
    """One block in each of so many segments."""
    for number in range(segments):
        await node.put(session, space, chain(f"s{number}", 4))
    await node.store.writes.delete(session, space, [h for n in range(segments) for h in chain(f"s{n}", 4)[1:]])
    return [chain(f"s{number}", 4)[0] for number in range(segments)]


async def test_blocks_that_are_moved_are_what_they_were_and_the_segment_goes():
    async with Node(28, segment_blocks=4, quotas=GUARANTEED) as node:
        alice, hers, bob, his = await open_two(node)
        kept = await spread_over_all(node, bob, his, 7)
        await put_within(node, alice, hers, chain("a", 8))
        assert node.parts.dram.used_bytes_of("alice") == 8 * BLOCK_BYTES
        assert node.counters["relocated_blocks"] >= 2
        assert not node.counters["evicted_lost_blocks"]
        for hash_ in kept:
            held = await node.get(bob, his, [hash_])
            assert held.blocks == 1, "bob keeps what is guaranteed to him"
            node.store.reads.release(bob, [held.leases[0].lease_id])
        node.parts.dram.audit()


async def test_who_is_greedy_with_leases_cannot_keep_another_from_its_guarantee():
    async with Node(28, segment_blocks=4, quotas=GUARANTEED) as node:
        alice, hers, bob, his = await open_two(node)
        heads = await spread_over_all(node, bob, his, 7)
        held = [await node.get(bob, his, [hash_]) for hash_ in heads]
        assert [one.blocks for one in held].count(0) >= 2, "each lease pins a segment"
        assert THROTTLED in {one.next for one in held}
        await put_within(node, alice, hers, chain("a", 8))
        assert node.parts.dram.used_bytes_of("alice") == 8 * BLOCK_BYTES
        for hash_, one in zip(heads, held, strict=True):
            assert not one.blocks or his.entries[hash_].leases


async def test_who_waits_within_its_guarantee_sends_nothing_of_its_own_below():
    quotas = {"alice": GUARANTEED["alice"], "bob": Quota()}
    async with Node(24, segment_blocks=4, below=MemoryTier(), watermarks=FULL, quotas=quotas) as node:
        alice, hers, bob, his = await open_two(node)
        await node.put(alice, hers, chain("a", 4))
        for number in range(5):
            await node.put(bob, his, chain(f"b{number}", 4))
        room = node.parts.room
        wanted = room.to_demote("alice", BLOCK_BYTES, 1)
        assert wanted, "bob's blocks, for he is above his guarantee"
        assert all(entry.pool.space is his for entry in wanted)
        (segment_id,) = {entry.slot >> 20 for entry in wanted}
        room.on_retired = lambda segment_id: None  # its holders have not let go of it
        room.evict(list(wanted), "for this test")
        node.parts.dram.retire(segment_id)
        assert room.to_demote("alice", BLOCK_BYTES, 1) == []


async def test_who_is_within_its_guarantee_waits_for_what_others_hold_for_a_moment_and_pays_nothing_itself():
    quotas = {"alice": GUARANTEED["alice"], "bob": Quota()}
    async with Node(24, segment_blocks=4, quotas=quotas) as node:
        alice, hers, bob, his = await open_two(node)
        await node.put(alice, hers, chain("a", 4))
        for number in range(5):
            await node.put(bob, his, chain(f"b{number}", 4))
        busy = list(his.entries.values())  # as by a write to NVMe, or a check of their bytes
        node.parts.catalog.hold(busy)
        assert list(await node.put(alice, hers, chain("c", 4))) == [THROTTLED] * 4
        assert hers.entries.keys() == set(chain("a", 4)), "its own blocks stay, whatever others do"
        assert node.parts.room.to_demote("alice", BLOCK_BYTES, 4) == []
        node.parts.room.unhold(busy)
        assert await put_within(node, alice, hers, chain("c", 4)) == [RESERVED] * 4
        assert hers.entries.keys() == {*chain("a", 4), *chain("c", 4)}


async def test_within_its_guarantee_a_tenant_gets_room_by_packing_its_own_blocks_of_another_size():
    quotas = {"alice": Quota(guaranteed_bytes=12 * BLOCK_BYTES), "bob": Quota(guaranteed_bytes=4 * BLOCK_BYTES)}
    async with Node(20, segment_blocks=4, quotas=quotas) as node:
        alice, hers, bob, his = await open_two(node)
        await node.put(bob, his, chain("b", 4))
        for number in range(4):
            await node.put(alice, hers, chain(f"a{number}", 4))
        await node.store.writes.delete(alice, hers, [h for n in range(4) for h in chain(f"a{n}", 4)[1:]])
        kept = tuple(chain(f"a{n}", 4)[0] for n in range(3))  # as many as may be leased

        def slots():
            (lease,) = node.store.reads.get(alice, [hers], kept, 0.0).leases
            node.store.reads.release(alice, [lease.lease_id])
            return list(lease.slots)

        before = slots()
        reserved = node.store.writes.reserve(alice, hers, chain("x", 2), [2 * BLOCK_BYTES] * 2, b"", 0.0)
        assert list(reserved.outcomes) == [RESERVED] * 2
        assert len(hers.entries) == 6, "none was evicted"
        assert slots() == [hers.entries[hash_].slot for hash_ in kept] != before
        assert node.counters["relocated_blocks"]
        assert (await node.get(bob, his, chain("b", 4))).blocks == 4
        node.parts.dram.audit()


async def test_the_tenant_most_above_its_share_gives_up_first():
    quotas = {name: Quota() for name in ("alice", "bob", "carol")}
    async with Node(24, segment_blocks=4, quotas=quotas) as node:
        alice, hers, bob, his = await open_two(node)
        carol = await node.session("carol")
        await node.put(bob, his, chain("b", 8))  # within its share, and used the longest ago
        await node.put(alice, hers, chain("a", 16))
        assert await put_within(node, carol, await node.space(carol), chain("c", 4)) == [RESERVED] * 4
        assert (await node.get(bob, his, chain("b", 8))).blocks == 8


@pytest.mark.parametrize("below", [False, True])
async def test_at_its_limit_a_tenant_pays_itself_and_what_it_holds_gives_an_answer_at_once(below):
    quotas = {"alice": Quota(4 * BLOCK_BYTES), "bob": Quota()}
    async with Node(
        16, segment_blocks=4, quotas=quotas, below=MemoryTier() if below else None, watermarks=FULL
    ) as node:
        alice, hers, bob, his = await open_two(node)
        await node.put(bob, his, chain("b", 8))
        await node.put(alice, hers, chain("a", 4))
        held = await node.get(alice, hers, chain("a", 4))
        assert held.blocks == 4
        outcomes = await node.put(alice, hers, chain("c", 2))
        assert set(outcomes) == {THROTTLED if below else NO_ROOM}
        node.store.reads.release(alice, [held.leases[0].lease_id])
        assert await put_within(node, alice, hers, chain("c", 2)) == [RESERVED] * 2
        assert node.parts.dram.used_bytes_of("alice") <= 4 * BLOCK_BYTES
        assert (await node.get(bob, his, chain("b", 8))).blocks == 8


@pytest.mark.parametrize("below", [False, True])
async def test_a_lowered_limit_is_met_in_the_background_the_coldest_first(below):
    async with Node(16, segment_blocks=4, quotas={"alice": Quota()}, below=MemoryTier() if below else None) as node:
        alice = await node.session("alice")
        hers = await node.space(alice)
        for name in ("a", "b", "c"):
            await node.put(alice, hers, chain(name, 4))
        held = await node.get(alice, hers, chain("a", 4))
        node.parts.room.allotments.change({"alice": Quota(5 * BLOCK_BYTES)})
        trimming = Trimming(node.parts)
        while await trimming.step():
            pass
        assert node.parts.dram.used_bytes_of("alice") == 5 * BLOCK_BYTES
        assert held.leases[0].entries[0].leases
        assert chain("c", 1)[0] in hers.entries
        assert trimming.over() == []


def tenant(name, **fields):
    return Tenant(name=name, uids=[{"alice": 1, "bob": 2}[name]], **fields)


async def test_puts_over_the_rate_are_throttled_at_once_and_nobody_elses():
    async with Node(
        16, segment_blocks=4, tenants=[tenant("alice", put_bytes_per_s=BLOCK_BYTES), tenant("bob")]
    ) as node:
        alice, hers, bob, his = await open_two(node)
        assert list(await node.put(alice, hers, chain("a", 2))) == [RESERVED] * 2, (
            "one call may be more than a second's"
        )
        reserved = await node.reserve(alice, hers, chain("b", 2))
        assert (list(reserved.outcomes), reserved.reservation_id) == ([THROTTLED] * 2, 0)
        assert 1000 <= reserved.retry_after_ms <= 1002
        assert list(await node.put(bob, his, chain("b", 8))) == [RESERVED] * 8
        node.clock.now += reserved.retry_after_ms / 1000
        assert list(await node.put(alice, hers, chain("b", 1))) == [RESERVED]
        assert node.parts.stats["alice"].puts_over_rate == 1
        assert (await node.get(alice, hers, chain("a", 2))).next == HIT, "reads are not counted"


async def test_what_was_put_too_fast_is_explained_and_pushes_out_nothing_that_is_remembered():
    async with Node(16, segment_blocks=4, tenants=[tenant("alice", put_bytes_per_s=BLOCK_BYTES)]) as node:
        alice = await node.session("alice")
        hers = await node.space(alice)
        await node.put(alice, hers, chain("a", 2))
        await node.store.writes.delete(alice, hers, chain("a", 1))
        for number in range(40):
            assert set(await node.put(alice, hers, chain(f"b{number}", 64))) == {THROTTLED}
        why = node.parts.history.why(hers, chain("b39", 1)[0])
        assert (why.reason, why.rule) == (Reason.QUOTA, "its tenant puts faster than it may")
        assert node.parts.history.why(hers, chain("a", 1)[0]).reason is Reason.DELETED


async def test_a_debt_of_years_is_told_as_an_hour():
    async with Node(16, segment_blocks=4, tenants=[tenant("alice", put_bytes_per_s=1), tenant("bob")]) as node:
        alice, hers, _, _ = await open_two(node)
        node.store.limits.put("alice", 1 << 40)
        reserved = await node.reserve(alice, hers, chain("b", 2))
        assert (list(reserved.outcomes), reserved.retry_after_ms) == ([THROTTLED] * 2, 3_600_000)


async def test_puts_that_look_below_at_once_do_not_all_pass_the_rate():
    limited = [tenant("alice", put_bytes_per_s=BLOCK_BYTES), tenant("bob")]
    async with Node(16, segment_blocks=4, below=MemoryTier(), tenants=limited) as node:
        alice, hers, _, _ = await open_two(node)
        puts = [node.put(alice, hers, chain(f"p{number}", 1)) for number in range(8)]
        assert [list(outcomes) for outcomes in await asyncio.gather(*puts)] == [[RESERVED]] + [[THROTTLED]] * 7


async def test_who_fills_all_sessions_keeps_no_admin_out():
    sessions = Sessions(2, 8)
    callers = {role: Caller("a", role, "session") for role in ("tenant", "admin")}

    def open_one(role):
        return sessions.open(callers[role], 0.0, create_group=False, join_group=b"")

    open_one("tenant"), open_one("tenant")
    with pytest.raises(LimitExceeded, match="2 sessions"):
        open_one("tenant")
    for _ in range(ADMIN_SESSIONS):
        open_one("admin")
    with pytest.raises(LimitExceeded):
        open_one("admin")


async def test_sessions_leases_and_namespaces_are_counted_per_tenant():
    limited = tenant("alice", max_sessions=2, max_leases=3, max_namespaces=2)
    async with Node(16, segment_blocks=4, tenants=[limited, tenant("bob")]) as node:
        alice, hers, bob, his = await open_two(node)
        other = await node.session("alice")
        with pytest.raises(LimitExceeded, match="2 sessions of this tenant"):
            await node.session("alice")
        await node.session("bob")
        await node.put(alice, hers, chain("a", 4))
        await node.put(bob, his, chain("a", 4))
        held = [await node.get(one, hers, chain("a", 1)) for one in (alice, other, alice, other)]
        assert [one.next for one in held] == [HIT] * 3 + [THROTTLED]
        assert node.parts.stats["alice"].gets_throttled == 1
        assert all([(await node.get(bob, his, chain("a", 1))).blocks for _ in range(5)])
        await node.space(alice, model="second")
        with pytest.raises(LimitExceeded, match="2 namespaces of this tenant"):
            await node.space(alice, model="third")
        await node.space(bob, model="third")


async def open_staged(node, name, staging_bytes):
    caller = Caller(name, "tenant", "session")
    return await node.store.open_session(caller, staging_bytes=staging_bytes, create_group=False, join_group=b"")


@pytest.mark.parametrize(("said", "most"), [(None, 8 * RING_BYTES), (3 * RING_BYTES + 1, 3 * RING_BYTES)])
async def test_one_tenant_cannot_take_all_staging(said, most):
    tenants = [tenant("alice", staging_limit_bytes=said), tenant("bob")]
    limits = Limits(16 * RING_BYTES, 64, 16, 16 * BLOCK_BYTES, 60.0, 60.0)
    async with Node(16, segment_blocks=4, tenants=tenants, limits=limits) as node:
        node.parts.staging.limit_bytes = 16 * RING_BYTES
        first = await open_staged(node, "alice", RING_BYTES)
        second = await open_staged(node, "alice", most)
        third, fourth = await asyncio.gather(*[open_staged(node, "alice", most - RING_BYTES) for _ in range(2)])
        assert [one.staging_bytes for one in (first, second)] == [RING_BYTES, 0]
        assert sorted([third.staging_bytes, fourth.staging_bytes]) == [0, most - RING_BYTES]
        bob = await open_staged(node, "bob", 100 * RING_BYTES)
        assert bob.staging_bytes == 8 * RING_BYTES
        for one in (first, third, fourth):
            node.store.end_session(one)
        again = await open_staged(node, "alice", 100 * RING_BYTES)
        assert again.staging_bytes == most
    assert not node.parts.staging.used_bytes_of


async def test_a_tenant_that_is_alone_has_all_staging():
    limits = Limits(16 * RING_BYTES, 64, 16, 16 * BLOCK_BYTES, 60.0, 60.0)
    async with Node(16, tenants=[tenant("alice")], limits=limits) as node:
        node.parts.staging.limit_bytes = 4 * RING_BYTES
        assert (await open_staged(node, "alice", 100 * RING_BYTES)).staging_bytes == 4 * RING_BYTES


async def test_one_tenant_cannot_use_up_all_namespaces(monkeypatch):
    monkeypatch.setattr("kvstored.store.tenant_limits.NAMESPACES_MAX", 6)
    async with Node(16, segment_blocks=4, tenants=[tenant("alice"), tenant("bob")]) as node:
        alice, _, bob, _ = await open_two(node)
        await node.space(alice, model="2")
        await node.space(alice, model="3")
        with pytest.raises(LimitExceeded, match="3 namespaces"):
            await node.space(alice, model="4")
        await node.space(alice, model="3")
        for number in range(2):
            await node.space(bob, model=str(number))


def test_guarantees_that_the_tiers_cannot_keep_are_refused():
    two = [tenant("alice", dram_guaranteed_bytes="512MiB"), tenant("bob", dram_guaranteed_bytes="320MiB")]
    Config(tenants=two)
    with pytest.raises(ValueError, match=r"dram_guaranteed_bytes are .* with a reserve of 201326592"):
        Config(tenants=[two[0], tenant("bob", dram_guaranteed_bytes="321MiB")])
    with pytest.raises(ValueError, match="over the 0 of nvme"):
        Config(tenants=[tenant("alice", nvme_guaranteed_bytes="1GiB")])
    with pytest.raises(ValueError, match="must not exceed dram_limit_bytes"):
        tenant("alice", dram_guaranteed_bytes=2, dram_limit_bytes=1)
