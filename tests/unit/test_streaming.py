"""The client's half of a streamed put: places that are used again, what was filled on a guess, and how it ends."""

import os
import threading
from types import SimpleNamespace

import pytest
from kvstored_client import streaming
from kvstored_client.buffers import spans_of
from kvstored_client.staging import ALIGN_BYTES, StagingRing
from kvstored_client.streaming import Stream
from kvstored_proto import progress
from kvstored_proto.progress import Taker

from kvstored.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.skipif(not progress.AVAILABLE, reason="no futex is known here")
RING_BYTES = 64 << 20
MIB = 1 << 20


@pytest.fixture
def ring():
    fd = os.memfd_create("ring")
    os.ftruncate(fd, RING_BYTES)
    ring = StagingRing(fd, RING_BYTES)
    yield ring
    assert ring.free_bytes == RING_BYTES, "all places are given back"
    ring.close()


@pytest.fixture
def connection(ring):
    return SimpleNamespace(
        staging=ring,
        opened=SimpleNamespace(features=[progress.FEATURE]),
        alive=lambda: True,
        error=None,
        staging_wipes=0,
    )


def blocks_of(count, size):
    return [bytes([i % 251]) * (size - i % 3) for i in range(count)]


def done(verb):
    """Run a verb that only works; its result."""
    answer = None
    try:
        while True:
            answer = verb.send(answer).action()
    except StopIteration as end:
        return end.value


class Daemon(threading.Thread):
    """Takes blocks as they are filled."""

    def __init__(self, ring, stream, count, size, most=None):
        super().__init__(daemon=True)
        self.ring, self.stream, self.count, self.size = ring, stream, count, size
        self.most = count if most is None else most
        self.found = []
        self.start()

    def run(self):
        taker, mapping = Taker(self.ring.mapping.address + self.stream.progress_offset), self.ring.mapping
        offsets = self.stream.offsets
        while len(self.found) < self.most:
            filled = taker.filled()
            if filled == progress.ENDED:
                return
            if filled <= len(self.found):
                taker.wait(filled, 0.01)
                continue
            self.found.append(bytes(mapping.view(offsets[len(self.found)], self.size)))
            taker.take(len(self.found))


@pytest.mark.parametrize(("count", "size"), [(40, 512 << 10), (3000, 16 << 10), (9, 2 * MIB), (11, 600_000), (5, MIB)])
def test_every_block_is_seen_whole_by_a_daemon_that_takes_them_in_order(ring, connection, count, size):
    blocks = blocks_of(count, size)
    stream = Stream.of(connection, spans_of(blocks, count, writable=False))
    done(stream.fill_ahead())
    stream.begin(list(range(count)), 0)
    daemon = Daemon(ring, stream, count, size - 2)
    assert done(stream.fill(PATIENCE_S))
    daemon.join(PATIENCE_S)
    assert daemon.found == [block[: size - 2] for block in blocks]
    assert max(stream.offsets) + size <= RING_BYTES
    stream.leave()


def test_what_was_filled_on_a_wrong_guess_is_filled_anew(ring, connection):
    blocks = blocks_of(40, 512 << 10)
    stream = Stream.of(connection, spans_of(blocks, 40, writable=False))
    done(stream.fill_ahead())
    assert stream.filled > 1
    wanted = list(range(1, 40))  # the first is stored already
    stream.begin(wanted, 0)
    assert (stream.filled, stream._filler.taken()) == (0, 0)
    daemon = Daemon(ring, stream, 39, 1)
    assert done(stream.fill(PATIENCE_S))
    daemon.join(PATIENCE_S)
    assert daemon.found == [blocks[i][:1] for i in wanted]
    stream.leave()


def test_a_right_guess_counts(ring, connection):
    stream = Stream.of(connection, spans_of(blocks_of(40, 512 << 10), 40, writable=False))
    done(stream.fill_ahead())
    ahead = stream.filled
    stream.begin(list(range(40)), 0)
    assert stream.filled == ahead
    stream.leave()


def test_what_was_filled_before_the_ring_was_wiped_is_filled_anew(ring, connection):
    stream = Stream.of(connection, spans_of(blocks_of(40, 512 << 10), 40, writable=False))
    done(stream.fill_ahead())
    stream.begin(list(range(40)), 1)
    assert stream.filled == 0
    assert Taker(ring.mapping.address + stream.progress_offset).filled() == 0
    stream.leave()


def test_the_last_blocks_are_told_of_though_all_were_filled_on_the_guess(ring, connection):
    stream = Stream.of(connection, spans_of(blocks_of(40, 512 << 10), 40, writable=False))
    done(stream.fill_ahead())
    exactly = stream.filled
    taker = Taker(ring.mapping.address + stream.progress_offset)
    assert taker.filled() < exactly
    stream.begin(list(range(exactly)), 0)
    assert done(stream.fill(PATIENCE_S))
    assert taker.filled() == exactly
    stream.leave()


@pytest.mark.parametrize("kib", [20, 24, 52, 84, 96, 512])
def test_the_places_of_a_group_follow_one_another(ring, connection, kib):
    blocks = blocks_of(300, kib << 10)
    seen = []

    def read(indices, targets):
        seen.append(list(targets))

    stream = Stream.of(connection, SimpleNamespace(sizes_bytes=[len(block) for block in blocks], read=read))
    done(stream.fill_ahead())
    stream.begin(range(300), 0)
    Daemon(ring, stream, 300, 1)
    assert done(stream.fill(PATIENCE_S))
    assert all(targets == sorted(targets) for targets in seen)
    stream.leave()


def test_who_has_its_answer_already_does_not_wait_for_places(ring, connection):
    stream = Stream.of(connection, spans_of(blocks_of(60, 512 << 10), 60, writable=False))
    stream.begin(list(range(60)), 0)
    stream.sent()()  # refused, or given up by the daemon
    assert not done(stream.fill(1e9))
    stream.leave()


def test_a_forked_child_leaves_the_ring_alone(ring, connection, monkeypatch):
    stream = Stream.of(connection, spans_of(blocks_of(60, 512 << 10), 60, writable=False))
    settled = stream.sent()
    connection.error = RuntimeError("this process was forked")
    monkeypatch.setattr(stream._filler, "end", lambda: 1 / 0)
    stream.leave()
    settled()


def test_a_daemon_that_takes_nothing_any_more_is_waited_for_so_long(ring, connection):
    stream = Stream.of(connection, spans_of(blocks_of(60, 512 << 10), 60, writable=False))
    stream.begin(list(range(60)), 0)
    daemon = Daemon(ring, stream, 60, 1, most=3)
    assert not done(stream.fill(0.05))
    daemon.join(PATIENCE_S)
    assert stream.filled < 60
    stream.leave()


def test_nobody_waits_for_a_daemon_that_is_gone(ring, connection):
    stream = Stream.of(connection, spans_of(blocks_of(60, 512 << 10), 60, writable=False))
    stream.begin(list(range(60)), 0)
    connection.alive = lambda: False
    assert not done(stream.fill(1e9))
    stream.leave()


@pytest.mark.parametrize("order", ["answered first", "left first"])
def test_places_go_back_when_the_daemon_has_answered_and_the_client_has_left(ring, connection, order):
    stream = Stream.of(connection, spans_of(blocks_of(60, 512 << 10), 60, writable=False))
    settled = stream.sent()
    first, second = (settled, stream.leave) if order == "answered first" else (stream.leave, settled)
    first()
    assert ring.free_bytes < RING_BYTES
    second()
    second()
    assert ring.free_bytes == RING_BYTES


def test_who_leaves_before_the_answer_ends_the_stream(ring, connection):
    stream = Stream.of(connection, spans_of(blocks_of(60, 512 << 10), 60, writable=False))
    settled = stream.sent()
    stream.leave()
    assert Taker(ring.mapping.address + stream.progress_offset).filled() == progress.ENDED
    settled()


@pytest.mark.parametrize(
    ("count", "size"),
    [(1, MIB), (8, streaming.STREAM_FROM_BYTES // 8), (4, RING_BYTES // 16 + 1)],
    ids=["few", "little", "too large"],
)
def test_what_is_little_or_too_large_is_not_streamed(ring, connection, count, size):
    blocks = [bytearray(size)] * count
    assert Stream.of(connection, spans_of(blocks, count, writable=False)) is None


def test_a_daemon_that_does_not_know_it_is_not_asked(ring, connection):
    connection.opened.features.clear()
    assert Stream.of(connection, spans_of([bytearray(MIB)] * 9, 9, writable=False)) is None


def test_without_room_in_the_ring_it_is_not_streamed(ring, connection):
    region = ring.take(RING_BYTES - ALIGN_BYTES)
    assert Stream.of(connection, spans_of([bytearray(MIB)] * 9, 9, writable=False)) is None
    ring.give_back(region)


def test_a_ring_that_cannot_be_mapped_keeps_its_room(ring, connection, monkeypatch):
    monkeypatch.setattr(streaming.progress, "Filler", lambda address: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Stream.of(connection, spans_of([bytearray(MIB)] * 9, 9, writable=False))
