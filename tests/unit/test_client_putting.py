"""Puts in batches, as to a daemon that takes no streams: each block is copied once, and no room is left taken."""

import time

import pytest
from fake_daemon import SLOT_BYTES, SPEC
from kvstored_client import Client, putting, waiting, writing
from kvstored_proto.v1 import kvstored_pb2 as pb

HASHES = [bytes([i]) * 32 for i in range(1, 17)]
BLOCKS = [bytes([i]) * SLOT_BYTES for i in range(1, 17)]


@pytest.fixture
def client(daemon):
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


def test_every_block_is_copied_once(client, copied):
    assert client.put(client.namespace(SPEC), HASHES, BLOCKS).stored == 16
    assert copied == [tuple(range(i, i + 4)) for i in range(0, 16, 4)]
    assert stored(client, HASHES) == BLOCKS
    assert client._core.connection.staging.free_bytes == 16 * SLOT_BYTES


@pytest.mark.parametrize("there", [slice(0, 1), slice(2, 3), slice(5, 7), slice(0, 16)])
def test_what_is_there_already_takes_no_room(client, daemon, there):
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


def test_nothing_is_copied_before_there_is_room_for_it(client, daemon, copied):
    daemon.throttle_reserves = 3
    assert client.put(client.namespace(SPEC), HASHES[:4], BLOCKS[:4], wait_s=60.0).stored == 4
    assert copied == [(0, 1, 2, 3)]


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
