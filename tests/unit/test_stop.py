"""The order of a stop: clients are served while what is only in DRAM is flushed; a second signal hurries."""

import asyncio
import signal
import subprocess
import sys

import pytest
from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.daemon.daemon import Daemon
from kvstored.store.outcomes import HIT, THROTTLED
from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import CallFailed, chain, hashes_of, open_namespace
from kvstored.testing.contract_transports import DirectClient, SocketClient, opening_request
from kvstored.testing.daemon_in_loop import config_in, eventually

SLOW_START = """
import sys, threading
from kvstored.tiers.nvme import NvmeTier
import asyncio

async def never(self):
    print("opening", flush=True)
    await asyncio.to_thread(threading.Event().wait)

NvmeTier.open = never
from kvstored.__main__ import main
main(sys.argv[1:])
"""
SIGNAL_DURING_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "kvstored.daemon.process":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder())
from kvstored.__main__ import main
main(sys.argv[1:])
"""


class Gate:
    """Holds every write to NVMe."""

    def __init__(self, tier):
        self._store = tier.store
        self.opened = asyncio.Event()
        self.writes = 0

    async def store(self, tenant, stores):
        self.writes += 1
        await self.opened.wait()
        return await self._store(tenant, stores)


@pytest.fixture
async def daemon(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstored.mover.flush_order.STEP_BLOCKS_MAX", 2)
    (tmp_path / "nvme").mkdir()
    daemon = Daemon(config_in(tmp_path, SETTINGS, nvme=True))
    await daemon.start()
    return daemon


async def client_of(daemon):
    return await SocketClient.connect(str(daemon.config.server.session_socket), opening_request("acme"))


async def test_clients_are_served_while_a_stop_flushes_and_puts_are_refused(daemon, monkeypatch):
    client = await client_of(daemon)
    namespace, blocks = await open_namespace(client), chain("flushed", 6)
    assert await client.put(namespace, blocks) == bytes([HIT] * 6)
    gate = Gate(daemon.context.store.parts.below.tier)
    monkeypatch.setattr(daemon.context.store.parts.below.tier, "store", gate.store)
    stopping = asyncio.create_task(daemon.stop())
    await eventually(lambda: gate.writes)
    assert await client.read(namespace, hashes_of(blocks)) == [b.data for b in blocks]
    assert set(await client.put(namespace, chain("late", 2))) == {THROTTLED}
    assert (await client.call("Status", pb.StatusRequest())).state == "stopping"
    with pytest.raises(OSError, match="No such file"):
        await client_of(daemon)
    root = await DirectClient.connect(daemon.context, opening_request("root"))
    with pytest.raises(CallFailed, match="stopping"):
        await root.call("Drain", admin_pb2.DrainRequest(resume=True))
    assert not stopping.done()
    gate.opened.set()
    await stopping
    assert gate.writes == 3
    assert daemon.context.store.parts.counters["demoted_blocks"] == 6
    await client.end()


async def test_asked_again_a_stop_ends_the_flush_after_the_write_under_way(daemon, monkeypatch):
    client = await client_of(daemon)
    assert await client.put(await open_namespace(client), chain("unflushed", 6)) == bytes([HIT] * 6)
    gate = Gate(daemon.context.store.parts.below.tier)
    monkeypatch.setattr(daemon.context.store.parts.below.tier, "store", gate.store)
    daemon.ask_to_stop()
    await daemon.wait()
    stopping = asyncio.create_task(daemon.stop())
    await eventually(lambda: gate.writes)
    daemon.ask_to_stop()
    gate.opened.set()
    await stopping
    assert gate.writes == 1
    await client.end()


async def test_without_time_for_it_a_stop_flushes_nothing(tmp_path):
    (tmp_path / "nvme").mkdir()
    daemon = Daemon(config_in(tmp_path, {**SETTINGS, "server": {"stop_flush_s": 0}}, nvme=True))
    await daemon.start()
    client = await client_of(daemon)
    await client.put(await open_namespace(client), chain("unflushed", 6))
    await daemon.stop()
    assert not daemon.context.store.parts.counters["demoted_blocks"]
    await client.end()


# ---- signals before it serves ----


def run_script(script, directory):
    (directory / "nvme").mkdir()
    settings = {
        "server.session_socket": directory / "session.sock",
        "server.grpc_socket": directory / "grpc.sock",
        "server.state_dir": directory / "state",
        "dram.capacity_bytes": "8MiB",
        "nvme.paths": f'["{directory}/nvme"]',
        "metrics.enabled": "false",
    }
    command = [sys.executable, "-c", script, "serve"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_signal_while_the_tiers_open_ends_the_daemon_at_once_and_in_order(tmp_path):
    with run_script(SLOW_START, tmp_path) as process:
        try:
            assert process.stdout.readline() == "opening\n"
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == 0
    assert '"stopped"' in said
    assert "Traceback" not in said
    assert not (tmp_path / "session.sock").exists()


def test_a_signal_before_the_daemon_listens_to_signals_is_an_orderly_end_too(tmp_path):
    with run_script(SIGNAL_DURING_IMPORT, tmp_path) as process:
        _, said = process.communicate(timeout=90)
    assert (process.returncode, said) == (0, "")
