"""Encryption at rest with a real daemon: what lies in its files, over kills, and with its key missing and back."""

import json
import os
import time

import pytest
from kvstored_client import Client, NamespaceSpec, Outcome
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.daemon_process import DaemonProcess
from tests.old_code import extract
from tests.unit.test_rebuild import run_old

BLOCK = 64 << 10
SETTINGS = {
    "dram.capacity_bytes": "16MiB",
    "dram.huge_pages": "never",
    "nvme.capacity_bytes": "64MiB",
    "nvme.extent_bytes": "32MiB",
}
# Any version before encryption.
BEFORE = "f4dd89a"


@pytest.fixture
def key(tmp_path):
    file = tmp_path / "master.key"
    file.write_text(os.urandom(32).hex())
    return file


@pytest.fixture
def daemon(tmp_path, key):
    tenant = {"name": "t", "uids": [os.getuid()], "role": "admin", "encryption": "aes-256-gcm", "key_file": str(key)}
    with DaemonProcess({**SETTINGS, "tenants": json.dumps([tenant])}, nvme=True, parent_directory=tmp_path) as running:
        yield running


def connected(daemon):
    return Client(daemon.address)


def names(prefix):
    return [f"{prefix}-{number:04}".encode().ljust(16, b".") for number in range(16)]


def block(name):
    return (name * BLOCK)[:BLOCK]


def put(daemon, prefix, wait_s=60.0):
    with connected(daemon) as client:
        namespace = client.namespace(NamespaceSpec(model="m"))
        return client.put(namespace, names(prefix), list(map(block, names(prefix))), wait_s=wait_s, durability="nvme")


def there(daemon, prefix):
    with (
        connected(daemon) as client,
        client.get(client.namespace(NamespaceSpec(model="m")), names(prefix), wait_s=60) as blocks,
    ):
        for name, view in zip(names(prefix), blocks, strict=False):
            assert bytes(view) == block(name)
        return len(blocks)


def plain(daemon, prefix):
    """Which blocks' bytes lie in any file of the tier."""
    data = b"".join(path.read_bytes() for path in daemon.nvme_path.rglob("*") if path.is_file())
    return [name for name in names(prefix) if name * 4 in data]


def rekey(daemon):
    with connected(daemon) as client:
        return client.call(pb.OPERATION_REKEY_TENANT, admin.RekeyTenantRequest(tenant="t"), admin.RekeyTenantReply).keys


def warnings(daemon):
    with connected(daemon) as client:
        return [warning for warning in client.status().warnings if "encrypted" in warning]


def restart(daemon):
    daemon.kill()
    daemon.start()


def test_durable_blocks_survive_a_kill_and_their_bytes_are_in_no_file(daemon):
    assert set(put(daemon, "a").outcomes) == {Outcome.HIT}
    assert plain(daemon, "a") == []
    restart(daemon)
    assert there(daemon, "a") == 16
    daemon.restart()  # in order, with a flush
    assert there(daemon, "a") == 16
    assert plain(daemon, "a") == []
    assert warnings(daemon) == []


def test_with_its_key_missing_all_is_a_miss_and_with_its_key_back_all_is_there(daemon, key):
    put(daemon, "a")
    kept = key.rename(key.with_suffix(".away"))
    restart(daemon)
    assert there(daemon, "a") == 0
    (warning,) = warnings(daemon)
    assert "tenant t" in warning
    assert str(key) in warning
    refused = put(daemon, "b", wait_s=0.1)
    assert refused.durable == 0
    assert there(daemon, "b") == 16, "it lives in DRAM"
    assert plain(daemon, "b") == []
    kept.rename(key)
    assert rekey(daemon) == 1
    assert warnings(daemon) == []
    assert there(daemon, "a") == 16
    assert put(daemon, "b").durable == 16
    assert plain(daemon, "ab") == []


def test_the_master_key_is_changed_while_it_serves(daemon, key):
    put(daemon, "a")
    key.write_text(os.urandom(32).hex())
    assert rekey(daemon) == 1
    restart(daemon)
    assert there(daemon, "a") == 16
    key.write_text(os.urandom(32).hex())
    restart(daemon)
    assert there(daemon, "a") == 0
    assert "another master key" in warnings(daemon)[0]


def test_a_purge_of_a_tenant_destroys_its_key_and_says_so(daemon):
    put(daemon, "a")
    keys = {path.name: path.read_bytes() for path in (daemon.nvme_path / "keys").iterdir()}
    with connected(daemon) as client:
        receipt = client.call(pb.OPERATION_PURGE, admin.PurgeRequest(tenant="t"), admin.PurgeReply).receipt
        while receipt.state not in ("complete", "incomplete"):
            time.sleep(0.05)
            asked = admin.PurgeStatusRequest(purge_id=receipt.purge_id)
            (receipt,) = client.call(pb.OPERATION_PURGE_STATUS, asked, admin.PurgeStatusReply).receipts
    assert (receipt.state, list(receipt.remains)) == ("complete", [])
    assert any("key destroyed: 1" in note for note in receipt.notes)
    assert there(daemon, "a") == 0
    end_s = time.monotonic() + 60
    while put(daemon, "b").durable < 16:  # a new key is made by itself
        assert time.monotonic() < end_s
        time.sleep(0.1)
    assert {path.name: path.read_bytes() for path in (daemon.nvme_path / "keys").iterdir()} != keys
    restart(daemon)
    assert (there(daemon, "a"), there(daemon, "b")) == (0, 16)
    assert plain(daemon, "a") == []


def test_a_version_without_encryption_refuses_the_directory_and_changes_nothing(daemon, tmp_path):
    put(daemon, "a")
    daemon.stop()
    refusal = run_old(extract(BEFORE, tmp_path / "other", "kvstored", "client", "proto"), daemon.nvme_path)
    assert refusal.returncode != 0
    assert "has format 3, this kvstored reads up to 2" in refusal.stderr
    daemon.start()
    assert there(daemon, "a") == 16
