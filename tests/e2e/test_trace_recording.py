"""A recording of a real daemon's traffic, simulated at the daemon's own size, gives the hits that the daemon had."""

import json
import random
import subprocess
import sys

import pytest
from kvstored_client import Client, NamespaceSpec

from kvstored.testing.daemon_process import DaemonProcess

BLOCK, BLOCKS, CHAINS, REQUESTS = 4096, 512, 30, 150


def ctl(daemon, *arguments):
    command = [sys.executable, "-c", "from kvstored_client.ctl import main; main()", "--address", daemon.address]
    command += ["--timeout", "60"]
    done = subprocess.run([*command, "-o", "json", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names(chain, count):
    return [f"{chain:06}-{place:06}".encode().ljust(32, b".") for place in range(count)]


def drive(client, rng):
    """Chains that grow, are got and put; returns blocks asked for and found."""
    namespace = client.namespace(NamespaceSpec(model="m", block_tokens=16))
    asked = found = 0
    for _ in range(REQUESTS):
        hashes = names(rng.randrange(CHAINS), rng.randrange(4, 60))
        with client.get(namespace, hashes) as blocks:
            hits = len(blocks)
        asked, found = asked + len(hashes), found + hits
        if hits < len(hashes) and rng.random() < 0.8:  # some only look
            parent = hashes[hits - 1] if hits else b""
            client.put(namespace, hashes[hits:], [bytes(BLOCK)] * (len(hashes) - hits), parent=parent)
    return asked, found


@pytest.mark.parametrize("eviction", ["shelf_life", "lru"])
def test_a_recorded_run_is_simulated_with_the_daemons_own_hits(tmp_path, eviction):
    settings = {
        "dram.capacity_bytes": str(BLOCK * BLOCKS),
        "policy.eviction": eviction,
        "server.trace_dir": str(tmp_path / "traces"),
        "server.state_dir": "/proc/kvstored",  # cannot be made, and is not needed for it
    }
    with DaemonProcess(settings) as daemon:
        path = ctl(daemon, "trace", "start")["path"]
        assert ctl(daemon, "trace", "status")["active"] is True
        with Client(daemon.address) as client:
            asked, found = drive(client, random.Random(5))
        ended = ctl(daemon, "trace", "stop")
        assert (ended["active"], ended["dropped_calls"], ended["path"]) == (False, 0, path)
        assert path.startswith(str(tmp_path / "traces"))
        simulated = ctl(daemon, "whatif", path, "--capacities", BLOCKS, "--policies", f"{eviction},opt")
    assert 0 < found < asked
    assert simulated["blocks"] == asked
    assert simulated["block_bytes"] == BLOCK
    assert simulated["recorded_hits"] == found
    run, ideal = simulated["runs"]
    assert run["hits"] == found
    assert ideal["hits"] > found
