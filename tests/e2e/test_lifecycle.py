"""Start, stop, restart: blocks survive, sockets are taken over with care, a full disk is survived."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import pytest
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.daemon_process import DaemonFailed, DaemonProcess, status
from tests.e2e.checks import BLOCK_BYTES, Bystander, fill, tier
from tests.e2e.raw_client import HIT, RESERVED, THROTTLED, RawClient, eventually, hashes_of, payload

MIB = 1 << 20
DRAM_BYTES = 32 * MIB
SETTINGS = {
    "dram.capacity_bytes": str(DRAM_BYTES),
    "dram.segment_bytes": str(4 * MIB),
    "nvme.capacity_bytes": str(256 * MIB),
    "nvme.extent_bytes": str(32 * MIB),
}

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs to mount a file system")


def client_of(daemon):
    return RawClient(daemon.session_socket, staging_bytes=2 * MIB)


def keys(namespace, hashes):
    return {"namespace_ids": [namespace], "hashes": b"".join(hashes), "hash_bytes": len(hashes[0])}


def start_another(daemon, **settings):
    """Run a second daemon on the first one's sockets and files until it ends: exit status and what it wrote."""
    command = [sys.executable, "-m", "kvstored", "serve"]
    own = {
        **SETTINGS,
        "server.session_socket": str(daemon.session_socket),
        "server.grpc_socket": str(daemon.grpc_socket),
        "nvme.paths": json.dumps([str(daemon.nvme_path)]),
        "metrics.enabled": "false",
        **settings,
    }
    for key, value in own.items():
        command += ["--set", f"{key}={value}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.returncode, ended.stdout + ended.stderr


def test_blocks_survive_an_orderly_restart_with_clients_connected(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        first = client_of(daemon)
        namespace = first.namespace()
        chains = fill(first, namespace, "kept", 8 * MIB)
        held = first.get(namespace, chains[0][0])
        assert held.blocks == 16
        boot_id = first.opened.boot_id
        daemon.restart()  # raises unless it exits with 0
        assert not first.drain_quietly()
        first.close()
        with client_of(daemon) as second:
            assert second.opened.boot_id != boot_id
            namespace = second.namespace()
            for hashes, _ in chains:
                assert second.lookup(namespace, hashes).nvme_blocks == len(hashes)
                assert second.read(namespace, hashes, wait_s=60) == [payload(h, BLOCK_BYTES) for h in hashes]


def test_blocks_survive_again_and_again(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        chains = []
        for number in range(3):
            with client_of(daemon) as client:
                namespace = client.namespace()
                chains += fill(client, namespace, f"life {number}", 4 * MIB)
                for hashes, _ in chains:
                    assert client.read(namespace, hashes, wait_s=60) == [payload(h, BLOCK_BYTES) for h in hashes]
            daemon.restart()


def test_a_stop_during_work_ends_in_order(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        with client_of(daemon) as client:
            namespace = client.namespace()
            fill(client, namespace, "before", 2 * DRAM_BYTES)
            hashes = hashes_of("under way", 64)
            reserved = client.reserve(namespace, hashes, BLOCK_BYTES, wait_s=5)
            assert reserved.reservation_id
            indices = [i for i, outcome in enumerate(reserved.outcomes) if outcome == RESERVED]
            commit = pb.CommitRequest(
                reservation_id=reserved.reservation_id, indices=indices, staging_offsets=[0] * len(indices)
            )
            client.send(pb.OPERATION_COMMIT, commit)
            client.send(pb.OPERATION_GET, pb.GetRequest(**keys(namespace, hashes), wait_ms=20_000))
            client.send(pb.OPERATION_PREFETCH, pb.PrefetchRequest(**keys(namespace, hashes_of("before 0", 16))))
            daemon.stop()
        assert '"stopped"' in daemon.log_tail()
        assert "Traceback" not in daemon.log_tail()
        assert not daemon.session_socket.exists()
        assert not daemon.grpc_socket.exists()


def test_a_second_signal_ends_the_flush_sooner(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        with client_of(daemon) as client:
            fill(client, client.namespace(), "unflushed", DRAM_BYTES // 2)
        os.kill(daemon.pid, signal.SIGTERM)
        os.kill(daemon.pid, signal.SIGTERM)
        daemon.stop()  # a third one, and exit status 0 all the same
        assert '"stopped"' in daemon.log_tail()
        daemon.start()  # what was not flushed is missing, nothing is wrong
        with client_of(daemon) as client:
            namespace = client.namespace()
            for number in range(8):
                hashes = hashes_of(f"unflushed {number}", 16)
                found = client.read(namespace, hashes, wait_s=60)
                assert found == [payload(h, BLOCK_BYTES) for h in hashes[: len(found)]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_signals_to_its_very_end_change_nothing_about_how_it_ends(tmp_path, number, request):
    # Whoever runs the tests under nohup ignores SIGHUP, and so would the daemon.
    request.addfinalizer(partial(signal.signal, number, signal.signal(number, signal.SIG_DFL)))
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        process = daemon._process
        while process.poll() is None:
            process.send_signal(number)
            time.sleep(0.001)  # it has a turn between two
        assert process.returncode == 0
        assert '"stopped"' in daemon.log_tail()
        daemon.kill()


def test_a_hang_up_that_is_ignored_when_it_starts_stays_so(tmp_path):
    with DaemonProcess(SETTINGS, parent_directory=tmp_path) as daemon:
        daemon.stop()
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        try:
            daemon.start()
        finally:
            signal.signal(signal.SIGHUP, before)
        os.kill(daemon.pid, signal.SIGHUP)
        with client_of(daemon) as client:
            assert client.namespace()
        daemon.stop()


def test_a_second_daemon_on_the_same_sockets_is_refused_and_the_first_goes_on(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        other_nvme = tmp_path / "other"
        other_nvme.mkdir()
        with Bystander(daemon.session_socket):
            # More memory than there is beside the first: that is not what is wrong.
            more = {"nvme.paths": json.dumps([str(other_nvme)]), "dram.capacity_bytes": "4TiB"}
            more["dram.segment_bytes"] = "0"
            code, said = start_another(daemon, **more)
        assert code == 1
        assert "another process serves" in said
        assert status(daemon.session_socket).pid == daemon.pid
        assert daemon.grpc_socket.exists(), "the one that was refused took nothing away"
        with socket.socket(socket.AF_UNIX) as grpc:
            grpc.connect(str(daemon.grpc_socket))


def test_a_second_daemon_on_the_same_nvme_path_is_refused(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        with client_of(daemon) as client:
            chains = fill(client, client.namespace(), "mine", 4 * MIB)
        sockets = {"server.session_socket": str(tmp_path / "s"), "server.grpc_socket": str(tmp_path / "g")}
        code, said = start_another(daemon, **sockets)
        assert code == 78
        assert str(daemon.nvme_path) in said
        daemon.restart()
        with client_of(daemon) as client:
            namespace = client.namespace()
            for hashes, _ in chains:
                assert client.read(namespace, hashes, wait_s=60) == [payload(h, BLOCK_BYTES) for h in hashes]


def test_a_socket_that_a_dead_daemon_left_is_replaced(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        daemon.kill()
        assert daemon.session_socket.exists()
        daemon.start()
        assert status(daemon.session_socket).state == "serving"


def test_what_is_no_socket_is_not_replaced(tmp_path):
    daemon = DaemonProcess(SETTINGS, parent_directory=tmp_path)
    daemon.session_socket.write_text("somebody's file")
    with pytest.raises(DaemonFailed, match="not a socket"):
        daemon.start()
    assert daemon.session_socket.read_text() == "somebody's file"
    daemon.wipe()


def test_after_a_kill_no_block_is_wrong(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        with client_of(daemon) as client:
            namespace = client.namespace()
            kept = fill(client, namespace, "flushed", 8 * MIB)
            client.flush()
            fill(client, namespace, "unflushed", 8 * MIB)
        daemon.kill()
        daemon.start()
        with client_of(daemon) as client:
            namespace = client.namespace()
            for hashes, _ in kept:
                assert client.read(namespace, hashes, wait_s=60) == [payload(h, BLOCK_BYTES) for h in hashes]


@contextlib.contextmanager
def small_file_system(path, size_bytes):
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@as_root
def test_a_full_disk_is_survived_and_told(tmp_path):
    with small_file_system(tmp_path / "disk", 80 * MIB) as disk:
        settings = {**SETTINGS, "nvme.paths": json.dumps([str(disk)])}
        with DaemonProcess(settings, parent_directory=tmp_path) as daemon:
            with client_of(daemon) as client, Bystander(daemon.session_socket):
                namespace = client.namespace()
                done = fill(client, namespace, "too much", 256 * MIB, wait_s=5)
                assert {o for _, outcomes in done for o in outcomes} <= {HIT, THROTTLED}
                newest = [hashes for hashes, outcomes in done[-8:] if set(outcomes) == {HIT}]
                assert newest, "the daemon goes on with what it has"
                for hashes in newest:
                    assert client.read(namespace, hashes, wait_s=60) == [payload(h, BLOCK_BYTES) for h in hashes]
                reply = client.status()
                nvme = tier(reply, "nvme")
                assert reply.counters["nvme_no_space"] or nvme.health != "ok", dict(reply.counters)
                assert nvme.used_bytes <= 80 * MIB
            assert "Traceback" not in daemon.log_tail()


@as_root
def test_a_disk_without_room_for_anything_leaves_dram(tmp_path):
    with small_file_system(tmp_path / "disk", 2 * MIB) as disk:
        settings = {**SETTINGS, "nvme.paths": json.dumps([str(disk)])}
        with DaemonProcess(settings, parent_directory=tmp_path) as daemon, client_of(daemon) as client:
            namespace = client.namespace()
            done = fill(client, namespace, "dram only", 2 * DRAM_BYTES, wait_s=5)
            assert {o for _, outcomes in done for o in outcomes} <= {HIT, THROTTLED}
            hashes = done[-1][0]
            assert client.read(namespace, hashes, wait_s=60) == [payload(h, BLOCK_BYTES) for h in hashes]
            eventually(lambda: status(daemon.session_socket).state == "serving", "it serves")


def test_a_service_manager_hears_when_it_serves_and_when_it_stops(tmp_path, monkeypatch):
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(address))
        with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
            heard = iter(lambda: manager.recv(4096), b"")
            assert b"STATUS=" in next(heard)
            assert any(message.startswith(b"READY=1\n") for message in heard)  # after it tried to have memory kept
            daemon.stop()
            assert any(message.startswith(b"STOPPING=1\n") for message in heard)
