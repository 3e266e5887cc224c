"""Batches that are copied while the reservation is under way: used where the guess was right, given back where not."""

import time

import pytest
from fake_daemon import SLOT_BYTES, SPEC
from kvstored_client import Client, putting, waiting, writing
from kvstored_proto.v1 import kvstored_pb2 as pb

HASHES = [bytes([i]) * 32 for i in range(1, 17)]
BLOCKS = [bytes([i]) * SLOT_BYTES for i in range(1, 17)]


@pytest.fixture
def client(daemon, monkeypatch):
    monkeypatch.setattr(putting, "AHEAD_FROM_BYTES", 1)
    with Client(daemon.address, timeout_s=60.0, staging_bytes=16 * SLOT_BYTES) as made:
        yield made


@pytest.fixture
def copied(monkeypatch):
    """The blocks of each copy into staging, in order."""
    copies, real = [], putting._copy_in

    def copy_in(ring, batch, source):
        copies.append(tuple(batch.indices))
        real(ring, batch, source)

    monkeypatch.setattr(putting, "_copy_in", copy_in)
    return copies


def stored(client, hashes):
    with client.get(client.namespace(SPEC), hashes) as held:
        return [bytes(block) for block in held]


def test_the_first_batches_are_copied_before_the_answer_is_there(client, daemon, copied):
    namespace = client.namespace(SPEC)
    before = []
    daemon.before_reply = {pb.OPERATION_COMMIT: lambda peer: before.append(len(copied))}
    assert client.put(namespace, HASHES, BLOCKS).stored == 16
    assert copied == [tuple(range(i, i + 4)) for i in range(0, 16, 4)], "each once"
    assert before[0] >= putting.AHEAD_BATCHES
    assert stored(client, HASHES) == BLOCKS
    assert client._core.connection.staging.free_bytes == 16 * SLOT_BYTES


@pytest.mark.parametrize(("blocks", "ahead"), [(7, 0), (8, 1), (16, 2)])
def test_no_more_is_copied_ahead_than_a_put_is_worth(client, daemon, copied, monkeypatch, blocks, ahead):
    monkeypatch.setattr(putting, "AHEAD_FROM_BYTES", 8 * SLOT_BYTES)
    before, real = [], writing.finish

    def finish(connection, ticket, reply_type, limit_s):
        if reply_type is pb.ReserveReply:  # what is done meanwhile is done
            before.append(len(copied))
        return real(connection, ticket, reply_type, limit_s)

    monkeypatch.setattr(writing, "finish", finish)
    assert client.put(client.namespace(SPEC), HASHES[:blocks], BLOCKS[:blocks]).stored == blocks
    assert before == [ahead]


@pytest.mark.parametrize("there", [slice(0, 1), slice(2, 3), slice(5, 7), slice(0, 16)])
def test_what_was_copied_for_nothing_takes_no_room(client, daemon, there):
    namespace = client.namespace(SPEC)
    client.put(namespace, HASHES[there], BLOCKS[there])
    result = client.put(namespace, HASHES, BLOCKS)
    assert result.stored + result.existing == 16
    assert stored(client, HASHES) == BLOCKS
    assert client._core.connection.staging.free_bytes == 16 * SLOT_BYTES


def test_a_refused_reservation_gives_its_room_back(client, daemon):
    daemon.refuse = {pb.OPERATION_RESERVE: (7, "not allowed")}
    assert client.put(client.namespace(SPEC), HASHES, BLOCKS).stored == 0
    assert client._core.connection.staging.free_bytes == 16 * SLOT_BYTES


def test_nothing_is_copied_on_a_guess_once_the_daemon_was_short_of_room(client, daemon, copied):
    daemon.throttle_reserves = 3
    assert client.put(client.namespace(SPEC), HASHES[:4], BLOCKS[:4], wait_s=60.0).stored == 4
    assert copied == [(0, 1, 2, 3)] * 2, "once for the first answer, once for the last"


def test_a_source_that_fails_in_a_copy_leaves_no_reservation(client, daemon, monkeypatch):
    def fails(*_):
        raise RuntimeError("the buffer is gone")

    monkeypatch.setattr(putting, "_copy_in", fails)
    with pytest.raises(RuntimeError, match="is gone"):
        client.put(client.namespace(SPEC), HASHES, BLOCKS)
    assert client.lookup(client.namespace(SPEC), HASHES).prefix_blocks == 0
    deadline_s = time.monotonic() + 5.0
    while daemon.reservations:  # its late reply is undone by a message that has none
        assert time.monotonic() < deadline_s, "the reservation stays"
        time.sleep(0.001)
    assert client._core.connection.staging.free_bytes == 16 * SLOT_BYTES


def test_a_thread_that_waits_for_a_long_copy_leaves_its_cpu_to_the_daemon(client, daemon, monkeypatch):
    looked = []
    monkeypatch.setattr(
        waiting.ThreadedConnection, "_spin", lambda self, poll, until_s: looked.append(until_s > 0.0) or False
    )
    namespace = client.namespace(SPEC)
    client.lookup(namespace, HASHES)
    client._core.connection._crowded_until_s = 0.0  # whatever else runs beside this test
    looked.clear()
    client.put(namespace, HASHES[:1], BLOCKS[:1])
    assert looked
    assert all(looked), "answers that come soon are looked for"
    looked.clear()
    monkeypatch.setattr(writing, "LONG_COPY_BYTES", 0)
    daemon.before_reply = {pb.OPERATION_COMMIT: lambda peer: time.sleep(0.01)}
    assert client.put(namespace, HASHES, BLOCKS).stored == 15
    assert not all(looked)
    assert stored(client, HASHES) == BLOCKS
