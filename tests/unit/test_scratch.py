"""Memory that is lent to one call at a time."""

from kvstored.device.buffer import ALIGN_BYTES
from kvstored.tiers.scratch import _KEPT_BYTES_MAX, Scratch


def test_two_calls_at_once_have_memory_of_their_own_and_later_ones_the_same():
    scratch = Scratch()
    with scratch.borrow(5000) as first, scratch.borrow(5000) as second:
        assert first != second
        assert not first % ALIGN_BYTES
    with scratch.borrow(1) as third:
        assert third in (first, second)


def test_a_larger_one_replaces_a_smaller_one_and_the_largest_are_not_kept():
    scratch = Scratch()
    with scratch.borrow(5000):
        pass
    with scratch.borrow(3 << 20):
        assert not scratch._idle, "the smaller one is given back"
    with scratch.borrow(_KEPT_BYTES_MAX + 1):
        pass
    assert sum(buffer.size_bytes for buffer in scratch._idle) <= _KEPT_BYTES_MAX


def test_an_error_gives_it_back():
    scratch = Scratch()
    try:
        with scratch.borrow(5000):
            raise ValueError
    except ValueError:
        assert len(scratch._idle) == 1
