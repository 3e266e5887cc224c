"""Reads ahead of time and load or recompute, against a real daemon and a real file system."""

import asyncio
import itertools

import numpy as np
import pytest
from kvstored_client import AsyncClient, Client, NamespaceSpec
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1.kvstored_pb2 import OPERATION_FLUSH

from kvstored.testing.daemon_process import DaemonProcess
from tests.e2e.raw_client import eventually

BLOCK_BYTES = 64 << 10
BLOCKS = 64
_names = itertools.count()


@pytest.fixture(scope="module")
def daemon():
    settings = {
        "dram.capacity_bytes": "64MiB",
        "nvme.capacity_bytes": "512MiB",
        "nvme.extent_bytes": "32MiB",
        "prefetch.predict": "true",
        "prefetch.inflight_bytes": "1MiB",
    }
    with DaemonProcess(settings, nvme=True) as running:
        yield running


@pytest.fixture
def client(daemon):
    with Client(daemon.address, staging_bytes=16 << 20) as made:
        yield made


def sunk(client):
    """A namespace, and a chain in it that is on NVMe only: 96 MiB were put after it, into 64."""
    namespace = client.namespace(NamespaceSpec(model=f"prefetch {next(_names)}", block_tokens=16))
    hashes = namespace.chain(range(16 * BLOCKS))
    data = np.random.default_rng(1).integers(0, 255, BLOCKS * BLOCK_BYTES, np.uint8)
    assert client.put(namespace, hashes, data, wait_s=60.0, durability="nvme").durable == BLOCKS
    flood = namespace.chain(range(10**6, 10**6 + 16 * 1536))
    for start in range(0, 1536, 256):
        client.put(namespace, flood[start : start + 256], bytes(256 * BLOCK_BYTES), wait_s=60.0)
    eventually(lambda: client.lookup(namespace, hashes).nvme_blocks == BLOCKS, "the chain is below")
    request = admin.FlushRequest(wait_ms=60_000)  # so that all of the flood can make room at once
    assert client.call(OPERATION_FLUSH, request, admin.FlushReply, 90.0).left_blocks == 0
    return namespace, hashes, data


def counters(client):
    return client.status().counters


def test_a_lookup_estimates_what_it_finds_and_has_it_brought_up(client):
    namespace, hashes, data = sunk(client)
    slow = client.lookup(namespace, hashes, prefill_tokens_per_s=0.001)
    assert (slow.paying_blocks, slow.pays) == (BLOCKS, True)
    assert slow.recompute_s == pytest.approx(BLOCKS * 16 / 0.001)
    fast = client.lookup(namespace, hashes, prefill_tokens_per_s=1e12)
    assert (fast.paying_blocks, fast.pays) == (0, False)
    before = counters(client)["prefetch_lookup_bytes"]
    found = client.lookup(namespace, hashes, prefetch=True)
    assert found.queued_blocks == BLOCKS
    copy = np.zeros_like(data)
    assert client.get_into(namespace, hashes, copy, wait_s=60.0) == BLOCKS
    assert (copy == data).all()
    after = counters(client)
    assert after["prefetch_lookup_bytes"] - before == BLOCKS * BLOCK_BYTES
    ends = sum(after[f"prefetch_lookup_{end}_bytes"] for end in ("useful", "late"))
    assert ends >= BLOCKS * BLOCK_BYTES, "the get had them, or waited for them"
    costs = client.status().load_costs
    assert costs.copies > 0
    assert costs.reads > 0
    assert costs.read_bytes_per_s > 0


def test_the_asyncio_client_does_the_same(daemon, client):
    namespace, hashes, data = sunk(client)

    async def run():
        async with AsyncClient(daemon.address) as other:
            mine = other.namespace(namespace.spec, prefill_tokens_per_s=0.001, prefetch=True)
            found = await other.lookup(mine, hashes)
            assert (found.queued_blocks, found.paying_blocks) == (BLOCKS, BLOCKS)
            assert (await other.cancel_prefetch(found.prefetch_id)).done
            copy = np.zeros_like(data)
            assert await other.get_into(mine, hashes, copy, wait_s=60.0) == BLOCKS
            assert (copy == data).all()

    asyncio.run(run())
    assert client.stats.refused == 0


def test_a_prefetch_whose_client_leaves_holds_nothing(daemon, client):
    namespace, hashes, _ = sunk(client)
    with Client(daemon.address) as other:
        assert other.lookup(other.namespace(namespace.spec), hashes, prefetch=True).queued_blocks == BLOCKS
    eventually(lambda: not counters(client)["mover_queued"], "what was queued is gone or read")
    assert client.get_into(namespace, hashes, np.zeros(BLOCKS * BLOCK_BYTES, np.uint8), wait_s=60.0) == BLOCKS
