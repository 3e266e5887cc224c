"""Another eviction order while the last one is in use: nothing is lost, leaves go first, and a piece is small."""

import asyncio
import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.catalog.reordering import PIECE_BLOCKS, Reordering
from kvstored.errors import FailedPrecondition
from kvstored.mover.recency import Recency
from kvstored.policy.change import USES_MAX, Change, is_written, uses_in, written
from kvstored.policy.eviction import Node as Linked
from kvstored.policy.orders import ORDERS, OrderSettings, make_order
from kvstored.policy.s3fifo import S3Fifo
from kvstored.testing.node import BLOCK_BYTES, Node

KINDS = sorted(ORDERS)


class Block(Linked, gc=False, eq=False, kw_only=True):
    name: int


class Chains:
    """Chains of three that may share their first block; some are held for a while."""

    def __init__(self, order):
        self.order = order
        self.present = {}
        self.held = []
        # Orphans count no more: a block was used while it was held, so that its own use, at the end of the hold, comes
        # once where its children's came several times. Counting orders may leave one then, change or not; s3fifo may.
        self.lenient = False

    def request(self, root, middle, leaf, hold):
        chain = [(root,), (root, middle), (root, middle, leaf)]
        run = []
        for key in chain:
            if key not in self.present:
                break
            run.append(self.present[key])
        free = [block for block in run if not self.is_held(block)]
        self.lenient = self.lenient or len(free) < len(run)
        self.order.remove_many(free)
        if hold:
            self.held.append(run)  # a block may be held several times, and comes back when the last one ends
            return
        self.order.touch_many(free[::-1])
        new = [key for key in chain if key not in self.present]
        self.present |= {key: Block(name=hash(key)) for key in new}
        self.order.enter_many([self.present[key] for key in reversed(new)])
        self.order.enter_many(free[::-1])

    def is_held(self, block):
        return any(block in one for one in self.held)

    def release(self):
        if self.held:
            released = self.held.pop(0)
            self.order.touch_many([block for block in reversed(released) if not self.is_held(block)])

    def evict(self, count):
        gone = set(map(id, victims := list(islice(self.order, count))))
        self.order.evict_many(victims)
        self.present = {key: block for key, block in self.present.items() if id(block) not in gone}

    def orphans(self):
        if self.lenient or isinstance(self.order, S3Fifo):
            return []
        return [key for key in self.present if len(key) > 1 and key[:-1] not in self.present]

    def settle(self):
        for block in self.present.values():
            self.order.look(block)


STEP = st.one_of(
    st.integers(0, 3),
    st.just("release"),
    st.tuples(*[st.integers(0, 2)] * 3, st.booleans()),
)


def do(chains, step):
    if step == "release":
        chains.release()
    elif isinstance(step, int):
        chains.evict(step)
    else:
        chains.request(*step)
    assert not chains.orphans()
    inside = [block for block in chains.present.values() if not any(block in one for one in chains.held)]
    assert sorted(map(id, chains.order)) == sorted(map(id, inside))
    assert len(chains.order) == len(inside)


@pytest.mark.parametrize("old", KINDS)
@pytest.mark.parametrize("new", KINDS)
@given(before=st.lists(STEP, max_size=20), between=st.lists(STEP, max_size=20), after=st.lists(STEP, max_size=10))
def test_no_block_is_lost_or_outlives_its_parent_before_during_and_after(old, new, before, between, after):
    target, between = make_order(new), iter(between)
    chains = Chains(make_order(old))
    # These remember blocks that went, so that a child may come back with more uses than its parent has: one orphan in
    # some hundred such sequences, where the next order counts uses.
    chains.lenient = old in ("s3fifo", "shelf_life")
    for step in before:
        do(chains, step)
    change = chains.order = Change(chains.order, target)
    while change.empty_old(2):
        do(chains, next(between, 0))
    chains.settle()
    while change.fill_new(2):
        do(chains, next(between, 0))
    for step in between:
        do(chains, step)
    chains.settle()
    assert not any(is_written(block.mark) for block in chains.present.values())
    chains.order = target
    for step in after:
        do(chains, step)
    for _ in range(len(chains.held)):
        do(chains, "release")


def test_uses_go_over_to_the_next_order():
    order, blocks = make_order("lfu"), [Block(name=i) for i in range(4)]
    order.enter_many(blocks)
    for block in blocks[:2]:
        order.touch_many([block] * 3)
    order.remove(blocks[0])  # held, since before the change
    change = Change(order, target := make_order("heat", heat_half_life=1e4))
    while change.empty_old(1):
        pass
    for block in blocks:
        change.look(block)
    while change.fill_new(1):
        pass
    for block in blocks:
        change.look(block)
    target.enter_many(blocks[:1])
    assert [target.uses(block) for block in blocks] == [3, 3, 0, 0]
    assert [node.name for node in target] == [2, 3, 1, 0]


def test_a_mark_says_uses_in_numbers_that_no_order_makes():
    assert [uses_in(written(uses)) for uses in (0, 1, 7, USES_MAX, 10**9)] == [0, 1, 7, USES_MAX, USES_MAX]
    assert all(map(is_written, map(written, (0, 1, USES_MAX))))
    assert not is_written(1e12)


# ---- in the store ----


def hashes(tag, count):
    return [f"{tag}{i:06}".encode() for i in range(count)]


async def busy_node(node, sessions):
    """Two tenants with blocks, some of them leased, some reserved; returns what is leased."""
    held = []
    for tenant, size in sessions:
        session = await node.session(tenant)
        space = await node.space(session)
        for tag in "abc":
            await node.put(session, space, hashes(tag, size))
        held.append((session, space, await node.get(session, space, hashes("a", size))))
    return held


@pytest.mark.parametrize("old", KINDS)
@pytest.mark.parametrize("new", KINDS)
async def test_the_store_changes_its_policy_while_it_is_used(old, new):
    rng = random.Random(7)
    async with Node(256, segment_blocks=16, eviction=old) as node:
        held = await busy_node(node, [("alice", 20), ("bob", 12)])
        reordering = Reordering(node.parts.catalog, node.parts.dram, node.order_settings)
        assert reordering.begin(OrderSettings(new)) == (new != old)
        while reordering.changing:
            session, space, _ = rng.choice(held)
            tag, number = rng.choice("abcd"), rng.randrange(1, 12)
            if rng.random() < 0.5:
                await node.put(session, space, hashes(tag, number))
            else:
                got = await node.get(session, space, hashes(tag, number))
                node.store.reads.release(session, [lease.lease_id for lease in got.leases])
            await asyncio.sleep(0)
            check_chains(node)
        await reordering.ended()
        for session, _, got in held:
            node.store.reads.release(session, [lease.lease_id for lease in got.leases])
        catalog = node.parts.catalog
        assert all(type(order) is ORDERS[new] for order in catalog.orders.values())
        for space in catalog.spaces.values():
            for pool in space.pools.values():
                assert pool.order is catalog.orders[space.tenant, pool.slot_bytes]
        entries = [entry for space in catalog.spaces.values() for entry in space.entries.values()]
        assert sum(map(len, catalog.orders.values())) == len(entries) > 60
        assert not any(is_written(entry.mark) for entry in entries)
        check_chains(node)


def check_chains(node):
    """In every order children stand before their parents."""
    for order in node.parts.catalog.orders.values():
        entries = list(order.drained())
        place = {entry.hash: number for number, entry in enumerate(entries)}
        for entry in entries:
            assert place.get(entry.parent, len(place)) > place[entry.hash]


async def test_one_change_at_a_time_and_none_to_what_is_in_force():
    async with Node(32) as node:
        await busy_node(node, [("alice", 4)])
        reordering = Reordering(node.parts.catalog, node.parts.dram, node.order_settings)
        assert not reordering.begin(OrderSettings("lru"))
        assert reordering.begin(OrderSettings("heat"))
        with pytest.raises(FailedPrecondition, match="under way"):
            reordering.begin(OrderSettings("lfu"))
        await reordering.ended()
        assert reordering.begin(OrderSettings("lfu"))
        await reordering.ended()
        assert not reordering.changing


async def test_an_epoch_that_ends_during_the_change_takes_nothing_out_of_order():
    async with Node(64, eviction="lfu") as node:
        await busy_node(node, [("alice", 8)])
        catalog = node.parts.catalog
        reordering = Reordering(catalog, node.parts.dram, node.order_settings)
        reordering.begin(OrderSettings("s3fifo"))
        (space,) = catalog.spaces.values()
        catalog.digest_of = lambda namespace: b"next" + namespace.digest[4:]
        old = catalog.retire(space)
        await reordering.ended()
        assert {type(pool.order) for pool in old.pools.values()} == {ORDERS["s3fifo"]}


async def test_no_piece_of_a_change_moves_more_than_its_share(monkeypatch):
    sizes = []
    for name in ("empty_old", "fill_new"):
        step = getattr(Change, name)
        monkeypatch.setattr(Change, name, lambda self, count, step=step: (sizes.append(count), step(self, count))[1])
    async with Node(64, eviction="lru") as node:
        await busy_node(node, [("alice", 8)])
        reordering = Reordering(node.parts.catalog, node.parts.dram, node.order_settings)
        reordering.begin(OrderSettings("heat"))
        await reordering.ended()
    assert set(sizes) == {PIECE_BLOCKS}


async def test_what_is_noted_for_a_restart_is_the_order_that_is_in_force(monkeypatch):
    async with Node(64, eviction="lru") as node:
        session = await node.session()
        space = await node.space(session)
        for tag in "abc":
            await node.put(session, space, hashes(tag, 4))
        reordering = Reordering(node.parts.catalog, node.parts.dram, node.order_settings)
        reordering.begin(OrderSettings("shelf_life"))
        await asyncio.sleep(0)  # in the middle
        ranks = {}
        monkeypatch.setattr(type(node.parts.dram), "boot", 1)
        monkeypatch.setattr(node.parts.dram.records, "rank", ranks.__setitem__, raising=False)
        for _ in range(2):
            ranks.clear()
            await Recency(node.parts.catalog, node.parts.dram).note_all()
            order = node.parts.catalog.orders["alice", BLOCK_BYTES]
            assert [entry.slot for entry in order] == sorted(ranks, key=ranks.get)
            assert len(ranks) == 12
            await reordering.ended()


def test_a_walk_that_meets_a_change_ends_and_yields_blocks_alone():
    order, nodes = make_order("shelf_life"), [Block(name=i) for i in range(6)]
    order.enter_many(nodes)
    walk = iter(order)
    next(walk)
    order.touch_many([nodes[0]])  # in the other ring by now, whose end is not that of its own
    assert all(type(node) is Block for node in walk)
