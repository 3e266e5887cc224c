"""What shelf lives are learned from."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.policy import returns
from kvstored.policy.returns import AGE_ENDS, EQUAL, LEVELS, Point, Returns, age_class, fill, hits_of_one_life, hull


@given(st.integers(0, AGE_ENDS[-1] - 1))
def test_an_age_is_in_its_class(age):
    found = age_class(age)
    assert age < AGE_ENDS[found]
    assert found == 0 or age >= AGE_ENDS[found - 1]


def test_classes_are_a_quarter_of_an_octave_wide_at_most_and_the_last_takes_all_that_is_older():
    widths = [(end - begin) / begin for begin, end in pairwise(AGE_ENDS)]
    assert max(widths[4:]) <= 0.25
    assert age_class(1 << 60) == len(AGE_ENDS) - 1


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 1)), min_size=1, max_size=30))
def test_steps_of_a_hull_are_worth_less_and_less_and_reach_its_end(pieces):
    curve = [Point(0.0, 0.0, 0)]
    for room, hits in pieces:
        curve.append(Point(curve[-1].room + room, curve[-1].hits + hits, curve[-1].age + 1))
    steps = hull(0, curve)
    assert all(a.worth >= b.worth for a, b in pairwise(steps))
    assert sum(step.room for step in steps) == pytest.approx(curve[-1].room)
    assert sum(step.hits for step in steps) == pytest.approx(curve[-1].hits)
    assert steps[-1].age == curve[-1].age


def counted(per_level, uses=10_000):
    """A tier that saw for each level so many blocks, of which so many came again at an age."""
    found = Returns()
    found.passed(uses)
    for level, (came, again, age) in per_level.items():
        found.came(level, came)
        found.came_again(level, age, again)
    return found


def test_where_one_level_returns_and_the_other_does_not_the_room_is_for_the_one():
    found = counted({0: (5000, 0, 0), 1: (5000, 4000, 1000)})
    lives = found.lives(400, 4000)  # all of level 1 until 1,000 uses is 500 blocks; all of both is 1,000
    assert lives[0] == 0
    assert 1000 <= lives[1] <= 1300
    assert list(lives) == sorted(lives)


def test_where_levels_do_not_differ_all_live_equally_long():
    found = counted(dict.fromkeys(range(LEVELS), (2500, 2000, 1000)))
    assert found.lives(2000, 4000) == EQUAL


def test_little_known_is_no_reason_to_tell_levels_apart():
    assert Returns().lives(100, 1000) == EQUAL
    assert counted({0: (10, 10, 5)}).lives(100, 0) == EQUAL


def test_a_gain_that_is_too_small_is_none(monkeypatch):
    found = counted({0: (5000, 1000, 800), 1: (5000, 3000, 800)})
    found.came_again(0, 50, 500)
    assert found.lives(400, 4000) != EQUAL
    monkeypatch.setattr(returns, "GAIN_MIN", 1000.0)
    assert found.lives(400, 4000) == EQUAL


def test_what_is_counted_fades():
    found = counted({0: (100, 50, 10)})
    found.fade(0.0)
    assert found.lives(10, 1000) == EQUAL
    assert hits_of_one_life([[]], 10) == 0.0


def test_a_step_is_taken_where_more_than_half_of_it_fits():
    steps = hull(2, [Point(0.0, 0.0, 0), Point(10.0, 1.0, 7)])
    assert fill(steps, 4.0) == ([0, 0, 0, 0], pytest.approx(0.4))
    assert fill(steps, 6.0) == ([0, 0, 7, 0], pytest.approx(0.6))
