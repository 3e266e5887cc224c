"""Hints in a store: pins and their limits, what wins over them, and that they cost nobody else anything."""

import asyncio
import random

import pytest

from kvstored.config.tenants import Tenant
from kvstored.errors import InvalidArgument, PermissionDenied
from kvstored.lifetime import Lifetime
from kvstored.policy.hinted import Hinted
from kvstored.policy.quota import Quota
from kvstored.policy.watermarks import Watermarks
from kvstored.purge.purges import Purges
from kvstored.purge.receipts import Selection
from kvstored.store.departures import Departures
from kvstored.store.hints import PIN_MAX_S, Wish
from kvstored.store.outcomes import NO_ROOM
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import BLOCK_BYTES, Node, chain
from kvstored.testing.waiting import PATIENCE_S
from tests.unit.test_purges import purge

PINS = {"dram_guaranteed_bytes": 8 * BLOCK_BYTES, "hard_pin_bytes": 4 * BLOCK_BYTES}
ALICE = [Tenant(name="alice", **PINS), Tenant(name="bob")]
HARD, SOFT = Wish(hard_pin_s=60.0), Wish(soft_pin_s=60.0)


async def opened(node, tenant="alice"):
    session = await node.session(tenant)
    return session, await node.space(session)


def there(space, hashes):
    return [hash_ in space.entries for hash_ in hashes]


async def test_a_hard_pin_stays_while_everything_else_goes():
    async with Node(16, tenants=ALICE) as node:
        session, space = await opened(node)
        await node.put(session, space, chain("a", 4))
        result = await node.store.hints.hint(session, space, chain("a", 4)[3:], HARD)
        assert (result.blocks, result.applied, result.hard_pinned_bytes) == (4, 4, 4 * BLOCK_BYTES)
        for number in range(6):
            await node.put(session, space, chain(f"n{number}", 8))
        assert all(there(space, chain("a", 4)))
        node.clock.now += 61
        await node.store.hints.sweep()
        for number in range(6):
            await node.put(session, space, chain(f"m{number}", 8))
        assert not any(there(space, chain("a", 4)))


async def test_a_tier_full_of_pins_has_no_room_and_says_so():
    tenants = [Tenant(name="alice", dram_guaranteed_bytes=4 * BLOCK_BYTES, hard_pin_bytes=4 * BLOCK_BYTES)]
    async with Node(4, tenants=tenants) as node:
        session, space = await opened(node)
        await node.put(session, space, chain("a", 4))
        await node.store.hints.hint(session, space, chain("a", 4), HARD)
        assert await node.put(session, space, chain("b", 1)) == bytes([NO_ROOM])
        await node.store.hints.hint(session, space, chain("a", 4), Wish(unpin=True))
        assert await node.put(session, space, chain("b", 1)) != bytes([NO_ROOM])


async def test_pins_are_cut_at_the_limit_and_again_when_it_is_lowered():
    async with Node(16, tenants=ALICE) as node:
        session, space = await opened(node)
        await node.put(session, space, chain("a", 6))
        hints = node.store.hints
        assert (await hints.hint(session, space, chain("a", 6), HARD)).applied == 4
        assert (await hints.hint(session, space, chain("a", 6), HARD)).applied == 4, "they are pinned already"
        await node.put(session, space, chain("b", 2))
        assert (await hints.hint(session, space, chain("b", 2), HARD)).applied == 0
        hints.hard_limit_of = lambda tenant: 2 * BLOCK_BYTES
        await hints.sweep()
        assert hints.hinting.hard_bytes("alice") == 2 * BLOCK_BYTES


async def test_without_a_limit_nothing_is_pinned_hard():
    async with Node(16) as node:
        session, space = await opened(node)
        await node.put(session, space, chain("a", 4))
        assert (await node.store.hints.hint(session, space, chain("a", 4), HARD)).applied == 0


def test_what_may_be_pinned_is_guaranteed():
    with pytest.raises(ValueError, match="hard_pin_bytes"):
        Tenant(name="a", hard_pin_bytes=4096)


# ---- what wins ----


@pytest.mark.parametrize("wish", [HARD, SOFT])
async def test_a_delete_a_purge_an_end_and_an_epoch_win_over_pins(wish):
    async with Node(32, tenants=ALICE) as node:
        session, space = await opened(node)
        hints, hashes = node.store.hints, chain("a", 3)

        async def pinned():
            await node.put(session, space, hashes)
            result = await hints.hint(session, space, hashes, wish)
            assert result.applied == 3
            assert result.hard_pinned_bytes == (3 * BLOCK_BYTES if wish is HARD else 0)

        async def gone():
            assert not any(there(space, hashes))
            assert hints.hinting.hard_bytes("alice") == 0
            assert not any(hinted.known for _, _, hinted in hints.hinting)

        await node.put(session, space, chain("other", 12))
        await pinned()
        await node.store.writes.delete(session, space, hashes)
        await gone()
        await pinned()
        await purge(node, Selection(tenant="alice"))
        await gone()
        await node.put(session, space, chain("other", 12))
        await pinned()
        await node.store.bumps.bump("alice", "m", "")
        assert not any(there(space, hashes))


async def test_a_pinned_block_that_ends_is_gone_and_its_pin_with_it():
    async with Node(16, tenants=ALICE) as node:
        session, space = await opened(node)
        reserved = node.store.writes.reserve(
            session, space, chain("a", 2), [BLOCK_BYTES] * 2, b"", 0.0, lifetime=Lifetime(5.0)
        )
        await node.commit(session, reserved, chain("a", 2))
        await node.store.hints.hint(session, space, chain("a", 2), HARD)
        node.clock.now += 6
        await node.store.expiries.sweep()
        assert not any(there(space, chain("a", 2)))
        assert node.store.hints.hinting.hard_bytes("alice") == 0


# ---- the others ----


async def test_a_ttl_is_prolonged_and_never_shortened():
    async with Node(16) as node:
        session, space = await opened(node)
        reserved = node.store.writes.reserve(
            session, space, chain("a", 2), [BLOCK_BYTES] * 2, b"", 0.0, lifetime=Lifetime(10.0)
        )
        await node.commit(session, reserved, chain("a", 2))
        await node.put(session, space, chain("b", 1))
        hints, entry = node.store.hints, space.entries[chain("a", 2)[0]]
        ends_s = entry.expires_s
        await hints.hint(session, space, chain("a", 1), Wish(ttl_s=5.0))
        assert entry.expires_s == ends_s
        await hints.hint(session, space, chain("a", 1), Wish(ttl_s=100.0))
        assert entry.expires_s == pytest.approx(ends_s + 90, abs=0.5)
        assert space.entries[chain("a", 2)[1]].expires_s == ends_s, "of the named ones alone"
        await hints.hint(session, space, chain("b", 1), Wish(ttl_s=100.0))
        assert not space.entries[chain("b", 1)[0]].expires_s, "what has no end gets none"
        node.clock.now += 50
        await node.store.expiries.sweep()
        assert there(space, chain("a", 2)) == [True, False]


async def test_a_prolonged_block_is_no_older_than_its_tenants_may_become():
    async with Node(16, tenants=[Tenant(name="alice", max_age_s=30.0)]) as node:
        session, space = await opened(node)
        await node.put(session, space, chain("a", 1))
        entry = space.entries[chain("a", 1)[0]]
        ends_s = entry.expires_s
        await node.store.hints.hint(session, space, chain("a", 1), Wish(ttl_s=1000.0))
        assert entry.expires_s <= ends_s


async def test_a_priority_decides_about_nvme_where_hints_do():
    async with Node(16) as node:
        session, space = await opened(node)
        await node.put(session, space, chain("a", 3))
        entries = [space.entries[hash_] for hash_ in chain("a", 3)]
        await node.store.hints.hint(session, space, chain("a", 2), Wish(priority=1))
        assert [entry.hint for entry in entries] == [True, True, False]
        await node.store.hints.hint(session, space, chain("a", 2), Wish(priority=0))
        await node.store.hints.hint(session, space, chain("a", 3), Wish(continues=True))
        assert [entry.hint for entry in entries] == [True, True, True]
        await node.store.hints.hint(session, space, chain("a", 3)[2:], Wish(final=True))
        assert [entry.hint for entry in entries] == [True, True, False]


async def test_final_blocks_leave_first_and_soft_pins_last():
    async with Node(16) as node:
        session, space = await opened(node)
        for tag in "abcd":
            await node.put(session, space, chain(tag, 4))
        await node.store.hints.hint(session, space, chain("a", 4), SOFT)
        await node.store.hints.hint(session, space, chain("d", 4), Wish(final=True))
        await node.put(session, space, chain("e", 4))
        assert not any(there(space, chain("d", 4)))
        await node.put(session, space, chain("f", 8))
        assert all(there(space, chain("a", 4)))


async def test_hints_of_readers_and_nonsense_are_refused():
    async with Node(16) as node:
        session, space = await opened(node)
        reader = await node.session("alice", role="reader")
        with pytest.raises(PermissionDenied):
            await node.store.hints.hint(reader, space, chain("a", 1), SOFT)
        for wish in (
            Wish(priority=9),
            Wish(final=True, continues=True),
            Wish(hard_pin_s=PIN_MAX_S + 1),
            Wish(ttl_s=-1),
        ):
            with pytest.raises(InvalidArgument):
                await node.store.hints.hint(session, space, chain("a", 1), wish)


async def test_who_hints_nothing_has_plain_orders():
    async with Node(16, segment_blocks=4) as node:
        session, space = await opened(node)
        other, theirs = await opened(node, "bob")
        await node.put(session, space, chain("a", 4))
        await node.put(other, theirs, chain("a", 4))
        await node.store.hints.hint(session, space, chain("a", 4), SOFT)
        orders = node.parts.catalog.orders
        assert isinstance(orders["alice", BLOCK_BYTES], Hinted)
        assert not isinstance(orders["bob", BLOCK_BYTES], Hinted)
        assert space.only_pool.order is orders["alice", BLOCK_BYTES]


async def test_pins_do_not_keep_another_from_its_guarantee():
    quotas = {"alice": Quota(guaranteed_bytes=8 * BLOCK_BYTES), "bob": Quota(guaranteed_bytes=8 * BLOCK_BYTES)}
    async with Node(28, segment_blocks=4, quotas=quotas) as node:
        alice, hers = await opened(node)
        bob, his = await opened(node, "bob")
        node.store.hints.hard_limit_of = lambda tenant: 8 * BLOCK_BYTES
        kept = []
        for number in range(7):  # one in each segment
            await node.put(bob, his, chain(f"s{number}", 4))
            kept.append(chain(f"s{number}", 4)[0])
            await node.store.hints.hint(bob, his, kept[-1:], HARD)
        assert all(there(his, kept))
        for _ in range(4000):
            if len([1 for hash_ in chain("a", 8) if hash_ in hers.entries]) == 8:
                break
            await node.put(alice, hers, chain("a", 8), wait_s=0.0)
            node.clock.now += 0.005
            await asyncio.sleep(0.005)
        assert all(there(hers, chain("a", 8)))
        assert all(there(his, kept)), "they were moved"
        assert node.counters["relocated_blocks"]


async def test_a_tenant_that_went_and_came_back_hints_its_own_blocks():
    """Its blocks stand in an order that those of before never stood in."""
    async with Node(16, tenants=ALICE) as node:
        hints = node.store.hints
        session, space = await opened(node)
        await node.put(session, space, chain("a", 8))
        await hints.hint(session, space, chain("a", 2), HARD)
        hints.hinting.trust["alice"].note(wrong=True)
        node.store.end_session(session)

        left = asyncio.Event()

        async def on_record(name):
            left.set()

        departures = Departures(node.parts, Purges(node.store), hints.hinting, on_record)
        departures.begin("alice")
        await asyncio.wait_for(left.wait(), PATIENCE_S)
        assert not node.parts.dram.used_bytes_of("alice")
        session, space = await opened(node)
        await node.put(session, space, chain("b", 8))
        assert (await hints.hint(session, space, chain("b", 8), SOFT)).applied == 2
        assert not hints.hinting.trust["alice"].wrong_share
        order = node.parts.catalog.order("alice", BLOCK_BYTES)
        assert isinstance(order, Hinted)
        assert len(list(order)) == len(order) == 8
        node.clock.now += 61
        await hints.sweep()
        await node.put(session, space, chain("c", 16))
        assert not any(there(space, chain("b", 8))), "nothing is kept for good"


async def test_who_hints_at_random_takes_nothing_from_others_and_stays_within_its_pins():
    rng = random.Random(5)
    quotas = {"alice": Quota(guaranteed_bytes=12 * BLOCK_BYTES), "bob": Quota(guaranteed_bytes=12 * BLOCK_BYTES)}
    marks = Watermarks(0.8, 0.5, 0.2)
    async with Node(48, segment_blocks=4, quotas=quotas, below=MemoryTier(), watermarks=marks) as node:
        alice, hers = await opened(node)
        bob, his = await opened(node, "bob")
        hints = node.store.hints
        hints.hard_limit_of = lambda tenant: 6 * BLOCK_BYTES
        await node.put(bob, his, chain("b", 10), wait_s=60)
        mine = set(there(his, chain("b", 10)))
        assert mine == {True}
        for number in range(150):
            tag = f"a{rng.randrange(12)}"
            await node.put(alice, hers, chain(tag, rng.randrange(1, 9)), wait_s=0.05)
            kinds = (
                HARD,
                SOFT,
                Wish(final=True),
                Wish(continues=True),
                Wish(unpin=True),
                Wish(priority=rng.randrange(-3, 4)),
            )
            await hints.hint(alice, hers, chain(tag, rng.randrange(1, 9)), rng.choice(kinds))
            assert hints.hinting.hard_bytes("alice") <= 6 * BLOCK_BYTES
            assert all(there(his, chain("b", 10))), f"step {number}"
            node.clock.now += rng.random()
            await hints.sweep()
