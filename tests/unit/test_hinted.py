"""Hints in front of every eviction order: what they do, and that a wrong one costs little."""

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.policy.change import Change
from kvstored.policy.eviction import Node
from kvstored.policy.hinted import Hinted
from kvstored.policy.hints import HARD, INNER, PRIORITY_MAX, Trust
from kvstored.policy.orders import ORDERS, make_order
from kvstored.policy.simulator import Tier

KINDS = sorted(ORDERS)
every_order = pytest.mark.parametrize("name", KINDS)


class Block(Node, gc=False, eq=False, kw_only=True):
    name: object

    @property
    def identity(self):
        return self.name


def blocks(count, first=0):
    return [Block(name=first + i) for i in range(count)]


def names(order):
    return [node.name for node in order]


def filled(name, count):
    order, nodes = Hinted(make_order(name)), blocks(count)
    for node in nodes:
        order.enter_many([node])
    return order, nodes


# ---- what each does ----


@every_order
def test_a_soft_pin_goes_last_until_it_ends(name):
    order, nodes = filled(name, 8)
    assert order.pin(nodes[:2], 10.0) == 2
    assert names(order) == [2, 3, 4, 5, 6, 7, 1, 0]
    assert not order.sweep(9.9, 100)
    assert names(order)[-2:] == [1, 0]
    order.sweep(10.0, 100)
    assert not order.known
    assert sorted(names(order)) == list(range(8))


@every_order
def test_soft_pins_are_at_most_a_quarter_of_the_blocks(name):
    order, nodes = filled(name, 16)
    assert order.pin(nodes[:10], 10.0) == 4
    assert order.pin(nodes[:10], 20.0) == 4, "those that are pinned need no new place"
    assert order.pin(nodes[10:], 10.0) == 0


@every_order
def test_a_hard_pin_is_in_no_walk_while_it_lasts(name):
    order, nodes = filled(name, 6)
    order.pin(nodes[:3], 10.0, hard=True)
    assert sorted(names(order)) == [3, 4, 5]
    assert [order.fixed(node) for node in nodes] == [True] * 3 + [False] * 3
    assert sorted(names(order.drained())) == list(range(6)), "it is noted for a restart all the same"
    order.remove_many(nodes[:1])
    order.touch_many(nodes[:1])
    assert sorted(names(order)) == [3, 4, 5]
    order.sweep(10.0, 1)
    order.sweep(10.0, 1)
    order.sweep(10.0, 1)
    assert sorted(names(order)) == list(range(6))


@every_order
def test_a_hard_pin_that_ends_may_still_be_a_soft_one(name):
    order, nodes = filled(name, 8)
    order.pin(nodes[:1], 5.0, hard=True)
    order.pin(nodes[:1], 9.0)
    order.sweep(5.0, 10)
    assert names(order)[-1] == 0
    order.sweep(9.0, 10)
    assert order.counts == [0, 0, 0, 0]


@every_order
def test_final_blocks_go_first_and_a_use_takes_it_back(name):
    order, nodes = filled(name, 6)
    assert order.end(nodes[3:]) == 3
    assert names(order)[:3] == [5, 4, 3]
    order.touch_many([nodes[5]])
    assert names(order)[:2] == [4, 3]
    assert order.trust.wrong_share > 0
    order.pin(nodes[4:5], 1.0, hard=True)
    assert order.end(nodes[4:5]) == 0, "what is pinned stays so"


@every_order
def test_the_end_of_a_lease_under_which_final_was_said_is_no_use(name):
    order, nodes = filled(name, 4)
    order.remove_many(nodes[2:])
    order.end(nodes[2:])
    order.touch_many(nodes[:1:-1])
    assert names(order)[:2] == [3, 2]
    assert order.trust.wrong_share == 0
    order.touch_many(nodes[2:])
    assert order.trust.wrong_share > 0


@pytest.mark.parametrize("name", sorted(set(KINDS) - {"lru"}))
def test_a_priority_counts_as_uses_and_not_twice(name):
    order, nodes = Hinted(make_order(name, heat_half_life=1e6)), blocks(8)
    order.enter_many(nodes)
    for _ in range(3):
        order.prefer(nodes[:1], 2)
    assert order.uses(nodes[0]) in (1, 2)  # shelf_life knows of one
    order.prefer(nodes[:1], 0)
    assert order.uses(nodes[0]) == 0
    assert not order.known
    order.touch_many(nodes[1:2])
    order.prefer(nodes[1:2], -PRIORITY_MAX)
    order.prefer(nodes[1:2], -PRIORITY_MAX)
    assert order.uses(nodes[1]) <= 1


def test_who_is_often_wrong_about_final_is_not_believed_until_right_again():
    order, nodes = filled("lru", 64)
    trust = order.trust
    while trust.earned:
        order.end(nodes[:1])
        order.touch_many(nodes[:1])
    assert order.end(nodes[5:6]) == 0
    assert names(order)[0] != 5, "it has no effect"
    order.evict_many(nodes[5:6])
    before = trust.wrong_share
    new = Block(name=5)
    order.enter_many([new])  # asked for again
    assert trust.wrong_share > before
    number = 1000
    while not trust.earned:
        fresh = Block(name=number)
        order.enter_many([fresh])
        order.end([fresh])
        order.evict_many([fresh])
        number += 1
    assert order.end(nodes[6:7]) == 1
    assert len(order._gone) <= 65


def test_trust_is_an_average():
    trust = Trust()
    for _ in range(1000):
        trust.note(wrong=True)
    assert 0.99 < trust.wrong_share <= 1


def test_pins_again_and_again_do_not_gather_ends():
    order, nodes = filled("lru", 16)
    for until_s in range(1, 2000):
        order.pin(nodes[:4], float(until_s))
    assert len(order._ends) <= 2 * 4 + 64 + 4
    order.sweep(1998.0, 10_000)
    assert len(order.known) == 4
    order.sweep(1999.0, 10_000)
    assert not order.known


# ---- whatever is hinted ----


class Chains:
    """Chains of three that may share their first blocks, used and hinted as clients do."""

    def __init__(self, order):
        self.order, self.present, self.now_s = order, {}, 0.0

    def chain(self, root, middle, leaf):
        return [(root,), (root, middle), (root, middle, leaf)]

    def run(self, which):
        run = []
        for key in self.chain(*which):
            if key not in self.present:
                break
            run.append(self.present[key])
        return run

    def request(self, which):
        chain, run = self.chain(*which), self.run(which)
        self.order.remove_many(run)
        self.order.touch_many(run[::-1])
        new = [key for key in chain if key not in self.present]
        self.present |= {key: Block(name=key) for key in new}
        self.order.enter_many([self.present[key] for key in reversed(new)])
        self.order.enter_many([self.present[key] for key in reversed(chain) if key not in new])

    def hint(self, kind, which):
        run = self.run(which)
        if kind == "soft":
            self.order.pin(run, self.now_s + 3)
        elif kind == "hard":
            self.order.pin(run, self.now_s + 3, hard=True)
        elif kind == "unpin":
            self.order.unpin(run)
        elif kind == "final":
            self.order.end(run[2:])  # what no other chain hangs on
        else:
            self.order.prefer(run, kind)

    def evict(self, count):
        victims = list(islice(self.order, count))
        assert not any(self.order.fixed(victim) for victim in victims)
        self.order.evict_many(victims)
        for victim in victims:
            del self.present[victim.name]

    def check(self):
        inside = sorted(node.name for node in self.present.values())
        assert sorted(names(self.order.drained())) == inside
        assert len(self.order) == len(inside)
        hard = {node.name for node, hint in self.order.known.items() if hint.place == HARD}
        assert set(names(self.order)) == set(inside) - hard
        places = [hint.place for hint in self.order.known.values()]
        assert self.order.counts == [places.count(place) for place in range(4)]
        assert all(node.prev is not None for node in self.present.values())


WHICH = st.tuples(*[st.integers(0, 2)] * 3)
KIND = st.one_of(st.sampled_from(["soft", "hard", "unpin", "final"]), st.integers(-3, 3))


@every_order
@given(steps=st.lists(st.one_of(st.integers(1, 3), WHICH, st.tuples(KIND, WHICH)), max_size=50))
def test_no_block_is_lost_and_no_pin_is_evicted(name, steps):
    chains = Chains(Hinted(make_order(name)))
    for step in steps:
        chains.now_s += 1
        chains.order.sweep(chains.now_s, 100)
        if isinstance(step, int):
            chains.evict(step)
        elif len(step) == 2:
            chains.hint(*step)
        else:
            chains.request(step)
        chains.check()
        for key, node in chains.present.items():
            hint = chains.order.known.get(node)
            above = chains.present.get(key[:-1])
            unpinned = any(isinstance(one, tuple) and one[0] == "unpin" for one in steps)  # perhaps what others hang on
            if hint and hint.place == HARD and above is not None and not unpinned:
                assert chains.order.fixed(above), "what a pinned block hangs on is pinned"


@every_order
def test_hints_outlive_a_change_of_the_order_behind_them(name):
    order, nodes = filled("lfu", 12)
    order.pin(nodes[:2], 5.0, hard=True)
    order.pin(nodes[2:4], 5.0)
    order.end(nodes[4:5])
    order.prefer(nodes[5:6], 3)
    held = nodes[6:8]
    order.remove_many(held)
    target = make_order(name)
    change = order.inner = Change(order.inner, target)
    while change.empty_old(1):
        order.prefer(nodes[8:9], 2)
    for node in nodes:
        change.look(node)
    while change.fill_new(1):
        order.unpin(nodes[2:3])
    for node in nodes:
        change.look(node)
    order.inner = target
    order.touch_many(held)
    assert names(order)[0] == 4
    assert sorted(names(order)) == list(range(2, 12))
    order.sweep(5.0, 100)
    assert sorted(names(order)) == list(range(12))
    assert all(hint.place == INNER for node, hint in order.known.items() if node is not nodes[4])


# ---- the price of wrong hints ----


def chat(seed, requests):
    """Sessions that grow turn by turn, behind a few prompts that they share; some are never seen again."""
    rng = random.Random(seed)
    sessions, number = [], 0
    for _ in range(requests):
        if not sessions or rng.random() < 0.15:
            prompt = rng.choice((0, 0, 0, 1, 2))
            sessions.append([-100 * (prompt + 1) - i for i in range(6)])
        place = min(int(rng.expovariate(0.12)), len(sessions) - 1)
        session = sessions.pop(len(sessions) - 1 - place)
        session += range(number, number := number + rng.randrange(1, 8))
        if rng.random() < 0.93:
            sessions.append(session)
        yield list(session)


def hits(order, requests, say=None):
    tier = Tier(order, 600)
    total = 0
    for now_s, ids in enumerate(requests):
        total += tier.request(ids)
        if say is not None:
            order.sweep(float(now_s), 10_000)
            say(tier, order, float(now_s), ids)
    return total


def at_random(seed):
    rng = random.Random(seed)

    def say(tier, order, now_s, ids):
        run = [tier._present[block] for block in ids if block in tier]
        kind = rng.choice(("soft", "continues", "final", "priority", "unpin"))
        if kind == "final":
            order.end(run[rng.randrange(len(run)) :])
        elif kind == "priority":
            order.prefer(run, rng.randrange(-3, 4))
        elif kind == "unpin":
            order.unpin(run)
        else:
            order.pin(run, now_s + (20 if kind == "soft" else 5))

    return say


@every_order
def test_who_hints_everything_at_random_loses_a_few_per_cent_of_its_hits(name):
    requests = list(chat(3, 1500))
    without = hits(make_order(name), requests)
    for seed in range(3):
        with_hints = hits(Hinted(make_order(name)), requests, at_random(seed))
        assert with_hints > 0.93 * without


@every_order
def test_who_is_right_about_what_ends_gains(name):
    requests = list(chat(3, 1500))
    last = {}
    for number, ids in enumerate(requests):
        for block in ids:
            last[block] = number
    without = hits(make_order(name), requests)

    def say(tier, order, now_s, ids):
        order.end([tier._present[block] for block in ids if block in tier and last[block] <= now_s])

    order = Hinted(make_order(name))
    assert hits(order, requests, say) > 1.02 * without
    assert order.trust.wrong_share == 0
