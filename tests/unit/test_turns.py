"""When a conversation goes on: what is learnt from its turns, what is foretold, and what is forgotten."""

import random

import pytest

from kvstored.policy.admission import make_admission
from kvstored.policy.calls import Call
from kvstored.policy.eviction import Lru
from kvstored.policy.simulator import replay
from kvstored.policy.turns import Foretold, Turns
from kvstored.policy.two_tiers import TwoTiers
from kvstored.policy.watermarks import Watermarks


def talk(turns, name, times, place="p", per_turn=2):
    """A conversation that grows by so many blocks a turn; returns its ids."""
    ids = []
    for at in times:
        fresh = [f"{name}{len(ids) + i}" for i in range(per_turn)]
        if ids:
            turns.got(place, [*ids, *fresh], len(ids), at)
        turns.put(place, ids[-1] if ids else "", fresh, at + 0.5)
        ids += fresh
    return ids


def told(turns, now_s):
    return [list(each.ids) for each in turns.due(now_s)]


def test_the_next_turn_of_a_regular_conversation_is_foretold_once():
    turns = Turns()
    ids = talk(turns, "a", (0, 100, 200, 300))
    assert turns.next_s == pytest.approx(390, abs=2), "a tenth of the interval before"
    assert told(turns, 380) == []
    assert told(turns, 392) == [ids]
    assert told(turns, 400) == []
    assert turns.next_s is None


def test_two_intervals_are_needed_and_they_must_be_alike():
    turns = Turns()
    talk(turns, "short", (0, 100))
    talk(turns, "wild", (0, 10, 200, 210, 700))
    assert turns.next_s is None
    ids = talk(turns, "fair", (1000, 1100, 1190))
    assert told(turns, 1290) == [ids]


def test_an_interval_that_changes_is_followed():
    turns = Turns()
    talk(turns, "a", (0, 100, 200, 300, 380, 450, 520, 590, 660))
    assert turns.next_s == pytest.approx(660 + 0.9 * 70, abs=8)


@pytest.mark.parametrize("interval", [0.3, 4000.0])
def test_what_comes_back_at_once_or_hardly_ever_is_not_foretold(interval):
    turns = Turns()
    talk(turns, "a", [n * interval for n in range(5)])
    assert turns.next_s is None


def test_a_chain_that_is_only_read_has_no_turns():
    turns = Turns()
    for at in range(0, 1000, 100):
        turns.got("p", ["a", "b"], 2, at)
    assert turns.next_s is None
    assert len(turns) == 1


def test_gets_by_several_ranks_are_one_turn():
    turns, again = Turns(), Turns()
    for one, times in ((turns, 1), (again, 3)):
        ids = ["a0"]
        one.put("p", "", ids, 0.0)
        for at in (100, 200, 300):
            for _ in range(times):
                one.got("p", ids, len(ids), at)
            one.put("p", ids[-1], [f"a{at}"], at)
            ids = [*ids, f"a{at}"]
    assert turns.next_s == again.next_s is not None


def test_what_is_over_is_not_foretold_any_more():
    turns = Turns()
    talk(turns, "a", (0, 100, 200, 300))
    assert told(turns, 1000) == []
    assert turns.next_s is None


def test_a_conversation_that_went_on_early_is_not_foretold_for_the_turn_that_came():
    turns = Turns()
    ids = talk(turns, "a", (0, 100, 200, 300))
    turns.got("p", ids, len(ids), 350)
    assert told(turns, 391) == [], "it is not known yet that it becomes longer"
    turns.put("p", ids[-1], ["new"], 351)
    assert told(turns, 425) == [[*ids, "new"]]


def test_of_a_chain_that_lost_its_end_what_is_there_counts_and_it_may_grow_again():
    turns = Turns()
    ids = talk(turns, "a", (0, 100, 200, 300))
    turns.got("p", ids, 4, 400)
    turns.put("p", ids[3], ["x", "y"], 401)
    assert told(turns, 495) == [[*ids[:4], "x", "y"]]
    assert turns.blocks == 6


def test_what_is_said_to_be_over_is_forgotten():
    turns = Turns()
    ids = talk(turns, "a", (0, 100, 200, 300))
    talk(turns, "b", (0, 100, 200, 300))
    turns.ended("p", ["unknown"])
    turns.ended("q", ids)
    assert len(turns) == 2
    turns.ended("p", ids[-3:])
    assert [each[0] for each in told(turns, 395)] == ["b0"]
    assert turns.blocks == 8


def test_places_do_not_mix():
    turns = Turns()
    turns.put("p", "", ["a"], 0.0)
    turns.put("q", "a", ["b"], 1.0)
    turns.got("q", ["a", "b"], 1, 2.0)
    assert (len(turns), turns.blocks) == (2, 2)
    assert turns.next_s is None


def test_memory_is_bounded_in_chains_and_blocks_and_the_oldest_goes_first():
    turns = Turns(chains_max=8, blocks_max=60)
    rng = random.Random(1)
    for step in range(3000):
        name, length = f"c{rng.randrange(40)}-", rng.randrange(1, 20)
        ids = [f"{name}{i}" for i in range(length)]
        if rng.random() < 0.5:
            turns.got("p", ids, rng.randrange(length + 1), step)
        else:
            turns.put("p", ids[-2] if length > 1 and rng.random() < 0.5 else "", ids[-3:], step)
        turns.due(step - rng.randrange(30))
        assert len(turns) <= 8
        assert turns.blocks == sum(len(chain.ids) for chain in turns._tails.values()) <= 60
        assert len(turns._agenda) <= 16
    last = talk(turns, "last", (4000, 4100, 4200))
    for number in range(7):
        turns.put("p", "", [f"other {number}"], 4201)
    assert told(turns, 4290) == [last]
    for number in range(8):
        turns.put("p", "", [f"other {number}"], 4301)
    assert last[-1] not in {tail for _, tail in turns._tails}


def test_a_chain_longer_than_the_memory_is_left_alone():
    turns = Turns(blocks_max=10)
    turns.got("p", list(range(11)), 11, 0.0)
    turns.put("p", "", list(range(11)), 0.0)
    assert len(turns) == 0
    turns.put("p", "", list(range(8)), 0.0)
    turns.put("p", 7, list(range(8, 12)), 0.0)
    assert turns.blocks == 8


# ---- in the simulator ----


def conversations(regular):
    """Three that take turns; each turn asks for all before it, and something large comes between."""
    calls, chains = [], [[] for _ in range(3)]
    for turn in range(8):
        for number, chain in enumerate(chains):
            at_s = 100 * turn + 10 * number + (0 if regular else 90 * (turn % 3))
            chain += [1000 * number + len(chain) + i for i in range(4)]
            calls.append(Call(ids=list(chain), t_ms=at_s * 1000))
        noise = range(10_000 + 60 * turn, 10_060 + 60 * turn)
        calls.append(Call(ids=list(noise), t_ms=(100 * turn + 40 + 5) * 1000))
    return sorted(calls, key=lambda call: call.t_ms)


def simulated(calls, turns):
    tiers = TwoTiers(Lru(), 100, make_admission(), Watermarks(0.9, 0.3, 0.05), turns=turns)
    return tiers, list(replay(calls, tiers))


def test_a_simulated_tier_brings_regular_turns_up_ahead_and_hits_the_same():
    calls = conversations(regular=True)
    (plain, hits), (ahead, same) = simulated(calls, None), simulated(calls, Turns())
    assert same == hits
    assert ahead.ahead_blocks > 0
    assert ahead.ahead_used_blocks >= 0.8 * ahead.ahead_blocks
    waited = ahead.read_blocks - ahead.ahead_blocks
    assert waited < plain.read_blocks, "less is read while somebody waits"
    assert plain.ahead_blocks == 0


def test_nothing_is_evicted_for_what_is_only_expected():
    tiers = TwoTiers(Lru(), 10, make_admission(), Watermarks(0.9, 0.5, 0.1), turns=Turns())
    tiers.below.append(list(range(20)))
    tiers._bring([])
    tiers.put([100, 101, 102], 0)
    tiers._turns.due = lambda now_s: [Foretold("", list(range(20)), 99.0)]
    tiers.at(1.0)
    assert [block in tiers for block in (0, 4, 5, 100, 101, 102)] == [True, True, False, True, True, True]
    assert tiers.ahead_blocks == 5, "up to one step below the high mark"
