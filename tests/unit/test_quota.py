import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.policy.quota import Allotments, Quota, check_guarantees
from kvstored.policy.rate import BURST_S, TokenBucket


@pytest.mark.parametrize(("used", "wanted", "room"), [(0, 60, 60), (60, 60, 40), (100, 1, 0), (130, 1, 0), (100, 0, 0)])
def test_a_tenant_gets_what_its_limit_leaves(used, wanted, room):
    assert Quota(limit_bytes=100).room(used, wanted) == room


def test_without_a_limit_there_is_room_for_all():
    assert Quota().room(1 << 50, 7) == 7
    assert Quota().excess(1 << 50) == 0


def test_a_limit_of_nothing_leaves_no_room():
    assert Quota(limit_bytes=0).room(0, 1) == 0


def test_excess_is_what_lies_over_the_limit():
    assert Quota(limit_bytes=100).excess(130) == 30
    assert Quota(limit_bytes=100).excess(99) == 0


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="limit_bytes is -1"):
        Quota(limit_bytes=-1)


def test_a_guarantee_over_the_limit_is_refused():
    with pytest.raises(ValueError, match="must not exceed limit_bytes"):
        Quota(limit_bytes=10, guaranteed_bytes=11)


# ---- shares ----

CAPACITY = 1000
quotas = st.builds(
    lambda guaranteed, more, weight: Quota(None if more is None else guaranteed + more, guaranteed, weight),
    st.integers(0, 300),
    st.none() | st.integers(0, 500),
    st.floats(0, 10),
)
worlds = st.dictionaries(st.sampled_from("abc"), quotas, min_size=1)
usages = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 500), min_size=1)


def test_a_share_is_the_guarantee_and_a_part_of_the_rest_by_weight():
    allotments = Allotments(CAPACITY, {"a": Quota(guaranteed_bytes=100), "b": Quota(weight=2.0), "c": Quota(150)})
    assert [allotments.share_bytes(name) for name in "abcd"] == [100 + 225, 450, 150, 0]


@given(worlds)
def test_shares_are_no_more_than_there_is_and_no_less_than_guaranteed(world):
    allotments = Allotments(CAPACITY, world)
    if sum(quota.guaranteed_bytes for quota in world.values()) <= CAPACITY:
        assert sum(map(allotments.share_bytes, world)) <= CAPACITY
    for name, quota in world.items():
        assert quota.guaranteed_bytes <= allotments.share_bytes(name)
        assert quota.limit_bytes is None or allotments.share_bytes(name) <= quota.limit_bytes


@given(worlds, usages, st.sampled_from("abcd"), st.integers(1, 200))
def test_nobody_has_to_go_below_its_guarantee_and_those_most_above_their_share_go_first(world, used, asker, wanted):
    allotments = Allotments(CAPACITY, world)
    losers = allotments.losers(asker, used, wanted)
    above = [used[one.tenant] - allotments.share_bytes(one.tenant) for one in losers]
    assert above == sorted(above, reverse=True)
    for one in losers:
        assert one.tenant != asker
        assert one.bytes > 0
        assert used[one.tenant] - one.bytes >= allotments.of(one.tenant).guaranteed_bytes


@given(worlds, usages, st.sampled_from("abc"))
def test_whoever_is_within_its_guarantee_finds_somebody_above_theirs(world, used, asker):
    allotments = Allotments(CAPACITY, world)
    total = sum(quota.guaranteed_bytes for quota in world.values())
    short = CAPACITY - sum(used.values())
    if allotments.entitled(asker, used.get(asker, 0), 1) and total <= CAPACITY and short <= 0:
        others = sum(one.bytes for one in allotments.losers(asker, used, 1))
        assert others >= allotments.of(asker).guaranteed_bytes - used.get(asker, 0)


def test_who_is_above_its_share_finds_nobody_else():
    allotments = Allotments(CAPACITY, {"a": Quota(), "b": Quota()})
    assert allotments.losers("a", {"a": 500, "b": 500}, 1) == []
    assert allotments.losers("b", {"a": 600, "b": 400}, 100) == [("a", 100)]
    assert allotments.losers("b", {"a": 600, "b": 400}, 101) == []


def test_what_all_hold_beyond_their_guarantees_stays_within_what_is_guaranteed_to_nobody():
    allotments = Allotments(CAPACITY, {"a": Quota(guaranteed_bytes=300), "b": Quota(guaranteed_bytes=200)})
    assert allotments.held_max_bytes("a", {}, 100) == 300 + 400
    assert allotments.held_max_bytes("b", {"a": 650}, 100) == 200 + 50
    assert allotments.held_max_bytes("c", {"a": 650, "b": 300}, 100) == 0


def test_a_changed_quota_holds_at_once():
    allotments = Allotments(CAPACITY, {"a": Quota(guaranteed_bytes=300)})
    assert allotments.guarded
    allotments.change({"a": Quota(10)})
    assert not allotments.guarded
    assert allotments.room("a", 5, 100) == 5


def test_guarantees_that_do_not_fit_beside_the_reserve_are_refused():
    check_guarantees("dram", {"a": 400, "b": 300, "c": 0}, CAPACITY, 100)
    with pytest.raises(ValueError, match=r"a reserve of 300 .* over the 1000 of dram"):
        check_guarantees("dram", {"a": 400, "b": 301, "c": 0}, CAPACITY, 100)
    check_guarantees("dram", {"a": 0}, 0, 100)


# ---- rates ----


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5000)), max_size=60))
def test_over_any_time_no_more_than_the_rate_a_burst_and_one_call_pass(calls):
    bucket, now, passed = TokenBucket(1000.0), 100.0, []
    for pause_s, size in calls:
        now += pause_s
        if not bucket.wait_s(now):
            bucket.take(size, now)
            passed.append((now, size))
    for first, (start_s, _) in enumerate(passed):
        for last in range(first, len(passed)):
            end_s = passed[last][0]
            # The last call may leave a debt: all before it fit into burst and time.
            before = sum(size for _, size in passed[first:last])
            assert before <= 1000 * (end_s - start_s + BURST_S) + 1e-3


@given(st.integers(1, 10**9), st.floats(1, 1e9))
def test_whoever_waits_as_long_as_told_may_go_on(size, rate):
    bucket = TokenBucket(rate)
    bucket.take(size, 0.0)
    wait_s = bucket.wait_s(0.0)
    assert bucket.wait_s(wait_s * (1 + 1e-9) + 1e-9) <= 1e-6 * max(1.0, wait_s)


def test_a_clock_that_goes_back_fills_nothing():
    bucket = TokenBucket(10.0)
    bucket.take(10, 100.0)
    assert bucket.wait_s(50.0) > 0
    assert bucket.wait_s(50.5) == 0


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="lets nothing through"):
        TokenBucket(0)
