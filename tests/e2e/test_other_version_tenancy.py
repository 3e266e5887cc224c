"""An upgrade and a roll-back with tenants, tokens, ends, epochs and receipts of purges in the files and the memory."""

import time

import pytest
from kvstored_client import Client, NamespaceSpec, Outcome
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.daemon_process import status
from kvstored.testing.kept_daemon import KeptDaemon
from tests.e2e.kept_blocks import SETTINGS, contents, found, names
from tests.e2e.raw_client import eventually
from tests.old_code import extract

# Code that has tenants, ends, epochs and purges; and the newest that has none of them.
WITH_TENANCY, BEFORE_TENANCY = "653fc48", "c5744b3"
SPEC, BUMPED, PURGED = (NamespaceSpec(model=model) for model in ("m", "bumped", "purged"))
SHORT_S = 5.0


class SameStateDaemon(KeptDaemon):
    """Its state directory is the same for every version."""

    left_out_of_others = frozenset()


@pytest.fixture
def daemon(tmp_path):
    with SameStateDaemon(SETTINGS, nvme=True, parent_directory=tmp_path) as running:
        yield running


def restart_as(daemon, source):
    daemon.kill()
    daemon.source = source
    daemon.start()


def client_of(daemon, **settings):
    return Client(daemon.address, **settings)


def call(client, operation, request, reply):
    return client.call(getattr(pb, f"OPERATION_{operation}"), request, getattr(admin, reply))


def put(client, spec, prefix, count=8, **terms):
    hashes = names(prefix, count)
    done = client.put(client.namespace(spec), hashes, contents(hashes), wait_s=60, **terms)
    assert set(done.outcomes) == {Outcome.HIT}


def count(client, spec, prefix, wait_s=60.0):
    return found(client, spec, names(prefix, 8), wait_s)


def purge(client, model):
    receipt = call(client, "PURGE", admin.PurgeRequest(model=model), "PurgeReply").receipt
    while receipt.state in ("waiting", "running"):
        time.sleep(0.05)
        asked = admin.PurgeStatusRequest(purge_id=receipt.purge_id)
        (receipt,) = call(client, "PURGE_STATUS", asked, "PurgeStatusReply").receipts
    assert receipt.state == "complete"
    return receipt.purge_id


def leave(daemon, name):
    """A tenant with a token, blocks that end soon, late and never, a bump and a purge; returns what to look for."""
    with client_of(daemon) as root:
        added = admin.AddTenantRequest(name=name, fields={"nvme_limit_bytes": "1GiB", "max_age_s": "86400"})
        call(root, "ADD_TENANT", added, "TenantReply")
        token = call(root, "ADD_TOKEN", admin.AddTokenRequest(tenant=name), "TokenReply").token
    with client_of(daemon, token=token) as client:
        put(client, SPEC, f"{name}-memory")
        put(client, SPEC, f"{name}-nvme", durability="nvme")
        put(client, SPEC, f"{name}-long", ttl_s=3600, durability="nvme")
        put(client, SPEC, f"{name}-short", ttl_s=SHORT_S, durability="nvme")
        put(client, BUMPED, f"{name}-a", durability="nvme")
        call(client, "BUMP_EPOCH", admin.BumpEpochRequest(model="bumped"), "BumpEpochReply")
        put(client, BUMPED, f"{name}-b", durability="nvme")
        put(client, PURGED, f"{name}-a", durability="nvme")
        receipt = purge(client, "purged")
    on_file = daemon.directory / "state" / "purges.json"  # the other version says so before it is there

    def on_record():
        text = on_file.read_text() if on_file.exists() else ""
        return receipt in text and 'ing"' not in text

    eventually(on_record, "the receipt is on file")
    return name, token, receipt, time.monotonic() + SHORT_S


def check(daemon, left, memory=8):
    """All of it is as it was left."""
    name, token, purge_id, ended_s = left
    with client_of(daemon) as root:
        tenants = call(root, "LIST_TENANTS", admin.ListTenantsRequest(name=name), "ListTenantsReply").tenants
        assert [tenant.fields["nvme_limit_bytes"] for tenant in tenants] == [str(1 << 30)]
        receipts = call(root, "PURGE_STATUS", admin.PurgeStatusRequest(), "PurgeStatusReply").receipts
        assert purge_id in {receipt.purge_id for receipt in receipts if receipt.state == "complete"}
    with client_of(daemon, token=token) as client:
        time.sleep(max(0.0, ended_s - time.monotonic()))
        assert count(client, SPEC, f"{name}-short", 0.0) == 0
        assert [count(client, SPEC, f"{name}-{what}") for what in ("memory", "nvme", "long")] == [memory, 8, 8]
        assert (count(client, BUMPED, f"{name}-a", 0.0), count(client, BUMPED, f"{name}-b")) == (0, 8)
        assert count(client, PURGED, f"{name}-a", 0.0) == 0
    assert not status(daemon.session_socket).counters["quota_violations"]


def test_tenants_ends_epochs_and_receipts_go_from_version_to_version_and_back(daemon, tmp_path):
    other = extract(WITH_TENANCY, tmp_path / "other", "kvstored", "client", "proto")
    restart_as(daemon, other)
    first = leave(daemon, "first")
    restart_as(daemon, None)
    check(daemon, first)
    second = leave(daemon, "second")
    check(daemon, second)
    restart_as(daemon, other)
    check(daemon, first)
    check(daemon, second)
    restart_as(daemon, None)
    check(daemon, second)


def test_code_that_knows_of_no_tenancy_leaves_all_of_it_as_it_is(daemon, tmp_path):
    other = extract(BEFORE_TENANCY, tmp_path / "other", "kvstored", "client", "proto")
    left = leave(daemon, "first")
    with client_of(daemon) as root:
        put(root, SPEC, "mine", durability="nvme")
    daemon.left_out_of_others = KeptDaemon.left_out_of_others
    restart_as(daemon, other)
    with client_of(daemon) as root:
        assert count(root, SPEC, "mine") == 8
        put(root, SPEC, "theirs", durability="nvme")
        put(root, SPEC, "memory")
    with client_of(daemon, token=left[1]) as client:
        assert not client.connected, "the token is nobody's there"
    restart_as(daemon, None)
    with client_of(daemon) as root:
        assert [count(root, SPEC, prefix) for prefix in ("mine", "theirs", "memory")] == [8] * 3
    check(daemon, left, memory=0)
