"""The budget of writes and the account of wear, of a real daemon: what is shed, what goes on, what a kill leaves."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from kvstored_client import Client, NamespaceSpec

from kvstored.testing.daemon_process import DaemonProcess

BLOCK_BYTES = 64 << 10
MIB = 1 << 20
BUDGET_BYTES = 16 * MIB
SPEC = NamespaceSpec(model="wear", block_tokens=1)
SETTINGS = {
    "dram.capacity_bytes": "64MiB",
    "nvme.capacity_bytes": "256MiB",
    "nvme.extent_bytes": "32MiB",
    "nvme.write_budget_bytes_per_day": str(BUDGET_BYTES),
    "nvme.endurance_tbw": "[1]",
    "server.stop_flush_s": "0",
}


@pytest.fixture
def daemon(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as running:
        yield running


def open_client(daemon):
    return Client(daemon.address, staging_bytes=16 << 20)


def data_of(name, blocks):
    return np.random.default_rng(list(name.encode())).integers(0, 255, blocks * BLOCK_BYTES, np.uint8)


def wear(daemon):
    run = [sys.executable, "-c", "from kvstored_client.ctl import main; main()"]
    done = subprocess.run(
        [*run, "--address", daemon.address, "--timeout", "60", "wear", "-o", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    (path,) = json.loads(done.stdout)["paths"]
    return path


def put_all(client, namespace, hashes, data):
    result = client.put(namespace, hashes, data, wait_s=60.0)
    assert result.refused == 0


def test_over_budget_stores_are_shed_loads_go_on_and_the_account_outlasts_a_kill(daemon):
    began = time.gmtime().tm_yday
    with open_client(daemon) as client:
        namespace = client.namespace(SPEC)
        early, first = namespace.chain(range(40)), data_of("early", 40)
        put_all(client, namespace, early, first)
        for start in range(10_000, 90_000, 10_000):  # 128 MiB through a DRAM of 64
            put_all(client, namespace, namespace.chain(range(start, start + 256)), data_of(f"{start}", 256))
        counters = client.status().counters
        assert counters["shed_blocks"] > 500
        assert counters["evicted_lost_blocks"] >= counters["shed_blocks"]
        before = wear(daemon)
        assert BUDGET_BYTES // 4 < before["total_bytes"] < BUDGET_BYTES
        assert 0 < before["budget_left_bytes"] <= counters["nvme_write_budget_left_bytes"] + MIB
        assert before["endurance_bytes"] == 10**12
        # What was written before the budget ran short is still served.
        copy = np.zeros_like(first)
        assert client.get_into(namespace, early, copy, wait_s=60.0) == 40
        assert (copy == first).all()
        assert client.status().counters["promoted_blocks"] >= 40
        # A promise of durability is kept, whatever it costs.
        kept, durable = namespace.chain(range(5000, 5300)), data_of("durable", 300)
        assert client.put(namespace, kept, durable, durability="nvme", wait_s=60.0).durable == 300
        overdrawn = wear(daemon)
        assert overdrawn["budget_left_bytes"] < 0
        counters = client.status().counters
        assert (counters["nvme_write_budget_left_bytes"], counters["nvme_write_budget_overdrawn_bytes"] > 0) == (
            0,
            True,
        )
        written = before["total_bytes"] + 300 * BLOCK_BYTES
        assert overdrawn["total_bytes"] >= written
        assert overdrawn["today_bytes"] >= written or time.gmtime().tm_yday != began, "a day may have ended"
        daemon.kill()
    daemon.start()
    killed = wear(daemon)
    assert overdrawn["total_bytes"] <= killed["total_bytes"] <= overdrawn["total_bytes"] + 4 * MIB
    assert killed["budget_left_bytes"] < 0, "a restart refills nothing"
    with open_client(daemon) as client:
        copy = np.zeros_like(durable)
        assert client.get_into(client.namespace(SPEC), kept, copy, wait_s=60.0) == 300
        assert (copy == durable).all()
    daemon.restart()
    assert killed["total_bytes"] <= wear(daemon)["total_bytes"] <= killed["total_bytes"] + MIB
