"""The session page: what one side posts the other takes, once and in order, whatever the memory shows meanwhile."""

import gc
import mmap
import os
import stat
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstored_client.session_page import SessionPage as ClientPage
from kvstored_client.session_page import open_page
from kvstored_proto.page import PAGE_BYTES, RING_WORDS, Poster, Taker

from kvstored.tiers.session_page import SessionPage

WORD = st.integers(0, (1 << 64) - 1)


def both(length=RING_WORDS):
    memory = memoryview(bytearray(PAGE_BYTES))
    taker = Taker(memory, length)
    return memory.cast("Q"), Poster(memory), taker


# ---- the ring ----


def test_the_layout_is_the_documented_one():
    memory = memoryview(bytearray(PAGE_BYTES))
    taker, poster = Taker(memory), Poster(memory)
    poster.post([5, 1 << 62])
    assert struct.unpack_from("=IIQQQQ", memory) == (1, 253, 2, 0, 5 << 1 | 1, 1 << 63 | 1)
    assert taker.take() == [5, 1 << 62]
    assert struct.unpack_from("=QQ", memory, 8) == (2, 2)
    assert not any(memory[40:])


@given(st.integers(1, 5), st.lists(st.one_of(st.none(), st.integers(0, 6)), max_size=60))
def test_posts_and_takes_in_any_order_lose_nothing_and_keep_the_order(length, steps):
    _, poster, taker = both(length)
    posted, taken = [], []
    for count in steps:
        if count is None:
            taken += taker.take()
        else:
            fits = len(posted) - len(taken) + count <= length
            ids = [7] * count  # the same again and again: only the lap tells a new word from an old one
            assert poster.post(ids) is fits
            posted += ids if fits else []
    assert taken + taker.take() == posted


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(1, 6), st.randoms()), max_size=12))
def test_a_word_that_is_not_visible_yet_is_waited_for(length, rounds):
    """Another CPU's stores may become visible in any order."""
    words, poster, taker = both(length)
    expected, taken, number = [], [], 0
    for count, random in rounds:
        count = min(count, length)
        before = words.tolist()
        ids = list(range(number, number + count))
        number += count
        assert poster.post(ids)
        expected += ids
        changed = [(i, word) for i, word in enumerate(words.tolist()) if word != before[i]]
        words[:] = memoryview(struct.pack("512Q", *before)).cast("Q")
        random.shuffle(changed)
        for at, word in changed:
            words[at] = word
            found = taker.take()
            assert found is not None
            taken += found
            assert taken == expected[: len(taken)]
        assert taken == expected


def test_a_full_ring_takes_all_of_a_post_or_nothing():
    _, poster, taker = both()
    assert poster.post(range(RING_WORDS - 1))
    assert not poster.post([1, 2])
    assert poster.post([3])
    assert not poster.post([4])
    assert len(taker.take(100)) == 100
    assert poster.post(range(100))
    assert not poster.post([5])
    assert taker.take() == [*range(100, RING_WORDS - 1), 3, *range(100)]


@given(st.lists(st.tuples(st.integers(0, RING_WORDS + 2), WORD), max_size=40), st.integers(1, 60))
def test_whatever_a_client_writes_is_taken_a_ring_at_a_time_or_passed_over(writes, most):
    words, _, taker = both()
    for at, value in writes:
        words[at] = value
        found = taker.take(most)
        assert found is None or len(found) <= min(most, RING_WORDS)
    words[1] = 1 << 63
    taker.take()
    assert taker.take() == []


@pytest.mark.parametrize("head", [RING_WORDS + 4, 2, (1 << 64) - 1])
def test_a_head_out_of_reach_is_told_once_and_the_ring_goes_on_from_there(head):
    words, poster, taker = both()
    poster.post([1, 2, 3])
    taker.take()
    words[1] = head
    assert taker.take() is None
    assert taker.take() == []
    words[1] = head = 10 * RING_WORDS
    taker.take()
    assert poster.post([8, 9])
    assert taker.take() == [8, 9]


def test_the_daemon_believes_no_tail_but_its_own():
    words, poster, taker = both()
    poster.post([1, 2, 3])
    assert taker.take() == [1, 2, 3]
    words[2] = 0
    assert taker.take() == []


@pytest.mark.parametrize("tail", [1, 1 << 63])
def test_a_tail_that_makes_no_sense_sends_the_client_back_to_frames(tail):
    words, poster, _ = both()
    words[2] = tail
    assert not poster.post([1])


# ---- the daemon's memory ----


def test_a_page_is_the_owners_alone_and_keeps_its_size():
    made = SessionPage()
    fd = made.read_write_fd()
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    assert made.size_bytes == os.fstat(fd).st_size == PAGE_BYTES
    assert bytes(made.memory) == bytes(PAGE_BYTES)
    for size in (0, 2 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    made.close()


def test_a_client_that_keeps_its_mapping_keeps_no_memory_of_the_page():
    made = SessionPage()
    fd = os.dup(made.read_write_fd())
    with mmap.mmap(fd, PAGE_BYTES) as theirs:
        theirs[:4] = b"data"
        assert bytes(made.memory[:4]) == b"data"
        made.close()
        made.close()
        assert os.fstat(fd).st_blocks == 0
        assert theirs[:4] == bytes(4)
    os.close(fd)


# ---- the client's side ----


@pytest.fixture
def shared():
    made = SessionPage()
    taker = Taker(made.memory)
    yield made, taker
    taker.close()
    made.close()


def test_threads_that_post_at_once_lose_nothing(shared):
    made, taker = shared
    client = open_page(os.dup(made.read_write_fd()), PAGE_BYTES)
    by_frame, taken = [], []

    def post(first):
        by_frame.extend([lease_id for lease_id in range(first, first + 500) if not client.post([lease_id])])

    threads = [threading.Thread(target=post, args=(n * 500,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += taker.take()
    taken += taker.take()
    assert sorted(taken + by_frame) == list(range(2000))
    assert taken


def test_a_finalizer_in_the_middle_of_a_post_goes_by_frame(shared):
    made, taker = shared
    client = open_page(os.dup(made.read_write_fd()), PAGE_BYTES)
    results = []

    class Ids(list):
        def __len__(self):  # asked for while the page is being written
            if not results:
                results.append(client.post([2]))
            return super().__len__()

    assert client.post(Ids([1]))
    assert results == [False]
    assert taker.take() == [1]


@pytest.mark.parametrize("header", [(2, RING_WORDS), (1, 0), (1, RING_WORDS + 1)])
def test_a_page_laid_out_in_another_way_is_left_alone(header):
    made = SessionPage()
    struct.pack_into("=II", made.memory, 0, *header)
    fd = os.dup(made.read_write_fd())
    assert open_page(fd, PAGE_BYTES) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    made.close()


def test_a_page_that_is_too_small_is_left_alone():
    for size, told in [(0, PAGE_BYTES), (100, 100)]:
        fd = os.memfd_create("small")
        os.ftruncate(fd, size)
        assert open_page(fd, told) is None


def test_a_page_that_the_client_lets_go_of_is_unmapped(shared):
    made, _ = shared
    gc.collect()
    client = open_page(os.dup(made.read_write_fd()), PAGE_BYTES)
    assert isinstance(client, ClientPage)
    mapped = mappings()
    del client
    gc.collect()
    assert mappings() == mapped - 1


def mappings():
    with open("/proc/self/maps") as maps:
        return sum("memfd:kvstored-session-page" in line for line in maps)
