"""Hit rates on recorded traces: the figures of an independent simulator, and what the default order wins over LRU."""

import pytest

from bench.traces import find_trace, read_trace
from kvstored.policy.ideal import ideal_hits
from kvstored.policy.orders import make_order
from kvstored.policy.simulator import simulate

# Trace, capacity in blocks, hit rate of LRU, of an ideal tier where it was given.
CELLS = [
    ("mooncake_conversation.csv.gz", 3_000, 0.065, 0.295),
    ("mooncake_conversation.csv.gz", 10_000, 0.212, 0.366),
    ("mooncake_conversation.csv.gz", 30_000, 0.326, 0.366),
    ("mooncake_conversation.csv.gz", 50_000, 0.355, 0.366),
    ("claude_code_2h_85sessions_512.csv.gz", 1_000, 0.269, None),
    ("claude_code_2h_85sessions_512.csv.gz", 2_000, 0.623, None),
    ("claude_code_2h_85sessions_512.csv.gz", 4_000, 0.867, None),
    ("claude_code_2h_85sessions_512.csv.gz", 8_000, 0.934, None),
]


@pytest.fixture(scope="module")
def trace():
    read = {}

    def of(name):
        if name not in read:
            try:
                read[name] = list(read_trace(find_trace(name)))
            except FileNotFoundError as error:
                pytest.skip(str(error))
        return read[name]

    return of


@pytest.fixture(scope="module")
def rates(trace):
    """(order, trace, capacity) -> hits / blocks asked for; simulated once."""
    known = {}

    def of(order, name, capacity):
        if (order, name, capacity) not in known:
            requests = trace(name)
            hits = ideal_hits(requests, capacity) if order == "opt" else simulate(requests, make_order(order), capacity)
            known[order, name, capacity] = sum(hits) / sum(map(len, requests))
        return known[order, name, capacity]

    return of


@pytest.mark.parametrize(("name", "capacity", "lru", "opt"), CELLS)
def test_lru_and_the_ideal_are_those_of_an_independent_simulator(rates, name, capacity, lru, opt):
    assert rates("lru", name, capacity) == pytest.approx(lru, abs=0.002)
    if opt is not None:
        assert rates("opt", name, capacity) == pytest.approx(opt, abs=0.002)


def test_shelf_life_is_never_much_below_lru_and_well_above_it_in_three_cells(rates):
    gains = [rates("shelf_life", name, size) - rates("lru", name, size) for name, size, *_ in CELLS]
    assert min(gains) >= -0.003
    assert sum(gain >= 0.010 for gain in gains) >= 3
