"""`kvstorectl drain` and `put --durable` on a real daemon, and the daemon as the first process of a container."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from kvstored_client import Client, NamespaceSpec, Outcome

from kvstored.testing.daemon_process import DaemonProcess, status
from tests.e2e.raw_client import eventually

BLOCK_BYTES = 64 << 10
SPEC = NamespaceSpec(model="drained", block_tokens=1)
SETTINGS = {"dram.capacity_bytes": "64MiB", "nvme.capacity_bytes": "256MiB", "nvme.extent_bytes": "32MiB"}


def kvstorectl(daemon, *arguments):
    command = [sys.executable, "-c", "from kvstored_client.ctl import main; main()", *arguments]
    command += ["--address", daemon.address, "--timeout", "60", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)


def state_of(socket):
    """What the daemon says of itself, where it is there."""
    with contextlib.suppress(OSError):
        return status(socket).state


def test_after_a_drain_nothing_is_lost_with_the_daemons_memory(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        with Client(daemon.address) as client:
            namespace = client.namespace(SPEC)
            hashes = namespace.chain(range(200))
            data = np.random.default_rng(1).integers(0, 255, 200 * BLOCK_BYTES, np.uint8)
            assert client.put(namespace, hashes, data).stored == 200
            with client.get(namespace, hashes[:10]) as held:
                assert len(held) == 10
                code, said = kvstorectl(daemon, "drain", "--deadline", "1")
                assert (code, said["leases"], said["written_blocks"] + said["left_blocks"]) == (1, 1, 200)
            assert client.put(namespace, [b"x" * 32], [b"y" * 100]).outcomes == [Outcome.THROTTLED]
            left = said["left_blocks"]  # of a disk that does not write them in a second
            code, said = kvstorectl(daemon, "drain", "--deadline", "60")
            assert (code, said["state"], said["leases"]) == (0, "draining", 0)
            assert (said["written_blocks"], said["left_blocks"]) == (left, 0)
            code, said = kvstorectl(daemon, "drain", "--undo")
            assert (code, said["state"]) == (0, "serving")
            assert client.put(namespace, [b"x" * 32], [b"y" * 100]).stored == 1
        daemon.kill()
        daemon.start()
        with Client(daemon.address) as client:
            copy = np.zeros_like(data)
            assert client.get_into(client.namespace(SPEC), hashes, copy, wait_s=60.0) == 200
            assert (copy == data).all()


def test_a_file_put_with_durable_is_there_after_a_kill(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"durable" * 1000)
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as daemon:
        code, said = kvstorectl(daemon, "put", str(source), "-f", "model=m", "--durable")
        assert (code, said["stored"], said["durable"]) == (0, True, True)
        daemon.kill()
        daemon.start()
        code, _ = kvstorectl(daemon, "get", said["key"], str(target), "-f", "model=m")
        assert code == 0
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs to make a PID namespace")
def test_the_first_process_of_a_container_stops_on_sigterm(tmp_path):
    (tmp_path / "nvme").mkdir()
    socket = tmp_path / "session.sock"
    settings = {
        **SETTINGS,
        "server.session_socket": socket,
        "server.grpc_socket": tmp_path / "grpc.sock",
        "nvme.paths": json.dumps([str(tmp_path / "nvme")]),
        "metrics.enabled": "false",
    }
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "kvstored", "serve"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as container:
        try:
            eventually(lambda: state_of(socket) == "serving", "it serves")
            with open(f"/proc/{container.pid}/task/{container.pid}/children") as children:
                (first,) = children.read().split()
            os.kill(int(first), signal.SIGTERM)
            _, said = container.communicate(timeout=100)
        finally:
            container.kill()
    assert container.returncode == 0
    assert '"stopped"' in said
