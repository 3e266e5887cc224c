import pytest

from kvstored.policy.quota import Quota


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
