"""Tenants and tokens that are changed while a real daemon serves: over kills and restarts, with clients that go on."""

import contextlib
import json
import os
import signal
import threading
import time

import pytest
from kvstored_client import Client, NamespaceSpec, Outcome, ctl
from kvstored_client.errors import KVStoredClientError
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.daemon_process import DaemonFailed, DaemonProcess, status
from kvstored.testing.kept_daemon import KeptDaemon
from tests.e2e.raw_client import HIT, RawClient, hashes_of

BLOCK = 64 << 10
SETTINGS = {
    "dram.capacity_bytes": str(64 * BLOCK),
    "dram.segment_bytes": str(1 << 20),
    "dram.huge_pages": "never",
    "limits.staging_bytes_per_session": str(2 << 20),
}
WAIT_S = 60


@pytest.fixture
def daemon(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as running:
        yield running


def connected(daemon, **settings):
    return Client(daemon.address, **settings)


def call(client, operation, request, reply):
    return client.call(getattr(pb, f"OPERATION_{operation}"), request, getattr(admin, reply))


def add_token(root, tenant):
    return call(root, "ADD_TOKEN", admin.AddTokenRequest(tenant=tenant), "TokenReply")


def add_tenant(root, name, **fields):
    return call(root, "ADD_TENANT", admin.AddTenantRequest(name=name, fields=fields), "TenantReply")


def tenants_of(daemon):
    with connected(daemon) as root:
        reply = call(root, "LIST_TENANTS", admin.ListTenantsRequest(), "ListTenantsReply")
    return {info.name: info for info in reply.tenants}


def until(condition):
    end_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError
        time.sleep(0.02)


def put(client, prefix, count=4):
    hashes = [f"{prefix}-{number:04}".encode().ljust(16, b".") for number in range(count)]
    blocks = [(name * BLOCK)[:BLOCK] for name in hashes]
    result = client.put(client.namespace(NamespaceSpec(model="m")), hashes, blocks, wait_s=60, durability="nvme")
    assert set(result.outcomes) == {Outcome.HIT}
    return hashes


def test_a_restart_keeps_tenants_tokens_and_their_blocks(daemon):
    with connected(daemon) as root:
        add_tenant(root, "kept", role="tenant", nvme_limit_bytes="1GiB")
        token = add_token(root, "kept").token
    with connected(daemon, token=token) as client:
        hashes = put(client, "a")
    daemon.restart()
    info = tenants_of(daemon)["kept"]
    assert json.loads(info.fields["nvme_limit_bytes"]) == 1 << 30
    with connected(daemon, token=token) as client:
        assert client.lookup(client.namespace(NamespaceSpec(model="m")), hashes).prefix_blocks == 4
    stored = b"".join(path.read_bytes() for path in (daemon.directory / "state").iterdir())
    assert token.encode() not in stored
    assert token.rpartition("_")[2].encode() not in stored
    assert token not in daemon.log_path.read_text()


@pytest.mark.parametrize("kills", [3])
def test_a_kill_at_any_moment_loses_no_change_that_was_acknowledged(daemon, kills):
    acknowledged, attempted = set(), set()
    for round_ in range(kills):
        with connected(daemon) as root:

            def change(root=root, round_=round_):
                for number in range(10_000):
                    name = f"t{round_}-{number}"
                    attempted.add(name)
                    try:
                        add_tenant(root, name, uids=str(10**6 + round_ * 10**5 + number))
                    except KVStoredClientError:
                        return
                    acknowledged.add(name)

            changing = threading.Thread(target=change)
            before = len(acknowledged)
            changing.start()
            until(lambda before=before: len(acknowledged) > before + 3)
            os.kill(daemon.pid, signal.SIGKILL)
            changing.join()
        daemon.kill()
        daemon.start()
        there = tenants_of(daemon).keys()
        assert acknowledged <= there
        assert there <= attempted | {"default"}
    records = [json.loads(line) for line in (daemon.directory / "state" / "audit.jsonl").read_text().splitlines()]
    numbers = [record["seq"] for record in records]
    assert numbers == sorted(set(numbers)), "in order, over all starts"
    assert {record["with"]["name"] for record in records if record["act"] == "AddTenant"} >= acknowledged


def test_a_token_is_rotated_under_a_client_that_goes_on(daemon, tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORED_ADDRESS", daemon.address)
    file = tmp_path / "token"

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            ctl.main([*arguments, "--timeout", "60"])
        assert not ended.value.code

    run("tenant", "add", "live")
    run("token", "add", "live", "--out", str(file))
    old_id = file.read_text().split("_")[1]
    with connected(daemon, token_file=file) as client:
        hashes = put(client, "a")
        namespace = client.namespace(NamespaceSpec(model="m"))
        run("token", "rotate", old_id, "--grace", "1h", "--out", str(file))
        assert file.read_text().split("_")[1] != old_id
        assert client.lookup(namespace, hashes).prefix_blocks == 4
        run("token", "revoke", old_id)
        until(lambda: client.lookup(namespace, hashes).prefix_blocks == 4)
        assert put(client, "b")


def test_wrong_expired_and_revoked_tokens_are_nobodys(daemon):
    with connected(daemon) as root:
        add_tenant(root, "t")
        good = add_token(root, "t")
        expired = call(root, "ADD_TOKEN", admin.AddTokenRequest(tenant="t", expires_in_s=0.05), "TokenReply")
        call(root, "REVOKE_TOKEN", admin.RevokeTokenRequest(token_id=good.info.id), "RevokeTokenReply")
        until(lambda: all(token.expired for token in tenants_of(daemon)["t"].tokens))
    for token in (good.token, expired.token, good.token[:-1], "kvs_", "x" * 5000):
        with connected(daemon, token=token) as client:
            assert not client.connected
            assert "the token" in str(client.connect_error)
    audit = daemon.directory / "state" / "audit.jsonl"
    until(lambda: "the token has expired" in audit.read_text())  # nobody waits for the line of a refusal
    log = audit.read_text()
    assert not any(token in log for token in (good.token, expired.token))


def test_what_a_removed_tenant_had_is_taken_away_after_a_kill_too(tmp_path):
    with KeptDaemon(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        with connected(daemon) as root:
            add_tenant(root, "gone")
            token = add_token(root, "gone").token
            put(root, "mine")
            with connected(daemon, token=token) as client:
                put(client, "theirs")
                removing = admin.RemoveTenantRequest(name="gone")
                assert call(root, "REMOVE_TENANT", removing, "RemoveTenantReply").sessions_ended == 1
                os.kill(daemon.pid, signal.SIGKILL)
        daemon.kill()
        daemon.start()
        until(lambda: "gone" not in tenants_of(daemon))
        for name, there in ((b"mine-0001", True), (b"theirs-0001", False)):
            stored = [path for path in daemon.nvme_path.rglob("*") if path.is_file()]
            assert any(2 * name.ljust(16, b".") in path.read_bytes() for path in stored) == there
        usage = {tenant.name: tenant for tenant in status(daemon.session_socket).tenants}
        assert usage["default"].nvme_blocks == 4
        left = usage.get("gone", pb.TenantStatus())
        assert (left.dram_blocks, left.nvme_blocks) == (0, 0)
        names = [path.read_bytes() for path in (daemon.nvme_path / "namespaces").iterdir()]
        assert len(names) == 1
        assert b"gone" not in names[0]
        daemon.restart()
        with connected(daemon) as root:
            known = call(root, "LIST_NAMESPACES", admin.ListNamespacesRequest(), "ListNamespacesReply").namespaces
        assert [namespace.tenant for namespace in known] == ["default"]
        with connected(daemon) as root:
            add_tenant(root, "gone")
        with connected(daemon, token=token) as client:
            assert not client.connected


@pytest.mark.parametrize("killed", [False, True])
def test_memory_that_clients_of_a_removed_tenant_have_mapped_is_never_that_of_another_of_its_name(tmp_path, killed):
    with KeptDaemon(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon, contextlib.ExitStack() as stack:

        def filled(token, name):
            client = stack.enter_context(RawClient(daemon.session_socket, token=token, staging_bytes=1 << 20))
            namespace, hashes = client.namespace(), hashes_of(name, 40)
            assert set(client.put(namespace, hashes, [name.encode() * (BLOCK // len(name))] * 40)) == {HIT}
            assert len(client.read(namespace, hashes)) == 40
            return client

        def added():
            with connected(daemon) as root:
                add_tenant(root, "t")
                return add_token(root, "t").token

        def mapped(name):
            return any(name.encode() in os.pread(fd, 1 << 20, 0) for fd in fds)

        old = filled(added(), "oldoldold-secret")
        fds = [os.dup(fd) for fd in old.segments.values()]
        for fd in fds:
            stack.callback(os.close, fd)
        assert mapped("oldoldold-secret")
        with connected(daemon) as root:
            call(root, "REMOVE_TENANT", admin.RemoveTenantRequest(name="t"), "RemoveTenantReply")
        if killed:
            daemon.kill()
            daemon.start()
        until(lambda: "t" not in tenants_of(daemon))
        assert not mapped("oldoldold-secret")
        filled(added(), "newnewnew-secret")
        assert not mapped("newnewnew-secret")


def test_a_damaged_file_of_tenants_keeps_the_daemon_from_starting_and_is_named(daemon):
    with connected(daemon) as root:
        add_tenant(root, "t")
    daemon.stop()
    path = daemon.directory / "state" / "tenants.json"
    path.write_bytes(path.read_bytes().replace(b'"t"', b'"u"', 1))
    with pytest.raises(DaemonFailed, match=r"tenants\.json is damaged: put back a copy"):
        daemon.start()
    path.unlink()
    daemon.start()
    assert tenants_of(daemon).keys() == {"default"}


def test_what_is_left_of_a_tenant_that_the_configuration_lost_is_forgotten_with_its_blocks(tmp_path):
    root = {"name": "root", "role": "admin", "uids": [os.getuid()]}
    settings = SETTINGS | {"tenants": json.dumps([root, {"name": "gone"}])}
    with DaemonProcess(settings, nvme=True, parent_directory=tmp_path) as daemon:
        with connected(daemon) as admin_client:
            changed = admin.SetTenantRequest(name="gone", fields={"max_age_s": "3600"})
            call(admin_client, "SET_TENANT", changed, "TenantReply")
            token = add_token(admin_client, "gone").token
        with connected(daemon, token=token) as client:
            put(client, "a")
        daemon.stop()
        daemon._settings["tenants"] = json.dumps([root])
        daemon.start()
        (warning,) = [line for line in status(daemon.session_socket).warnings if "gone" in line]
        assert "kvstorectl tenant rm gone" in warning
        with connected(daemon) as admin_client:
            call(admin_client, "REMOVE_TENANT", admin.RemoveTenantRequest(name="gone"), "RemoveTenantReply")
        until(lambda: not any(t.name == "gone" for t in status(daemon.session_socket).tenants))
        assert not any("gone" in line for line in status(daemon.session_socket).warnings)
        with connected(daemon) as admin_client, pytest.raises(KVStoredClientError, match="no tenant"):
            call(admin_client, "REMOVE_TENANT", admin.RemoveTenantRequest(name="gone"), "RemoveTenantReply")
