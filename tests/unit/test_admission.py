"""Admission rules, the memory that they go by, and what a short budget sheds."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.policy.admission import ADMISSIONS, ASKED_MAX, Asked, make_admission
from kvstored.policy.thrift import NOTHING, affords, least_asked


def test_the_rules_by_their_names():
    cases = [(0, False), (1, False), (2, False), (1, True)]
    admitted = {name: [make_admission(name).admits(*case) for case in cases] for name in ADMISSIONS}
    assert admitted == {
        "admit_all": [True, True, True, True],
        "second_hit": [False, False, True, False],
        "hinted": [False, False, False, True],
    }
    with pytest.raises(ValueError, match="must be one of admit_all, hinted, second_hit"):
        make_admission("all")


def test_what_was_asked_for_is_counted_and_forgotten_in_the_order_it_came():
    asked = Asked(4)
    asked.note(["a", "b", "a"])
    assert (asked.times("a"), asked.times("b"), asked.times("c")) == (2, 1, 0)
    asked.note(["c", "d"])  # a new generation
    assert (asked.times("a"), asked.times("b")) == (2, 1)
    asked.note(["a", "e"])  # which `a` came over to
    assert (asked.times("a"), asked.times("b")) == (0, 0) or asked.times("a") == 3
    with pytest.raises(ValueError, match="2 or more"):
        Asked(1)


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(2, 20))
def test_the_memory_is_bounded_keeps_what_is_recent_and_never_counts_too_much(keys, limit):
    asked, recent = Asked(limit), deque(maxlen=limit // 2)
    counts = dict.fromkeys(range(31), 0)
    for key in keys:
        asked.note([key])
        counts[key] = min(ASKED_MAX, counts[key] + 1)
        if key in recent:
            recent.remove(key)
        recent.append(key)
        assert len(asked) <= 2 * (limit // 2)
        assert asked.times(key) >= 1
        assert all(asked.times(kept) >= 1 for kept in recent)
        assert all(asked.times(k) <= counts[k] for k in counts)


@given(st.floats(-2, 2), st.floats(-2, 2))
def test_with_less_left_more_is_shed_never_less(one, other):
    low, high = sorted((one, other))
    assert least_asked(low) >= least_asked(high)


def test_by_value_the_least_is_shed_first_and_over_budget_everything():
    assert [least_asked(left) for left in (1.0, 0.5, 0.49, 0.2, 0.01, 0.0, -1.0)] == [0, 0, 2, 3, 4, NOTHING, NOTHING]
    assert affords(0, False, 0.5)
    assert not affords(1, False, 0.4)
    assert affords(2, False, 0.4)
    assert affords(0, True, 0.4)  # a hint is worth a use
    assert not affords(2, True, 0.2)
    assert affords(ASKED_MAX, False, 0.001)
    assert not affords(ASKED_MAX, True, 0.0)
