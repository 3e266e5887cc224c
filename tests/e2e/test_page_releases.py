"""Releases through the session page, by the client that people use, against a real daemon."""

import asyncio
import multiprocessing
import os
import signal

import pytest
from kvstored_client import AsyncClient, Client, NamespaceSpec
from kvstored_client.connection import Connection
from kvstored_proto.page import RING_WORDS
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.daemon_process import DaemonProcess
from tests.e2e.raw_client import eventually

BLOCK_BYTES = 4096
DRAM_BYTES = 8 << 20
PATIENT = {"timeout_s": 60.0, "connect_timeout_s": 60.0}  # of clients in other processes


@pytest.fixture(scope="module")
def daemon():
    settings = {
        "dram.capacity_bytes": str(DRAM_BYTES),
        "dram.segment_bytes": "1MiB",
        "limits.leased_share": "1.0",
        "limits.staging_bytes_per_session": "16MiB",
    }
    with DaemonProcess(settings) as running:
        yield running


@pytest.fixture
def client(daemon):
    with Client(daemon.address) as made:
        yield made


@pytest.fixture
def other(daemon):
    with Client(daemon.address) as made:
        yield made


@pytest.fixture
def release_frames(monkeypatch):
    """How many releases each frame of this process's clients carried."""
    sent = []
    post = Connection.post

    def counted(connection, operation, request):
        if operation == pb.OPERATION_RELEASE:
            sent.append(len(request.lease_ids))
        post(connection, operation, request)

    monkeypatch.setattr(Connection, "post", counted)
    return sent


def stored(client, name, count):
    namespace = client.namespace(NamespaceSpec(model=name, block_tokens=1))
    hashes = namespace.chain(range(count))
    assert client.put(namespace, hashes, bytes(count * BLOCK_BYTES), block_bytes=BLOCK_BYTES).stored == count
    return namespace, hashes


def leases(client):
    return sum(session.leases for session in client.status().sessions)


def test_releases_send_no_frame_and_every_status_knows_of_them(client, other, release_frames):
    namespace, hashes = stored(client, "status", 10)
    for _ in range(50):
        with client.get(namespace, hashes) as blocks:
            assert len(blocks) == 10
        assert client.get_into(namespace, hashes, bytearray(10 * BLOCK_BYTES)) == 10
    assert leases(other) == 0
    assert not release_frames


def test_a_ring_that_is_full_sends_the_rest_by_frames(client, release_frames):
    namespace, hashes = stored(client, "many", 1)
    held = [client.get(namespace, hashes) for _ in range(RING_WORDS + 50)]
    assert leases(client) == RING_WORDS + 50
    for blocks in held:
        blocks.release()
    assert leases(client) == 0
    assert sum(release_frames) <= 50


def test_what_one_client_releases_makes_room_for_anothers_put(client, other):
    count = DRAM_BYTES // BLOCK_BYTES
    namespace, hashes = stored(client, "full", count)
    taker = other.namespace(NamespaceSpec(model="taker", block_tokens=1))
    wanted = taker.chain(range(count))
    with client.get(namespace, hashes) as blocks:
        assert len(blocks) == count
        assert other.put(taker, wanted, bytes(count * BLOCK_BYTES), block_bytes=BLOCK_BYTES).stored == 0
    assert other.put(taker, wanted, bytes(count * BLOCK_BYTES), block_bytes=BLOCK_BYTES).stored == count


def hold_and_die(address, group_id, hashes, released):
    """In another process: a member of a group is killed, with a lease or just after its release."""
    worker = Client(address, join_group=group_id, **PATIENT)
    blocks = worker.get(worker.namespace(NamespaceSpec(model="group", block_tokens=1)), hashes)
    assert len(blocks) == 3
    if released:
        blocks.release()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("released", [True, False])
def test_what_a_killed_worker_had_released_does_not_stay_with_its_group(daemon, released):
    with Client(daemon.address, create_group=True) as scheduler:
        namespace, hashes = stored(scheduler, "group", 3)
        assert in_fresh_process(hold_and_die, daemon.address, scheduler.group_id, hashes, released) == -signal.SIGKILL
        eventually(lambda: len(scheduler.status().sessions) == 1, "the worker's session ends")
        assert leases(scheduler) == (0 if released else 1)
        scheduler.delete(namespace, hashes)


def release_in_a_fork(address):
    """In another process: its fork ends a hold that is the parent's."""
    with Client(address, **PATIENT) as client:
        blocks = client.get(*stored(client, "fork", 3))
        pid = os.fork()
        if not pid:
            blocks.release()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert leases(client) == 1
        blocks.release()
        assert leases(client) == 0


def test_a_fork_leaves_its_parents_page_alone(daemon):
    assert in_fresh_process(release_in_a_fork, daemon.address) == 0


def in_fresh_process(work, *args):
    """Exit status. Fresh, since a fork of this one would have the locks of gRPC's threads but not the threads."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=args)
    process.start()
    process.join(100)
    return process.exitcode


def test_a_page_comes_with_each_new_session(release_frames):
    with DaemonProcess({"dram.capacity_bytes": "8MiB"}) as daemon, Client(daemon.address) as client:
        old = client.get(*stored(client, "a", 1))
        daemon.restart()
        eventually(client.status, "the client reconnects")
        old.release()  # belongs to a session that is over
        namespace, hashes = stored(client, "a", 1)
        with client.get(namespace, hashes) as blocks:
            assert len(blocks) == 1
        assert leases(client) == 0
    assert len(release_frames) <= 1


def test_the_asyncio_client_releases_through_its_page(daemon, release_frames):
    async def run():
        async with AsyncClient(daemon.address) as client:
            namespace = client.namespace(NamespaceSpec(model="aio", block_tokens=1))
            await client.open(namespace)
            hashes = namespace.chain(range(4))
            await client.put(namespace, hashes, bytes(4 * BLOCK_BYTES), block_bytes=BLOCK_BYTES)
            for _ in range(20):
                async with client.get(namespace, hashes) as blocks:
                    assert len(blocks) == 4
            return sum(session.leases for session in (await client.status()).sessions)

    assert asyncio.run(run()) == 0
    assert not release_frames
