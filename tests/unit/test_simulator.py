"""The simulator: its own rules, the daemon's store doing the same, the ideal, and reading of traces."""

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.mover.gate import Gate
from kvstored.policy.admission import ADMISSIONS, make_admission
from kvstored.policy.calls import Call
from kvstored.policy.eviction import Lru
from kvstored.policy.extent_log import ExtentLog
from kvstored.policy.ideal import ideal_hits
from kvstored.policy.orders import ORDERS, make_order
from kvstored.policy.simulator import Tier, simulate
from kvstored.policy.simulator import replay as replay_calls
from kvstored.policy.trace import parse, text_lines
from kvstored.policy.two_tiers import TwoTiers
from kvstored.policy.watermarks import Watermarks
from kvstored.testing.memory_tier import MemoryTier
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


# ---- two tiers ----


async def replay(node, requests):
    """Hits of each request, with the mover at rest after every step."""
    session = await node.session()
    space = await node.space(session)
    found = []
    for ids in requests:
        hashes = [f"{block:016}".encode() for block in ids]
        held = await node.get(session, space, hashes, wait_s=60)
        await node.settle()
        node.store.reads.release(session, [lease.lease_id for lease in held.leases])
        await node.settle()
        if held.blocks < len(ids):
            parent = hashes[held.blocks - 1] if held.blocks else b""
            await node.put(session, space, hashes[held.blocks :], parent)
            await node.settle()
        found.append(held.blocks)
    return found


@pytest.mark.parametrize("admission", sorted(ADMISSIONS))
@pytest.mark.parametrize("name", sorted(ORDERS))
async def test_with_nvme_below_the_store_has_exactly_the_hits_of_the_simulator(name, admission):
    requests, marks = workload(5, 400), Watermarks(0.6, 0.3, 0.1)
    tiers = TwoTiers(make_order(name), 50, make_admission(admission), marks, memory_keys=60)
    simulated = list(map(tiers.request, requests))
    assert not tiers.short_blocks, "a request needs more room than is left free: the comparison says nothing"
    gate = Gate(make_admission(admission), name=admission, memory_keys=60)
    async with Node(50, below=MemoryTier(), watermarks=marks, eviction=name, gate=gate) as node:
        found = await replay(node, requests)
        assert found == simulated
        assert len(node.lower.blocks) == len(tiers.below) == tiers.written_blocks
        assert node.counters["not_admitted_blocks"] == tiers.refused_blocks
        assert node.counters["promoted_blocks"] == tiers.read_blocks


def test_admission_trades_hits_for_writes():
    requests = workload(5, 400)
    figures = {}
    for admission in ADMISSIONS:
        tiers = TwoTiers(make_order("lru"), 50, make_admission(admission), Watermarks(0.6, 0.3, 0.1), memory_keys=60)
        hits = sum(map(tiers.request, requests))
        figures[admission] = (hits, tiers.written_blocks)
    assert figures["admit_all"][0] > figures["second_hit"][0] > figures["hinted"][0]
    assert figures["admit_all"][1] > figures["second_hit"][1] > figures["hinted"][1] == 0


def test_a_log_gives_up_its_oldest_extent_whole():
    log = ExtentLog(10, 2)
    log.append(range(10))
    assert len(log) == 10
    log.append([20])
    assert [n for n in range(10) if n not in log] == [0, 1]
    assert 20 in log
    assert log.recycled_blocks == 2
    with pytest.raises(ValueError, match="two extents"):
        ExtentLog(3, 2)


def test_a_small_nvme_loses_hits_and_writes_again_what_it_lost():
    requests = workload(7, 400)
    figures = []
    for capacity in (20, 60, None):
        log = ExtentLog(capacity, 5)
        tiers = TwoTiers(make_order("lru"), 30, make_admission(), Watermarks(0.6, 0.3, 0.1), nvme=log, waits=True)
        hits = sum(map(tiers.request, requests))
        assert len(log) == tiers.written_blocks - log.recycled_blocks
        figures.append((hits, -tiers.written_blocks))
    assert figures == sorted(set(figures))


def test_who_waits_gets_room_where_all_of_it_has_to_be_written_first():
    for waits in (False, True):
        tiers = TwoTiers(make_order("lru"), 10, make_admission(), Watermarks(0.9, 0.8, 0.1), waits=waits)
        assert tiers.request(list(range(8))) == 0
        assert tiers.request(list(range(100, 108))) == 0
        assert tiers.short_blocks > 0
        assert all(block in tiers or block in tiers.below for block in range(100, 108)) is waits


# ---- calls ----


def test_a_put_alone_stores_what_this_tier_missed_of_its_get():
    tier = Tier(Lru(), 6)
    calls = [
        Call(ids=[1, 2, 3], puts=False),
        Call(ids=[1, 2, 3], gets=False, start=2, after=0),  # the recorded daemon had two of them
        Call(ids=[1, 2, 3], puts=False),
        Call(ids=[1, 2, 3, 4, 5], gets=False, start=3),
        Call(ids=[1, 2, 3, 4, 5, 6], puts=False),
    ]
    assert list(replay_calls(calls, tier)) == [0, 0, 3, 0, 5]
    assert len(tier) == 5


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


HEADER = '{"block_tokens": 512, "partial": true}\n'


@pytest.mark.parametrize("first", ['{"hash_ids": [0]}\n', HEADER + "0,0,5,1,0,0\n"])
def test_blank_lines_and_a_byte_order_mark_are_passed_over(first):
    file = ("\ufeff\n \n" + first + "\n\r\n").encode().splitlines(keepends=True)
    assert list(parse(text_lines(file))) == [[0]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["x\n"], "line 1 is neither"),
        ([], "it is empty"),
        (["\n", " \n"], "it is empty"),
        (["\n", "x\n"], "line 2 is neither"),
        (['{"timestamp": 1}\n'], "line 1 is neither"),
        (['{"block_tokens": 0, "partial": true}\n'], "line 1 is neither .*block_tokens"),
        (['{"hash_ids": [1]}\n', "{\n"], "line 2 is no request"),
        (['{"hash_ids": [1]}\n', '{"hash_ids": 7}\n'], "line 2 is no request"),
        (['{"hash_ids": [1, 2, 1]}\n'], "line 1: an id stands twice"),
        (['{"hash_ids": [1], "timestamp": 1e300}\n'], "line 1 is no request"),
        (['{"hash_ids": [1], "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n"], "line 1 is no request"),
        ([HEADER, "\n", f"0,{10**400},5,1,0,0\n"], "line 3: t_ms"),
        ([HEADER, f"0,0,{10**18},1,0,0\n"], "line 2: a request of"),
        (['{"block_tokens": 512, "partial": true}\n', "1,2,3\n"], "line 2: '1,2,3' is not six"),
        (['{"block_tokens": 512, "partial": true}\n', "0,0,-5,1,0,0\n"], "line 2: "),
    ],
)
def test_what_is_no_trace_is_an_error_that_names_the_line(lines, message):
    with pytest.raises(ValueError, match=message):
        list(parse(lines))
