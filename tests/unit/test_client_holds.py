"""What a client still holds when its connection has ended and a new one is open."""

import contextlib

import pytest
from fake_daemon import FakeDaemon
from kvstored_client import Client, NamespaceSpec
from kvstored_client.holds import Hold, Left
from kvstored_proto.v1 import kvstored_pb2 as pb

SPEC = NamespaceSpec(model="m")
HASHES = [bytes([number]) * 16 for number in range(1, 5)]


class Connection:
    """As much of a connection as a hold needs."""

    page = error = None

    def __init__(self):
        self.holds, self.posted = {}, []

    def post(self, operation, request):
        assert operation == pb.OPERATION_RELEASE
        self.posted += request.lease_ids


@pytest.fixture
def old():
    return Connection()


@pytest.fixture
def new():
    return Connection()


def left_by(connection):
    return Left(connection.holds)


def test_what_is_in_use_is_asked_for_and_nothing_else(old):
    Hold(old, [1, 2])
    Hold(old, [3]).release()
    assert left_by(old).in_use() == [1, 2]


def test_what_the_daemon_still_holds_is_released_by_the_new_connection(old, new):
    hold, other = Hold(old, [1, 2]), Hold(old, [3])
    left_by(old).resume(new, [1, 2])
    assert (hold.connection, other.connection) == (new, old)
    hold.release()
    assert (new.posted, old.posted) == ([1, 2], [])
    assert not new.holds


def test_a_hold_of_which_a_part_is_gone_is_gone_and_the_rest_is_given_back(old, new):
    hold = Hold(old, [1, 2])
    left_by(old).resume(new, [1])
    assert hold.connection is old
    assert new.posted == [1]


def test_what_was_released_after_it_was_asked_for_is_given_back(old, new):
    hold, left = Hold(old, [1]), left_by(old)
    assert left.in_use() == [1]
    hold.release()
    left.resume(new, [1])
    assert new.posted == [1]


def test_what_is_released_by_a_finalizer_while_it_moves_is_given_back(old, new):
    hold = Hold(old, [1])
    hold.released = True  # another thread is just about to post it to the connection that has ended
    left_by(old).resume(new, [1])
    assert new.posted == [1]


def test_a_lease_that_was_handed_over_is_not_asked_for(old):
    hold = Hold(old, [1])
    hold.forget()
    assert left_by(old).in_use() == []


def test_with_a_daemon_that_knows_nothing_of_it_views_are_invalid_after_a_reconnect(tmp_path):
    daemon = FakeDaemon(tmp_path)
    with contextlib.closing(daemon), Client(daemon.address, timeout_s=60) as client:
        namespace = client.namespace(SPEC)
        client.put(namespace, HASHES, [b"x" * 4096] * 4)
        blocks = client.get(namespace, HASHES)
        assert blocks.valid()
        daemon.hang_up()
        for _ in range(20):
            client.contains(namespace, HASHES)
        assert client.connected
        assert not blocks.valid()
        blocks.release()
