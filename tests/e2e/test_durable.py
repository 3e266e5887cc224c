"""Durable puts of the client: what was acknowledged is there after SIGKILL, byte for byte."""

import asyncio

import numpy as np
import pytest
from kvstored_client import AsyncClient, Client, NamespaceSpec, Outcome

from kvstored.testing.daemon_process import DaemonProcess

BLOCK_BYTES = 64 << 10
SPEC = NamespaceSpec(model="durable", block_tokens=1)
SETTINGS = {
    "dram.capacity_bytes": "64MiB",
    "nvme.capacity_bytes": "256MiB",
    "nvme.extent_bytes": "32MiB",
    "mover.high_watermark": "0.99",
}


def open_client(daemon):
    return Client(daemon.address, staging_bytes=16 << 20)


def data_of(name, blocks):
    return np.random.default_rng(list(name.encode())).integers(0, 255, blocks * BLOCK_BYTES, np.uint8)


def check_there(client, namespace, hashes, data):
    copy = np.zeros_like(data)
    assert client.get_into(namespace, hashes, copy, wait_s=60.0) == len(hashes)
    assert (copy == data).all()


def nvme_tenant(client):
    status = client.status()
    (tenant,) = status.tenants
    (tier,) = [tier for tier in status.tiers if tier.name == "nvme"]
    return tenant.name, tenant.nvme_bytes, tenant.nvme_blocks, tier.used_bytes, tier.blocks


@pytest.fixture
def daemon(tmp_path):
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=tmp_path) as running:
        yield running


def test_what_was_acknowledged_as_durable_is_there_after_a_kill(daemon):
    with open_client(daemon) as client:
        namespace = client.namespace(SPEC)
        hashes, data = namespace.chain(range(300)), data_of("kill", 300)
        result = client.put(namespace, hashes, data, durability="nvme")
        daemon.kill()  # at once
        assert (result.stored, result.durable, result.refused) == (300, 300, 0)
    daemon.start()
    with open_client(daemon) as client:
        check_there(client, client.namespace(SPEC), hashes, data)


def test_the_durability_of_a_namespace_holds_for_its_puts_and_a_put_in_memory_promises_nothing(daemon):
    with open_client(daemon) as client:
        durable, plain = client.namespace(SPEC, durability="nvme"), client.namespace(SPEC)
        kept, data = durable.chain(range(40)), data_of("kept", 40)
        staged_hashes, other = durable.chain(range(1000, 1008)), data_of("staged", 8)
        loose = plain.chain(range(2000, 2040))
        assert client.put(durable, kept[:20], data[: 20 * BLOCK_BYTES]).durable == 20
        assert client.put(plain, kept, data, durability="nvme").durable == 40, "also what was there already"
        with client.stage(durable, staged_hashes, BLOCK_BYTES) as staged:
            for view, block in zip(staged.views, other.reshape(8, -1), strict=True):
                view[:] = block.tobytes()
            assert staged.commit().durable == 8
        assert client.put(durable, loose, data, durability="memory").durable == 0
        assert client.put(plain, loose, data).durable == 0
    daemon.kill()
    daemon.start()
    with open_client(daemon) as client:
        namespace = client.namespace(SPEC)
        check_there(client, namespace, kept, data)
        check_there(client, namespace, staged_hashes, other)
        assert client.lookup(namespace, loose).prefix_blocks == 0, "none of it was on NVMe, and none is half there"


def test_a_put_of_many_blocks_costs_few_writes(daemon):
    with open_client(daemon) as client:
        namespace = client.namespace(SPEC)
        hashes, data = namespace.chain(range(800)), data_of("many", 800)
        assert client.put(namespace, hashes, data, durability="nvme", wait_s=60.0).durable == 800
        counters = client.status().counters
        assert counters["durable_blocks"] == 800
        # 50 MiB in commits of a quarter of the staging, 4 MiB: those that wait together go together. Without that they
        # were 13.
        assert counters["durable_batches"] < 13


def test_the_asyncio_client_puts_durably_too(daemon):
    async def put():
        async with AsyncClient(daemon.address) as client:
            namespace = client.namespace(SPEC, durability="nvme")
            assert await client.open(namespace)
            hashes = namespace.chain(range(40))
            assert (await client.put(namespace, hashes, data)).durable == 40
            assert (await client.put(client.namespace(SPEC), hashes, data, durability="nvme")).durable == 40
            return hashes

    data = data_of("asyncio", 40)
    hashes = asyncio.run(put())
    daemon.kill()
    daemon.start()
    with open_client(daemon) as client:
        check_there(client, client.namespace(SPEC), hashes, data)


def test_the_account_is_right_at_once_after_a_kill(daemon):
    with open_client(daemon) as client:
        namespace = client.namespace(SPEC)
        for size, name in ((BLOCK_BYTES, "large"), (5000, "small")):
            hashes = client.namespace(SPEC).chain(range(size, size + 100))
            client.put(namespace, hashes, data_of(name, 100)[: 100 * size], durability="nvme")
        client.delete(namespace, hashes[:10])
        before = nvme_tenant(client)
        assert before[2] == 190
    daemon.kill()
    daemon.start()
    with open_client(daemon) as client:
        assert nvme_tenant(client) == before


def test_without_nvme_a_durable_put_stores_nothing_and_says_why(tmp_path, caplog):
    settings = {"dram.capacity_bytes": "64MiB"}
    with DaemonProcess(settings, parent_directory=tmp_path) as daemon, open_client(daemon) as client:
        for namespace, durability in (
            (client.namespace(SPEC), "nvme"),
            (client.namespace(SPEC, durability="nvme"), None),
        ):
            result = client.put(namespace, [b"x" * 32], [b"y" * 100], durability=durability)
            assert (result.refused, result.durable, result.outcomes) == (1, 0, [Outcome.MISS])
        assert client.stats.refused == 2
        assert "nvme.paths" in caplog.text
        assert client.put(client.namespace(SPEC), [b"x" * 32], [b"y" * 100]).stored == 1


def test_an_unknown_durability_is_a_programmers_error(daemon):
    with open_client(daemon) as client:
        with pytest.raises(ValueError, match="memory, nvme"):
            client.namespace(SPEC, durability="disk")
        with pytest.raises(ValueError, match="memory, nvme"):
            client.put(client.namespace(SPEC), [b"x" * 32], [b"y"], durability="disk")
