"""What is in DRAM outlives the daemon: real processes, kill -9, clients that come back."""

import subprocess
import sys

import pytest
from kvstored_client import Client, NamespaceSpec, Outcome

from kvstored.testing.daemon_process import status
from kvstored.testing.kept_daemon import KeptDaemon
from tests.e2e.raw_client import eventually

SPEC = NamespaceSpec(model="m")
BLOCK = 64 << 10
BLOCKS = 64  # of the capacity
SETTINGS = {
    "dram.capacity_bytes": str(BLOCKS * BLOCK),
    "dram.segment_bytes": str(1 << 20),
    "dram.huge_pages": "never",
    "limits.leased_share": "0.9",
    "limits.staging_bytes_per_session": str(2 << 20),
}


@pytest.fixture
def daemon(tmp_path):
    with KeptDaemon(SETTINGS, parent_directory=tmp_path) as running:
        yield running


def client_of(daemon, **settings):
    return Client(daemon.address, **settings)


def names(prefix, count):
    return [f"{prefix}-{number:04}".encode().ljust(16, b".") for number in range(count)]


def block(name):
    return (name * (BLOCK // len(name)))[:BLOCK]


def put(client, prefix, count):
    hashes = names(prefix, count)
    stored = client.put(client.namespace(SPEC), hashes, [block(name) for name in hashes], wait_s=60)
    return stored.outcomes


def read(client, prefix, count, wait_s=60.0):
    """The leading blocks, checked."""
    hashes = names(prefix, count)
    with client.get(client.namespace(SPEC), hashes, wait_s=wait_s) as blocks:
        for name, view in zip(hashes, blocks, strict=False):
            assert bytes(view) == block(name), name
        assert blocks.valid() or not blocks.shards
        return len(blocks)


def reconnect(client):
    """The first calls after a restart fail or miss: until one is answered."""

    def connected():
        client.contains(client.namespace(SPEC), names("any", 1))
        return client.connected

    eventually(connected, "it is connected again")


def crash(daemon):
    daemon.kill()
    daemon.start()


def test_after_kill_9_every_committed_block_is_served_again(daemon):
    with client_of(daemon) as client:
        assert set(put(client, "a", 40)) == {Outcome.HIT}
        for _ in range(2):
            crash(daemon)
            reconnect(client)
            assert read(client, "a", 40) == 40
        counters = status(daemon.session_socket).counters
        assert (counters["dram_adopted_blocks"], counters["corrupt_blocks"], counters["put_blocks"]) == (40, 0, 0)


def test_an_orderly_restart_keeps_them_too_and_what_is_deleted_stays_so(daemon):
    with client_of(daemon) as client:
        put(client, "a", 20)
        assert client.delete(client.namespace(SPEC), names("a", 20)[10:]) == 10
        daemon.restart()
        reconnect(client)
        assert read(client, "a", 20) == 10
        daemon.restart()
        reconnect(client)
        assert read(client, "a", 20) == 10
        (dram,) = status(daemon.session_socket).tiers
        assert dram.properties["kept"] == "yes"
        assert dram.properties["start"] == "3"
        assert dram.blocks == 10


def test_what_was_not_committed_is_not_there(daemon):
    with client_of(daemon) as client:
        put(client, "a", 4)
        hashes = names("half", 4)
        staged = client.stage(client.namespace(SPEC), hashes, BLOCK)
        for name, view in zip(hashes, staged.views, strict=True):
            view[:] = block(name)
        crash(daemon)
        reconnect(client)
        assert read(client, "half", 4) == 0
        assert read(client, "a", 4) == 4
        assert set(put(client, "half", 4)) == {Outcome.HIT}
        assert read(client, "half", 4) == 4


@pytest.mark.parametrize("again", [crash, KeptDaemon.restart])
def test_a_view_stays_as_it_was_while_new_blocks_fill_the_tier_and_is_held_again(daemon, again):
    with client_of(daemon) as reader, client_of(daemon) as writer:
        put(writer, "a", 32)
        hashes = names("a", 32)
        blocks = reader.get(reader.namespace(SPEC), hashes)
        unused = reader.get(reader.namespace(SPEC), hashes[:2])
        views = [blocks[index] for index in range(32)]
        again(daemon)
        assert not blocks.valid()
        reconnect(writer)
        assert Outcome.HIT in put(writer, "new", 60)
        assert [bytes(view) for view in views] == [block(name) for name in hashes]
        unused.release()
        reconnect(reader)
        assert blocks.valid()
        assert not unused.valid()
        for _ in range(3):
            put(writer, "more", 60)
        assert [bytes(view) for view in views] == [block(name) for name in hashes]
        held = status(daemon.session_socket).counters
        assert (held["held_leases"], held["quarantined_leases"]) == (1, 0)
        blocks.release()
        assert status(daemon.session_socket).counters["held_leases"] == 0
        assert read(reader, "a", 32) == 32


READER = """
import sys
from kvstored_client import Client, NamespaceSpec
client = Client(sys.argv[1], timeout_s=60, connect_timeout_s=60)
hashes = [f"a-{number:04}".encode().ljust(16, b".") for number in range(32)]
blocks = client.get(client.namespace(NamespaceSpec(model="m")), hashes)
print(len(blocks), flush=True)
input()
"""


def test_what_a_process_held_is_free_when_it_is_gone(daemon):
    with client_of(daemon) as client:
        put(client, "a", 32)
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, daemon.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert reader.stdout.readline() == b"32\n"
            crash(daemon)
            assert status(daemon.session_socket).counters["quarantined_leases"] == 1
        finally:
            reader.kill()
            reader.communicate()
        eventually(lambda: not status(daemon.session_socket).counters["quarantined_leases"], "it looks every second")
        reconnect(client)
        assert read(client, "a", 32) == 32


def test_a_client_of_an_engine_group_finds_its_group_again(daemon):
    with client_of(daemon, create_group=True) as scheduler:
        put(scheduler, "a", 4)
        with client_of(daemon, join_group=scheduler.group_id) as worker:
            blocks = scheduler.get(scheduler.namespace(SPEC), names("a", 4))
            (lease_id,) = blocks.hand_over()
            used = worker.attach(lease_id)
            crash(daemon)
            before = scheduler.group_id
            reconnect(scheduler)
            reconnect(worker)
            assert scheduler.group_id == before
            assert used.valid()
            assert [bytes(view) for view in used] == [block(name) for name in names("a", 4)]
            used.release()


def test_a_changed_capacity_keeps_what_fits_and_says_what_does_not(daemon):
    with client_of(daemon) as client:
        put(client, "a", 57)
        daemon._settings["dram.capacity_bytes"] = str(2 << 20)
        daemon._settings["dram.segment_bytes"] = str(512 << 10)
        crash(daemon)
        (dram,) = status(daemon.session_socket).tiers
        assert dram.capacity_bytes == 2 << 20
        assert dram.properties["adopted_segments"] == "2"
        assert "25 capacity" in dram.properties["dropped_blocks"]
        assert "does not fit the configuration" in daemon.log_tail()
        assert len([name for name in daemon.kept() if name.startswith("seg-")]) == 2
