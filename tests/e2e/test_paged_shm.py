"""Paged transfers by `shm` against a real daemon: the contract, torch, asyncio, a lease of somebody else."""

import numpy as np
import pytest
from kvstored_client import AsyncClient, Client, NamespaceSpec, PagedKV

from kvstored.testing.async_bench import InLoop, LoopThread
from kvstored.testing.contract_layers import EarlyLayersContract, LayersContract
from kvstored.testing.contract_paged import SHAPES, PagedContract, Registered, arrays_of, hashes_of, stored
from kvstored.testing.daemon_process import DaemonProcess

SPEC = NamespaceSpec(model="paged", block_tokens=16)


@pytest.fixture(scope="module")
def daemon():
    with DaemonProcess({"dram.capacity_bytes": "256MiB"}) as running:
        yield running


@pytest.fixture
def client(daemon):
    with Client(daemon.address, staging_bytes=4 << 20) as made:
        yield made


@pytest.fixture
def namespace(client, request):
    return client.namespace(NamespaceSpec(model="paged", block_tokens=16, extra=request.node.nodeid))


class TestSharedMemory(PagedContract, LayersContract, EarlyLayersContract):
    @pytest.fixture
    def transfers(self, client, namespace):
        return lambda arrays, axis: Registered(client, namespace, [array.copy(order="K") for array in arrays], axis)


class TestSharedMemoryInALoop(PagedContract, LayersContract, EarlyLayersContract):
    """The same by `AsyncClient`."""

    @pytest.fixture
    def transfers(self, daemon, client, namespace):
        loop = LoopThread()
        mover = loop.client(daemon.address, staging_bytes=4 << 20)
        yield lambda arrays, axis: InLoop(
            loop, mover, client, namespace, [array.copy(order="K") for array in arrays], axis
        )
        loop.run(mover.close())
        loop.close()


def test_torch_tensors_of_a_type_that_numpy_does_not_know(client, namespace):
    torch = pytest.importorskip("torch")
    layers = [torch.randn(2, 12, 16, 2, 32).to(torch.bfloat16) for _ in range(2)]
    transfers, hashes = client.register(PagedKV(layers, 1)), hashes_of(1, 4)
    assert transfers.store(namespace, hashes, [1, 3, 5, 7]).stored == 4
    before = [layer.clone() for layer in layers]
    assert transfers.load(namespace, hashes, torch.tensor([0, 2, 4, 6])) == 4
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[:, [0, 2, 4, 6]], old[:, [1, 3, 5, 7]])
        assert torch.equal(layer[:, 7:], old[:, 7:])


def test_a_worker_loads_what_its_scheduler_took(daemon, namespace):
    with Client(daemon.address, create_group=True) as scheduler:
        arrays = arrays_of(SHAPES["mla"], 20)
        namespace = scheduler.namespace(SPEC)
        scheduler.register(PagedKV(arrays)).store(namespace, hashes_of(20, 6), range(6))
        with Client(daemon.address, join_group=scheduler.group_id) as worker:
            (lease_id,) = scheduler.get(namespace, hashes_of(20, 6)).hand_over()
            mine = [np.zeros_like(array) for array in arrays]
            with worker.attach(lease_id) as blocks:
                assert worker.register(PagedKV(mine)).load_held(blocks, range(10, 16)) == 6
            assert all((a[:6] == b[10:16]).all() for a, b in zip(arrays, mine, strict=True))


def test_blocks_of_another_size_are_an_error_of_the_caller(client, namespace):
    client.put(namespace, hashes_of(21, 1), [bytes(4096)])
    arrays = arrays_of(SHAPES["mla"], 21)
    with pytest.raises(ValueError, match="block 0 has 4096 bytes"):
        client.register(PagedKV(arrays)).load(namespace, hashes_of(21, 1), [0])


async def test_the_same_in_asyncio(daemon):
    arrays = arrays_of(SHAPES["kv first"], 22)
    async with AsyncClient(daemon.address) as client:
        namespace, transfers = client.namespace(SPEC), client.register(PagedKV(arrays, 1))
        assert (await transfers.store(namespace, hashes_of(22, 5), [4, 3, 2, 1, 0])).stored == 5
        assert await transfers.load(namespace, hashes_of(22, 5), range(10, 15)) == 5
        assert stored(arrays, 1, 10) == stored(arrays, 1, 4)
        await transfers.close()


def test_a_prefix_larger_than_the_ring_and_a_call(daemon):
    arrays = [np.random.default_rng(23).integers(0, 256, (2, 3000, 4096), np.uint8)]
    with Client(daemon.address, staging_bytes=1 << 20) as client:
        namespace, transfers = client.namespace(SPEC), client.register(PagedKV(arrays, 1))
        ids = np.random.default_rng(24).permutation(3000)[:2500]
        assert transfers.store(namespace, hashes_of(23, 2500), ids, wait_s=60.0).stored == 2500
        before = arrays[0].copy()
        assert transfers.load(namespace, hashes_of(23, 2500), ids[::-1]) == 2500
        assert (arrays[0][:, ids[::-1]] == before[:, ids]).all()
