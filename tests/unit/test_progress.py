"""How far a streamed commit is: each side sees the other's count, and who waits is woken."""

import ctypes
import threading

import pytest
from kvstored_proto import progress
from kvstored_proto.progress import ENDED, Filler, Taker

from kvstored.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(not progress.AVAILABLE, reason="no futex is known here")


@pytest.fixture
def halves():
    memory = ctypes.create_string_buffer(progress.PROGRESS_BYTES + progress.ALIGN_BYTES)
    address = -(-ctypes.addressof(memory) // progress.ALIGN_BYTES) * progress.ALIGN_BYTES
    ctypes.memset(address, 0xFF, progress.PROGRESS_BYTES)  # what an earlier user of the ring left
    filler, taker = Filler(address), Taker(address)
    filler.memory = memory
    return filler, taker


def test_each_side_sees_the_count_of_the_other(halves):
    filler, taker = halves
    assert (filler.taken(), taker.filled()) == (0, 0)
    filler.fill(3)
    taker.take(2)
    assert (filler.taken(), taker.filled()) == (2, 3)
    filler.end()
    assert taker.filled() == ENDED


@pytest.mark.parametrize("who", ["taker", "filler"])
def test_who_waits_is_woken_by_the_next_count(halves, who):
    filler, taker = halves
    waits, tells = (taker, filler.fill) if who == "taker" else (filler, taker.take)
    waiting = threading.Thread(target=waits.wait, args=(0, PATIENCE_S))
    waiting.start()
    while not waits._words[waits._sleeping]:
        pass
    tells(1)
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert not waits._words[waits._sleeping]


def test_nobody_waits_for_what_has_come_already(halves):
    filler, taker = halves
    filler.fill(1)
    taker.wait(0, PATIENCE_S)  # would not come back
    taker.take(1)
    filler.wait(0, PATIENCE_S)


def test_a_wait_ends_by_itself(halves):
    filler, taker = halves
    taker.wait(0, 0.001)
    filler.wait(0, 0.001)
