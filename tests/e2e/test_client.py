"""The client against a real daemon: what the fake one of the unit tests cannot show."""

import asyncio
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from kvstored_client import AsyncClient, Client, NamespaceSpec, Outcome

from kvstored.testing.daemon_process import DaemonProcess
from tests.e2e.raw_client import eventually

BLOCK_BYTES = 64 << 10
SPEC = NamespaceSpec(model="e2e", block_tokens=16)
PATIENT = {"timeout_s": 60.0, "connect_timeout_s": 60.0}  # of clients in other processes


@pytest.fixture(scope="module")
def daemon():
    settings = {"dram.capacity_bytes": "128MiB", "nvme.capacity_bytes": "512MiB", "nvme.extent_bytes": "32MiB"}
    with DaemonProcess(settings, nvme=True) as running:
        yield running


@pytest.fixture
def client(daemon):
    with Client(daemon.address, staging_bytes=16 << 20) as made:
        yield made


def chain_of(namespace, name, blocks):
    """Hashes and bytes of a chain that no other test uses."""
    seed = xxhash.xxh32_intdigest(name.encode())
    hashes = namespace.chain(range(seed, seed + 16 * blocks))
    data = np.random.default_rng(seed).integers(0, 255, blocks * BLOCK_BYTES, np.uint8)
    return hashes, data


def nothing_is_held(client):
    status = client.status()
    return all(not s.leases and not s.reservations for s in status.sessions)


def test_bytes_come_back_as_they_were_put_and_with_their_content_hash(client):
    namespace = client.namespace(SPEC)
    hashes, data = chain_of(namespace, "round trip", 200)
    assert client.put(namespace, hashes, data, wait_s=60.0).stored == 200
    copy = np.zeros_like(data)
    assert client.get_into(namespace, hashes, copy) == 200
    assert (copy == data).all()
    with client.get(namespace, hashes) as blocks:
        assert blocks.content_hashes == [xxhash.xxh3_128_digest(block) for block in blocks]
    eventually(lambda: nothing_is_held(client), "the leases are given back")


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 100_000])
def test_sizes_that_are_no_whole_pages_keep_every_byte(client, size):
    namespace = client.namespace(NamespaceSpec(model=f"size {size}", block_tokens=1))
    hashes = namespace.chain(range(5))
    blocks = [bytes([65 + i]) * size for i in range(5)]
    assert client.put(namespace, hashes, blocks, wait_s=60.0).stored == 5
    buffers = [bytearray(size) for _ in range(5)]
    assert client.get_into(namespace, hashes, buffers) == 5
    assert [bytes(b) for b in buffers] == blocks


def test_what_does_not_fit_in_dram_is_read_back_from_nvme(client):
    namespace = client.namespace(NamespaceSpec(model="large", block_tokens=16))
    hashes, data = chain_of(namespace, "large", 3200)  # 200 MiB through 128
    assert client.put(namespace, hashes, data, wait_s=60.0).stored == 3200
    assert client.lookup(namespace, hashes).prefix_blocks == 3200
    assert client.lookup(namespace, hashes[:100]).nvme_blocks > 0
    for start in range(0, 3200, 400):
        end = start + 400
        copy = np.zeros(400 * BLOCK_BYTES, np.uint8)
        got = client.get_into(namespace, hashes[start:end], copy, wait_s=60.0)
        assert got == 400
        assert (copy == data[start * BLOCK_BYTES : end * BLOCK_BYTES]).all()


def test_a_prefetch_brings_blocks_up(client):
    namespace = client.namespace(NamespaceSpec(model="large", block_tokens=16))
    hashes, _ = chain_of(namespace, "large", 3200)
    prefetch = client.prefetch(namespace, hashes[:300])
    assert prefetch.outcome in (Outcome.HIT, Outcome.PENDING)
    done = prefetch.wait(60.0)
    assert done.done
    assert done.failed_blocks == 0
    assert client.lookup(namespace, hashes[:300]).dram_blocks == 300


def test_shards_are_looked_up_and_read_together(client):
    shards = [client.namespace(NamespaceSpec(model="tp", block_tokens=16, tp_rank=r, tp_size=2)) for r in range(2)]
    assert shards[0].chain_seed == shards[1].chain_seed
    assert shards[0].digest != shards[1].digest
    hashes, data = chain_of(shards[0], "shards", 8)
    client.put(shards[0], hashes, data, wait_s=60.0)
    client.put(shards[1], hashes[:5], data[: 5 * BLOCK_BYTES][::-1].copy(), wait_s=60.0)
    assert client.lookup(shards, hashes).prefix_blocks == 5
    targets = [np.zeros(8 * BLOCK_BYTES, np.uint8) for _ in range(2)]
    assert client.get_into(shards, hashes, targets) == 5
    end = 5 * BLOCK_BYTES
    assert (targets[0][:end] == data[:end]).all()
    assert (targets[1][:end] == data[:end][::-1]).all()


def test_a_worker_uses_and_releases_what_its_scheduler_held(daemon, client):
    with (
        Client(daemon.address, create_group=True, name="scheduler") as scheduler,
        Client(daemon.address, join_group=scheduler.group_id, name="worker") as worker,
    ):
        namespace = scheduler.namespace(SPEC)
        hashes, data = chain_of(namespace, "group", 4)
        scheduler.put(namespace, hashes, data, wait_s=60.0)
        (lease_id,) = scheduler.get(namespace, hashes).hand_over()
        with worker.attach(lease_id) as blocks:
            assert b"".join(blocks) == data.tobytes()
            assert not nothing_is_held(client)
        eventually(lambda: nothing_is_held(client), "the worker's release ends the hold")
        assert len(worker.attach(lease_id)) == 0


def test_staged_blocks_are_stored_or_undone(client):
    namespace = client.namespace(SPEC)
    hashes, data = chain_of(namespace, "staged", 6)
    with client.stage(namespace, hashes, BLOCK_BYTES, wait_s=60.0):
        assert client.contains(namespace, hashes) == [Outcome.PENDING] * 6
    eventually(lambda: client.contains(namespace, hashes) == [Outcome.MISS] * 6, "what was left is undone")
    with client.stage(namespace, hashes, BLOCK_BYTES, wait_s=60.0) as staged:
        for i, view in enumerate(staged.views):
            view[:] = data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES].tobytes()
        assert staged.commit().stored == 6
    copy = np.zeros_like(data)
    assert client.get_into(namespace, hashes, copy) == 6
    assert (copy == data).all()


def test_threads_put_and_get_at_the_same_time(client):
    namespace = client.namespace(SPEC)

    def work(n):
        hashes, data = chain_of(namespace, f"thread {n}", 40)
        for _ in range(3):
            assert client.put(namespace, hashes, data, wait_s=60.0).refused == 0
            copy = np.zeros_like(data)
            assert client.get_into(namespace, hashes, copy, wait_s=60.0) == 40
            assert (copy == data).all()
            assert client.delete(namespace, hashes) == 40

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert client.stats.misses_unavailable == 0
    eventually(lambda: nothing_is_held(client), "nothing is left held")
    ring = client._core.connection.staging
    assert ring.free_bytes == ring.size_bytes


def _read_elsewhere(address, answers):
    with Client(address, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        hashes, data = chain_of(namespace, "elsewhere", 10)
        copy = np.zeros_like(data)
        answers.put((client.get_into(namespace, hashes, copy), bool((copy == data).all())))


def test_another_process_reads_what_this_one_put(daemon, client):
    namespace = client.namespace(SPEC)
    hashes, data = chain_of(namespace, "elsewhere", 10)
    client.put(namespace, hashes, data, wait_s=60.0)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=_read_elsewhere, args=(daemon.address, answers))
    process.start()
    assert answers.get(timeout=100) == (10, True)
    process.join(30)


async def test_the_asyncio_client_does_the_same(daemon):
    async with AsyncClient(daemon.address) as client:
        namespace = client.namespace(SPEC)
        await client.open(namespace)
        chains = [chain_of(namespace, f"task {n}", 30) for n in range(4)]

        async def work(hashes, data):
            assert (await client.put(namespace, hashes, data, wait_s=60.0)).stored == 30
            copy = np.zeros_like(data)
            assert await client.get_into(namespace, hashes, copy, wait_s=60.0) == 30
            return bool((copy == data).all())

        assert all(await asyncio.gather(*(work(*chain) for chain in chains)))


def test_clients_live_through_a_restart_of_the_daemon(tmp_path):
    with (
        DaemonProcess({"dram.capacity_bytes": "64MiB"}, parent_directory=tmp_path) as daemon,
        Client(daemon.address) as client,
    ):
        namespace = client.namespace(SPEC)
        hashes, data = chain_of(namespace, "restart", 4)
        assert client.put(namespace, hashes, data).stored == 4
        first_boot = client.boot_id
        blocks = client.get(namespace, hashes)
        daemon.kill()
        assert not blocks.valid()
        assert client.get_into(namespace, hashes, np.zeros_like(data)) == 0
        assert client.put(namespace, hashes, data).refused == 4
        daemon.start()
        eventually(lambda: client.status() is not None, "the client connects again")
        assert client.boot_id != first_boot
        client.put(namespace, hashes, data)
        copy = np.zeros_like(data)
        assert client.get_into(namespace, hashes, copy) == 4
        assert (copy == data).all()
        blocks.release()
