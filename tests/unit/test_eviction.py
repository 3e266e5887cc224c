from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.policy.eviction import Lru, Node, make_order


class Block(Node, gc=False, eq=False, kw_only=True):
    name: int


def names(order):
    found, node = [], order.coldest()
    while node is not None:
        found.append(node.name)
        node = order.warmer(node)
    return found


def test_the_least_recently_touched_goes_first():
    order, blocks = Lru(), [Block(name=i) for i in range(4)]
    for block in blocks:
        order.insert(block, 0.0)
    order.touch(blocks[0], 1.0)
    assert names(order) == [1, 2, 3, 0]
    assert len(order) == 4


def test_a_chain_touched_tail_first_loses_its_children_before_their_parents():
    order, chain = Lru(), [Block(name=i) for i in range(5)]
    order.touch_many(reversed(chain), 0.0)
    assert names(order) == [4, 3, 2, 1, 0]


def test_removal_cuts_both_links_and_is_harmless_when_repeated():
    order, blocks = Lru(), [Block(name=i) for i in range(3)]
    order.touch_many(blocks, 0.0)
    order.remove(blocks[1])
    order.remove(blocks[1])
    assert names(order) == [0, 2]
    assert len(order) == 2
    assert blocks[1].prev is None
    assert blocks[1].next is None


def test_an_empty_order_has_no_coldest_node():
    order, block = Lru(), Block(name=1)
    assert order.coldest() is None
    order.touch(block, 0.0)
    order.remove(block)
    assert order.coldest() is None
    assert len(order) == 0


def test_inserting_a_node_twice_is_a_mistake():
    order, block = Lru(), Block(name=1)
    order.insert(block, 0.0)
    with pytest.raises(AssertionError, match="one order"):
        order.insert(block, 0.0)


@given(st.lists(st.tuples(st.sampled_from(["touch", "remove"]), st.integers(0, 7)), max_size=60))
def test_it_orders_like_an_ordered_dict(steps):
    order, blocks, model = Lru(), [Block(name=i) for i in range(8)], OrderedDict()
    for step, name in steps:
        getattr(order, step)(blocks[name], *([0.0] if step == "touch" else []))
        model.pop(name, None)
        if step == "touch":
            model[name] = None
        assert names(order) == list(model)
        assert len(order) == len(model)


def test_a_node_prints_itself_and_not_the_order_it_is_in():
    order, blocks = Lru(), [Block(name=i) for i in range(5000)]
    order.touch_many(blocks, 0.0)
    assert len(repr(blocks[0])) < 100


def test_orders_are_made_by_name_and_an_unknown_name_is_told_which_there_are():
    assert isinstance(make_order("lru"), Lru)
    with pytest.raises(ValueError, match=r"'mru': it must be one of .*lru"):
        make_order("mru")
