"""Every order against a slow model of the same words, and what all of them promise."""

from collections import OrderedDict
from itertools import islice, pairwise
from math import log2
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.policy.eviction import Lru, Node
from kvstored.policy.heat import STEPS, Heat
from kvstored.policy.levels import Lfu
from kvstored.policy.orders import ORDERS, make_order
from kvstored.policy.returns import LEVELS
from kvstored.policy.s3fifo import S3Fifo
from kvstored.policy.shelf_life import ShelfLife


class Block(Node, gc=False, eq=False, kw_only=True):
    name: int

    @property
    def identity(self):
        return self.name


def names(order):
    return [node.name for node in order]


def blocks(count):
    return [Block(name=i) for i in range(count)]


every_order = pytest.mark.parametrize("name", sorted(ORDERS))


# ---- what all promise ----


@every_order
def test_a_new_chain_loses_its_children_before_their_parents(name):
    order, chain = make_order(name), blocks(5)
    order.enter_many(chain[::-1])
    assert names(order) == [4, 3, 2, 1, 0]
    assert len(order) == 5


@every_order
def test_removal_cuts_both_links_and_is_harmless_when_repeated(name):
    order, nodes = make_order(name), blocks(3)
    order.enter_many(nodes)
    order.remove(nodes[1])
    order.remove(nodes[1])
    order.remove_many([nodes[1], nodes[0]])
    assert names(order) == [2]
    assert len(order) == 1
    assert nodes[1].prev is None
    assert nodes[1].next is None
    order.evict_many([nodes[1], nodes[2]])
    assert len(order) == 0
    assert nodes[2].next is None


@every_order
def test_an_empty_order_yields_nothing(name):
    order, (block,) = make_order(name), blocks(1)
    assert names(order) == []
    order.touch_many([block])
    order.remove(block)
    order.touch_many([])
    order.enter_many([])
    assert names(order) == []
    assert len(order) == 0


@pytest.mark.parametrize("name", sorted(set(ORDERS) - {"heat"}))  # whose time is counted by what stands in it
def test_a_use_while_it_stands_in_the_order_and_one_that_ends_a_hold_are_the_same(name):
    def run(hold):
        order, nodes = make_order(name), blocks(40)
        order.enter_many(nodes)
        for start in (0, 5, 10, 5, 0):
            group = nodes[start : start + 10]
            if hold:
                order.remove_many(group)
            order.touch_many(group)
        return names(order)

    assert run(hold=True) == run(hold=False)


STEP = st.tuples(
    st.sampled_from(["touch", "enter", "remove", "evict", "hold"]), st.lists(st.integers(0, 11), max_size=6)
)


def apply(order, nodes, step, which):
    """One step; `evict` takes as many from the cold end. Names what was evicted."""
    chosen = [nodes[i] for i in dict.fromkeys(which)]
    if step == "touch":
        order.touch_many(chosen)
    elif step == "enter":
        order.enter_many(chosen)
    elif step == "remove":
        order.remove(chosen[0]) if len(chosen) == 1 else order.remove_many(chosen)
    elif step == "hold":
        order.remove_many(chosen)
        order.touch_many(chosen)
    else:
        chosen = list(islice(order, len(which)))
        order.evict_many(chosen)
        for victim in chosen:
            nodes[victim.name] = Block(name=victim.name)
    return [node.name for node in chosen]


@every_order
@given(steps=st.lists(STEP, max_size=40))
def test_it_holds_what_was_named_and_not_taken_out_each_once(name, steps):
    order, nodes, inside = make_order(name), blocks(12), set()
    for step, which in steps:
        changed = apply(order, nodes, step, which)
        inside = inside - set(changed) if step in ("remove", "evict") else inside | set(changed)
        assert len(order) == len(inside)
    found = names(order)
    assert sorted(found) == sorted(inside)
    assert names(order) == found  # looking changes nothing


# ---- leaves first ----


class Chains:
    """Chains of three that may share their first block, used as clients use them."""

    def __init__(self, order):
        self.order = order
        self.present = {}

    def request(self, root, middle, leaf):
        chain = [(root,), (root, middle), (root, middle, leaf)]
        run = []
        for key in chain:
            if key not in self.present:
                break
            run.append(self.present[key])
        self.order.remove_many(run)
        self.order.touch_many(run[::-1])
        new = [key for key in chain if key not in self.present]
        self.present |= {key: Block(name=hash(key)) for key in new}
        self.order.enter_many([self.present[key] for key in reversed(new)])
        self.order.enter_many([self.present[key] for key in reversed(chain[: len(run)])])

    def evict(self, count):
        victims = list(islice(self.order, count))
        self.order.evict_many(victims)
        gone = {victim.name for victim in victims}
        self.present = {key: block for key, block in self.present.items() if block.name not in gone}

    def orphans(self):
        return [key for key in self.present if len(key) > 1 and key[:-1] not in self.present]


@every_order
@given(steps=st.lists(st.one_of(st.integers(1, 4), st.tuples(*[st.integers(0, 2)] * 3)), max_size=60))
def test_no_block_outlives_its_parent(name, steps):
    chains = Chains(make_order(name))
    for step in steps:
        if isinstance(step, int):
            chains.evict(step)
        else:
            chains.request(*step)
        assert not chains.orphans()


# ---- each against its model ----


@given(st.lists(STEP, max_size=60))
def test_lru_orders_like_an_ordered_dict(steps):
    order, nodes, model = Lru(), blocks(12), OrderedDict()
    for step, which in steps:
        for name in apply(order, nodes, step, which):
            model.pop(name, None)
            if step not in ("remove", "evict"):
                model[name] = None
        assert names(order) == list(model)


class ModelShelfLife:
    """Last use, level, and a sort."""

    def __init__(self, lives):
        self.now, self.lives, self.known, self.inside = 1, lives, {}, []

    def come(self, chosen, uses):
        self.now += len(chosen)
        level = 0
        for name in chosen:
            seen = self.known.get(name, (-1, 0, False))
            again = bool(uses) or name not in self.known or seen[2]
            level = max(level, min(seen[0] + again, LEVELS - 1))
            self.known[name] = (level, self.now, False)
            self.inside = [n for n in self.inside if n != name] + [name]

    def go(self, chosen, evicted):
        for name in chosen:
            if evicted:
                self.known[name] = (*self.known[name][:2], True)
            if name in self.inside:
                self.inside.remove(name)

    def order(self):
        def due(name):
            level, last, _ = self.known[name]
            return (last + self.lives[level], level)

        return sorted(self.inside, key=due)


class ModelLfu:
    def __init__(self):
        self.uses, self.inside = {}, []

    def come(self, chosen, uses):
        for name in chosen:
            self.uses[name] = self.uses.get(name, 0) + uses
            self.inside = [n for n in self.inside if n != name] + [name]

    def go(self, chosen, evicted):
        for name in chosen:
            self.uses.pop(name, None) if evicted else None
            if name in self.inside:
                self.inside.remove(name)

    def order(self):
        return sorted(self.inside, key=self.uses.get)


class ModelHeat(ModelLfu):
    """Heats that really decay, all of them, at every step."""

    def come(self, chosen, uses):
        passed = 2.0 ** -(len(chosen) / max(len(self.inside), len(chosen)) / 2.0) if chosen else 1.0
        self.uses = {name: heat * passed for name, heat in self.uses.items()}
        for name in chosen:
            heat = self.uses.get(name)
            self.uses[name] = 1.0 if heat is None else heat + 1 if uses else max(heat, 1.0)
            self.inside = [n for n in self.inside if n != name] + [name]


def run_model(order, model, steps):
    nodes = blocks(12)
    for step, which in steps:
        changed = apply(order, nodes, step, which)
        if step in ("remove", "evict", "hold"):
            model.go(changed, step == "evict")
        if step not in ("remove", "evict"):
            model.come(changed, step != "enter")
        yield


@given(st.lists(STEP, max_size=60), st.sampled_from([(0, 0, 0, 0), (0, 7, 7, 20), (0, 3, 50, 50)]))
def test_shelf_life_orders_by_last_use_and_the_life_of_a_level(steps, lives):
    order, model = ShelfLife(), ModelShelfLife(lives)
    order._lives = lives
    with patch("kvstored.policy.shelf_life.GHOSTS_PER_BLOCK", 1000):  # the model forgets nothing
        for _ in run_model(order, model, steps):
            assert names(order) == model.order()


@given(st.lists(STEP, max_size=60))
def test_lfu_orders_by_uses_and_then_by_the_last(steps):
    order, model = Lfu(), ModelLfu()
    for _ in run_model(order, model, steps):
        assert names(order) == model.order()


@given(st.lists(STEP, max_size=60))
def test_heat_orders_by_what_is_left_of_it_to_a_step(steps):
    order, model = Heat(half_life=2.0), ModelHeat()
    for _ in run_model(order, model, steps):
        heats = [log2(model.uses[name]) for name in names(order)]
        assert all(a - b < 1 / STEPS + 1e-9 for a, b in pairwise(heats))


# ---- what is particular ----


def returning(order, *, count=80, chains=800):
    """Feed an order that holds `count` blocks with chains of 4: each second one comes four times, 12 chains apart."""
    inside, hits, asked = OrderedDict(), 0, 0
    turns = [(number, lap) for number in range(chains) for lap in range(4 if number % 2 else 1)]
    for number, _ in sorted(turns, key=lambda turn: turn[0] + 12 * turn[1]):
        chain = [4 * number + i for i in range(4)]
        found = [name for name in chain if name in inside]
        order.touch_many([inside[name] for name in reversed(found)])
        new = [Block(name=name) for name in chain if name not in inside]
        if (over := len(inside) + len(new) - count) > 0:
            victims = list(islice(order, over))
            order.evict_many(victims)
            for victim in victims:
                del inside[victim.name]
        order.enter_many(new[::-1])
        inside.update((block.name, block) for block in new)
        hits, asked = hits + len(found), asked + 4
    return hits / asked


def test_shelf_life_learns_who_comes_again_where_lru_keeps_everybody_too_short(monkeypatch):
    monkeypatch.setattr("kvstored.policy.shelf_life.LEARN_USES_MIN", 256)
    assert returning(Lru()) < 0.02
    assert returning(ShelfLife()) > 0.08


def test_shelf_life_knows_the_level_of_a_block_that_went_and_forgets_it_in_time():
    order = ShelfLife()
    order.enter_many([Block(name=7)])
    order.evict_many(list(order))
    order.enter_many([back := Block(name=7)])
    assert back.mark % LEVELS == 1
    order.evict_many([back])
    for name in range(100, 110):
        order.enter_many([passing := Block(name=name)])
        order.evict_many([passing])
    order.enter_many([back := Block(name=7)])
    assert back.mark % LEVELS == 0
    assert len(order._ghosts) + len(order._former) <= 6


def test_heat_needs_a_half_life():
    with pytest.raises(ValueError, match="over 0 turnovers"):
        Heat(0)
    assert make_order("heat", heat_half_life=3.0)._half_life == 3.0


def test_heat_does_not_gather_levels_above_a_block_that_nobody_evicts():
    order, (cold, hot) = Heat(), blocks(2)
    order.enter_many([cold])
    for _ in range(5000):
        order.touch_many([hot])
    assert names(order) == [0, 1]
    assert len(order._heap) == len(order._rings) <= 64


def test_s3fifo_lets_unused_blocks_pass_and_remembers_them():
    order, kept, passing = S3Fifo(), blocks(8), [Block(name=100 + i) for i in range(20)]
    order.enter_many(kept)
    order.touch_many(kept)
    order.enter_many(passing)
    first = list(islice(order, 4))
    assert [block.name for block in first] == [100, 101, 102, 103]
    order.evict_many(first)
    order.enter_many([Block(name=103)])
    order.enter_many([Block(name=200)])
    found = names(order)
    assert found[-2:] == [103, 200]  # what is left for the small queue goes last
    order.enter_many([Block(name=200 + i) for i in range(1, 9)])
    found = names(order)
    assert found.index(103) > found.index(200)


def test_s3fifo_gives_a_used_block_of_the_main_queue_another_round():
    order, nodes = S3Fifo(), blocks(20)
    order.enter_many(nodes)
    order.touch_many(nodes)
    order.touch_many([nodes[5]])
    order.enter_many([nodes[6]])
    found = names(order)
    assert found.index(5) > found.index(6)


def test_a_node_prints_itself_and_not_the_order_it_is_in():
    order, nodes = Lru(), blocks(5000)
    order.touch_many(nodes)
    assert len(repr(nodes[0])) < 100


def test_orders_are_made_by_name_and_an_unknown_name_is_told_which_there_are():
    assert isinstance(make_order("lru"), Lru)
    with pytest.raises(ValueError, match=r"'mru': it must be one of .*lru"):
        make_order("mru")
