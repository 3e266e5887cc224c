"""A number that is shared: one has half of it at most, and whoever comes later finds some."""

import pytest

from kvstored.rpc.fair_share import FairShare


def taken_by(share, who, wanted=1000, **how):
    return sum(share.take(who, **how) for _ in range(wanted))


def test_each_gets_half_of_what_is_left():
    share = FairShare(64)
    assert [taken_by(share, who) for who in ("a", "b", "c", "a", "d")] == [32, 16, 8, 0, 4]
    for _ in range(32):
        share.leave("a")
    assert taken_by(share, "e") == 18


def test_who_is_alone_has_all_and_no_more():
    share = FairShare(64)
    assert taken_by(share, "a", alone=True) == 64
    assert not share.take("b", alone=True)
    share.leave("a")
    assert share.take("b")


def test_several_are_taken_at_once_or_none():
    share = FairShare(64)
    assert [share.take("a", count) for count in (65, 20, 20, 12)] == [False, True, False, True]
    assert [share.take("b", count) for count in (33, 10, 7, 6)] == [False, True, False, True]
    share.leave("a", 32)
    assert taken_by(share, "c") == 24


def test_one_is_there_for_everybody_while_any_is_left():
    share = FairShare(3)
    assert [share.take(who) for who in "aabcd"] == [True, False, True, True, False]


def test_what_was_not_taken_is_not_given_back():
    with pytest.raises(AssertionError):
        FairShare(1).leave("a")
