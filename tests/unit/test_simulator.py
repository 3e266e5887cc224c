"""The simulator: its own rules, the daemon's store doing the same, the ideal, and reading of traces."""

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.policy.eviction import Lru
from kvstored.policy.ideal import ideal_hits
from kvstored.policy.orders import ORDERS, make_order
from kvstored.policy.simulator import Tier, simulate
from kvstored.policy.trace import parse
from kvstored.testing.node import Node

CHAINS = [[100 * c + i for i in range(length)] for c, length in enumerate((3, 9, 5, 12, 2, 7, 8, 4))]
FORKS = [chain[: len(chain) // 2] + [1000 + block for block in chain[len(chain) // 2 :]] for chain in CHAINS]


def workload(seed, count):
    rng = random.Random(seed)
    return [(chain := rng.choice(CHAINS + FORKS))[: rng.randrange(1, len(chain) + 1)] for _ in range(count)]


# ---- a tier ----


def test_the_tail_of_a_chain_goes_before_its_head():
    tier = Tier(Lru(), 4)
    tier.request([1, 2, 3])
    tier.request([10, 11])  # needs one more block than is free
    assert [block in tier for block in (1, 2, 3, 10, 11)] == [True, True, False, True, True]
    assert len(tier) == 4


def test_only_leading_blocks_are_hits():
    tier = Tier(Lru(), 10)
    tier.request([1, 2, 3])
    assert tier.request([1, 2, 9, 3]) == 2
    assert tier.request([8, 1, 2]) == 0
    assert tier.request([]) == 0


def test_extending_a_chain_keeps_parents_longer_than_children():
    tier = Tier(Lru(), 4)
    tier.request([1, 2])
    tier.request([1, 2, 3, 4])
    tier.request([20])
    assert 4 not in tier
    tier.request([30])
    assert 3 not in tier
    assert 1 in tier
    assert 2 in tier


def test_the_least_recently_used_chain_goes_first():
    assert list(simulate([[1, 2], [3, 4], [1, 2], [5, 6], [1, 2], [3, 4]], Lru(), 4)) == [0, 0, 2, 0, 2, 0]


def test_a_chain_longer_than_the_tier_is_cut_at_its_tail():
    tier = Tier(Lru(), 3)
    assert tier.request([1, 2, 3, 4, 5]) == 0
    assert len(tier) == 3
    assert tier.request([1, 2, 3, 4, 5]) == 3


def test_a_tier_without_room_is_refused():
    with pytest.raises(ValueError, match="0 blocks"):
        Tier(Lru(), 0)


@pytest.mark.parametrize("name", sorted(ORDERS))
async def test_the_store_has_exactly_the_hits_of_the_simulator(name):
    requests = workload(5, 300)
    simulated = list(simulate(requests, make_order(name), 30))
    assert 0 < sum(simulated) < sum(map(len, requests))
    found = []
    async with Node(30, eviction=name) as node:
        session = await node.session()
        space = await node.space(session)
        for ids in requests:
            hashes = [f"{block:016}".encode() for block in ids]
            held = await node.get(session, space, hashes)
            node.store.reads.release(session, [lease.lease_id for lease in held.leases])
            if held.blocks < len(ids):
                parent = hashes[held.blocks - 1] if held.blocks else b""
                await node.put(session, space, hashes[held.blocks :], parent)
            found.append(held.blocks)
    assert found == simulated


# ---- the ideal ----


def best_hits(requests, capacity):
    """The most hits of any choice of what to keep, by trying them all."""
    best = {frozenset(): 0}
    for ids in requests:
        after = {}
        for kept, hits in best.items():
            leading = next((i for i, block in enumerate(ids) if block not in kept), len(ids))
            pool = kept | set(ids)
            size = min(capacity, len(pool))
            for keep in itertools.combinations(sorted(pool), size):
                key = frozenset(keep)
                after[key] = max(after.get(key, 0), hits + leading)
        best = after
    return max(best.values())


TREE = [[1], [1, 2], [1, 2, 3], [1, 4], [5], [5, 6]]


@given(st.lists(st.sampled_from(TREE), max_size=8), st.integers(1, 4))
def test_the_ideal_is_the_best_of_all_choices(requests, capacity):
    assert sum(ideal_hits(requests, capacity)) == best_hits(requests, capacity)


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_no_order_beats_the_ideal(name):
    requests = workload(7, 400)
    for capacity in (5, 20, 60):
        assert sum(simulate(requests, make_order(name), capacity)) <= sum(ideal_hits(requests, capacity))


# ---- traces ----


def test_a_line_of_a_jsonl_trace_names_its_blocks():
    lines = [
        '{"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [4, 5]}\n',
        "\n",
        json.dumps({"timestamp": 3, "input_length": 600, "output_length": 1, "hash_ids": ["a", 5]}),
    ]
    assert list(parse(lines)) == [[4, 5], ["a", 5]]
    assert list(parse(lines, limit=1)) == [[4, 5]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["x\n"], "line 1 is neither"),
        ([], "line 1 is neither"),
        (['{"timestamp": 1}\n'], "line 1 is neither"),
        (['{"block_tokens": 0, "partial": true}\n'], "block_tokens is 0"),
        (['{"hash_ids": [1]}\n', "{\n"], "line 2 is no request"),
        (['{"hash_ids": [1]}\n', '{"hash_ids": 7}\n'], "line 2 is no request"),
        (['{"hash_ids": [1, 2, 1]}\n'], "line 1: an id stands twice"),
        (['{"block_tokens": 512, "partial": true}\n', "1,2,3\n"], "line 2: '1,2,3' is not six"),
        (['{"block_tokens": 512, "partial": true}\n', "0,0,-5,1,0,0\n"], "line 2: "),
    ],
)
def test_what_is_no_trace_is_an_error_that_names_the_line(lines, message):
    with pytest.raises(ValueError, match=message):
        list(parse(lines))
