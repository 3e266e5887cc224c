"""Purges of a real daemon: a planted pattern is looked for in all of its memory and files; kill -9 on the way."""

import os
import signal
import time
from pathlib import Path

import pytest
from kvstored_client import Client, NamespaceSpec, Outcome
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1.kvstored_pb2 import OPERATION_FLUSH, OPERATION_PURGE, OPERATION_PURGE_STATUS

from kvstored.testing.kept_daemon import KeptDaemon
from tests.e2e.raw_client import eventually

BLOCK_BYTES = 64 << 10
SETTINGS = {
    "dram.capacity_bytes": str(8 << 20),
    "dram.segment_bytes": str(1 << 20),
    "dram.huge_pages": "never",
    "nvme.capacity_bytes": str(128 << 20),
    "nvme.extent_bytes": str(32 << 20),
    "limits.staging_bytes_per_session": str(2 << 20),
}
GONE, KEPT = NamespaceSpec(model="gone"), NamespaceSpec(model="kept")


@pytest.fixture
def daemon(tmp_path):
    with KeptDaemon(SETTINGS, nvme=True, parent_directory=tmp_path) as running:
        yield running


def client_of(daemon, **settings):
    return Client(daemon.address, **settings)


def block(spec, number):
    """A block that is full of its model's name."""
    return f"<pattern of {spec.model}, {number:06}>".encode().ljust(64, b".") * (BLOCK_BYTES // 64)


def put(client, spec, numbers):
    namespace, numbers = client.namespace(spec), list(numbers)
    hashes = [f"{spec.model}-{number:06}".encode().ljust(16, b".") for number in numbers]
    for start in range(0, len(numbers), 16):
        data = [block(spec, number) for number in numbers[start : start + 16]]
        assert set(client.put(namespace, hashes[start : start + 16], data, wait_s=60).outcomes) == {Outcome.HIT}
    return hashes


def read(client, spec, hashes):
    """Those of the blocks that are there, checked."""
    found = []
    for number, hash_ in enumerate(hashes):
        with client.get(client.namespace(spec), [hash_], wait_s=60) as blocks:
            for view in blocks:
                assert bytes(view) == block(spec, number), hash_
                found.append(hash_)
    return found


def planted(daemon, spec):
    """How many blocks of a model have bytes in the memory of the daemon, and in its files."""
    pattern = f"<pattern of {spec.model}, ".encode()
    in_memory = 0
    for descriptor in Path(f"/proc/{daemon.pid}/fd").iterdir():
        try:
            name = descriptor.readlink().name
        except FileNotFoundError:
            continue
        if "kvstored-dram" in name or "kvstored-staging" in name:
            in_memory += descriptor.read_bytes().count(pattern)
    files = [Path(folder) / name for folder, _, names in os.walk(daemon.nvme_path) for name in names]
    return in_memory, sum(file.read_bytes().count(pattern) for file in files)


def begin(client, **selection):
    return client.call(OPERATION_PURGE, admin.PurgeRequest(**selection), admin.PurgeReply).receipt


def receipt_of(client, purge_id):
    request = admin.PurgeStatusRequest(purge_id=purge_id)
    return client.call(OPERATION_PURGE_STATUS, request, admin.PurgeStatusReply).receipts[0]


def ended(client, receipt):
    end_s = time.monotonic() + 60
    while receipt.state in ("waiting", "running"):
        assert time.monotonic() < end_s, receipt
        time.sleep(0.02)
        receipt = receipt_of(client, receipt.purge_id)
    return receipt


def flush(client):
    client.call(OPERATION_FLUSH, admin.FlushRequest(wait_ms=60_000), admin.FlushReply)


def test_no_byte_of_what_is_purged_is_left_and_the_rest_is_untouched(daemon):
    with client_of(daemon) as client:
        # More than DRAM holds: in both tiers, and in what both have free by now.
        gone, kept = put(client, GONE, range(150)), put(client, KEPT, range(40))
        client.delete(client.namespace(GONE), gone[:10])
        flush(client)
        assert min(planted(daemon, GONE)) > 0
        receipt = ended(client, begin(client, model="gone"))
        assert (receipt.state, list(receipt.remains)) == ("complete", [])
        assert planted(daemon, GONE) == (0, 0)
        assert read(client, GONE, gone) == []
        assert read(client, KEPT, kept) == kept
        put(client, GONE, range(150))
        assert len(read(client, GONE, gone)) > 40


def test_what_is_acknowledged_as_purged_stays_away_over_kills_and_a_lost_index(daemon):
    with client_of(daemon) as client:
        gone, kept = put(client, GONE, range(60)), put(client, KEPT, range(20))
        flush(client)
        receipt = ended(client, begin(client, model="gone"))
        assert receipt.state == "complete"
    daemon.kill()
    for name in ("data.mdb", "lock.mdb"):
        (daemon.nvme_path / "index" / name).unlink(missing_ok=True)
    daemon.start()
    assert planted(daemon, GONE) == (0, 0)
    with client_of(daemon) as client:
        assert read(client, GONE, gone) == []
        assert set(read(client, KEPT, kept)) <= set(kept)
        assert receipt_of(client, receipt.purge_id).state == "complete"


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
def test_a_purge_that_a_kill_cut_short_is_finished_by_the_next_daemon(daemon, delay_s):
    with client_of(daemon) as client:
        gone, kept = put(client, GONE, range(100)), put(client, KEPT, range(20))
        flush(client)
        holder = client_of(daemon)
        held = holder.get(holder.namespace(GONE), gone[-1:], wait_s=60)  # so that it cannot end before the kill
        assert len(held) == 1
        receipt = begin(client, model="gone", deadline_ms=5000)
        time.sleep(delay_s)
    daemon.kill()
    daemon.start()
    with client_of(daemon) as client:
        eventually(lambda: receipt_of(client, receipt.purge_id).state == "complete", "it is finished")
        found = receipt_of(client, receipt.purge_id)
        assert "begun again" in found.notes[0]
        assert planted(daemon, GONE) == (0, 0)
        assert read(client, GONE, gone) == []
        assert read(client, KEPT, kept) == kept
    holder.close()


@pytest.mark.timeout(300)
def test_what_is_put_while_a_purge_waits_for_a_lease_outlives_the_kill_that_cuts_it_short(daemon):
    with client_of(daemon) as client, client_of(daemon) as holder:
        gone = put(client, GONE, range(40))
        flush(client)
        held = holder.get(holder.namespace(GONE), gone[-1:], wait_s=60)
        assert len(held) == 1
        receipt = begin(client, model="gone", deadline_ms=20_000)
        eventually(lambda: receipt_of(client, receipt.purge_id).phase.startswith("waiting for who"), "it waits")
        since = put(client, GONE, range(100, 120))
        os.kill(daemon.pid, signal.SIGKILL)
        holder.close()
    daemon.kill()
    daemon.start()
    with client_of(daemon) as client:
        eventually(lambda: receipt_of(client, receipt.purge_id).state == "complete", "it is finished", 120.0)
        assert read(client, GONE, gone) == []
        with client.get(client.namespace(GONE), since, wait_s=60) as blocks:
            assert [bytes(view) for view in blocks] == [block(GONE, number) for number in range(100, 120)]


def test_who_reads_past_the_deadline_knows_that_it_must_not_trust_what_it_read(daemon):
    with client_of(daemon) as client, client_of(daemon) as reader:
        gone = put(client, GONE, range(20))
        held = reader.get(reader.namespace(GONE), gone, wait_s=60)
        assert held.valid()
        receipt = ended(client, begin(client, model="gone", deadline_ms=100))
        assert (receipt.state, receipt.sessions_ended_count, receipt.leases_ended) == ("complete", 1, 1)
        assert not held.valid()
        assert planted(daemon, GONE) == (0, 0)
        assert read(reader, GONE, gone) == []
