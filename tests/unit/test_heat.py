"""Thresholds of heat: what is hot stays where nobody waits, what comes up stays only when it is hot enough."""

import pytest

from kvstored.mover.gate import Gate
from kvstored.policy.admission import AdmitAll
from kvstored.policy.heat import Heat
from kvstored.policy.orders import OrderSettings
from kvstored.policy.two_tiers import TwoTiers
from kvstored.policy.watermarks import Watermarks
from kvstored.testing.memory_tier import MemoryTier
from kvstored.testing.node import Node
from tests.unit.test_eviction import Block, names
from tests.unit.test_simulator import replay, workload


def test_a_block_that_was_used_often_is_kept_and_a_new_one_is_not():
    order, (cold, hot) = Heat(100.0, demote_above=2.0), [Block(name=i) for i in range(2)]
    order.enter_many([cold, hot])
    for _ in range(3):
        order.touch_many([hot])
    assert (order.keeps(cold), order.keeps(hot)) == (False, True)
    assert not Heat(100.0).keeps(hot)


def test_what_comes_from_below_goes_before_all_others_until_it_is_hot_enough():
    order, (new, risen) = Heat(1000.0, promote_from=2.0), [Block(name=i) for i in range(2)]
    order.enter_many([new])
    order.from_below(risen)
    order.touch_many([risen])
    assert names(order) == [1, 0]
    order.evict_many([risen])
    again = Block(name=1)
    order.from_below(again)
    order.touch_many([again])  # for the second time: its first use is remembered
    assert names(order) == [1, 0]
    order.touch_many([again])
    assert names(order) == [0, 1]


def test_without_a_threshold_it_is_as_any_other():
    order, (new, risen) = Heat(), [Block(name=i) for i in range(2)]
    order.enter_many([new])
    order.from_below(risen)
    order.touch_many([risen])
    assert names(order) == [0, 1]


def test_what_is_remembered_of_blocks_that_went_is_bounded():
    order = Heat(promote_from=2.0)
    for number in range(1000):
        order.enter_many([block := Block(name=number)])
        order.evict_many([block])
    assert len(order._gone) == 64


def test_thresholds_are_not_negative():
    with pytest.raises(ValueError, match="negative"):
        Heat(demote_above=-1)


SETTINGS = (
    OrderSettings("heat", heat_half_life=4.0, heat_promote_from=1.5),
    OrderSettings("heat", heat_half_life=8.0, heat_demote_above=6.0),
    OrderSettings("heat", heat_half_life=8.0, heat_demote_above=8.0, heat_promote_from=1.9),
)


@pytest.mark.parametrize("settings", SETTINGS)
async def test_with_thresholds_the_store_has_exactly_the_hits_of_the_simulator(settings):
    requests, marks = workload(5, 400), Watermarks(0.6, 0.3, 0.1)
    tiers, plain = [TwoTiers(one(), 50, AdmitAll(), marks) for one in (settings, OrderSettings("heat"))]
    simulated = list(map(tiers.request, requests))
    list(map(plain.request, requests))
    assert tiers.read_blocks != plain.read_blocks, "the thresholds change nothing here"
    assert not tiers.short_blocks
    async with Node(50, below=MemoryTier(), watermarks=marks, eviction=settings, gate=Gate()) as node:
        assert await replay(node, requests) == simulated
        assert node.counters["promoted_blocks"] == tiers.read_blocks
        assert len(node.lower.blocks) == tiers.written_blocks
