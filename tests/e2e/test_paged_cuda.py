"""Paged transfers by the device worker, on the fake driver: the contract, and that the daemon never maps the driver."""

from pathlib import Path

import grpc
import numpy as np
import pytest
from kvstored_client import AsyncClient, Client, NamespaceSpec, PagedKV
from kvstored_client.device_verbs import DeviceMemory as Description
from kvstored_proto.v1 import kvstored_pb2 as pb
from kvstored_proto.v1 import kvstored_pb2_grpc

from kvstored.rpc.remote_sessions import SESSION_METADATA
from kvstored.testing.async_bench import InLoopOnDevice, LoopThread
from kvstored.testing.contract_layers import EarlyLayersContract, LayersContract
from kvstored.testing.contract_paged import (
    SHAPES,
    PagedContract,
    arrays_of,
    hashes_of,
    stored,
)
from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.device_arrays import Columns, DeviceArray, OnDevice, arrays_on
from tests import fakecuda

pytestmark = pytest.mark.skipif(bool(fakecuda.MISSING), reason=fakecuda.MISSING)


@pytest.fixture(scope="module", params=[12000, 12080, 13000])
def daemon(request, driver):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKECUDA_DRIVER", str(request.param))
        patch.setenv("FAKECUDA_STRICT", "1")
        with DaemonProcess({"dram.capacity_bytes": "256MiB"}) as running:
            yield running


@pytest.fixture
def client(daemon):
    with Client(daemon.address, staging_bytes=4 << 20) as made:
        yield made


class TestCudaIpc(PagedContract, LayersContract, EarlyLayersContract):
    @pytest.fixture
    def transfers(self, client, driver, request):
        namespace = client.namespace(NamespaceSpec(model="paged", block_tokens=16, extra=request.node.nodeid))
        made = []

        def make(arrays, axis):
            made.append(OnDevice(client, namespace, arrays_on(driver, arrays), axis))
            return made[-1]

        yield make
        for memory in made:
            assert memory.transfers.backend == "cuda_ipc"
            memory.close()


class TestCudaIpcInALoop(PagedContract, LayersContract, EarlyLayersContract):
    """The same by `AsyncClient`."""

    @pytest.fixture
    def transfers(self, daemon, client, driver, request):
        namespace = client.namespace(NamespaceSpec(model="paged", block_tokens=16, extra=request.node.nodeid))
        loop, made = LoopThread(), []
        mover = loop.client(daemon.address)

        def make(arrays, axis):
            made.append(InLoopOnDevice(loop, mover, client, namespace, arrays_on(driver, arrays), axis))
            return made[-1]

        yield make
        for memory in made:
            assert memory.transfers.backend == "cuda_ipc"
            memory.close()
        loop.run(mover.close())
        loop.close()


def test_the_daemon_never_maps_the_driver(client, daemon, driver):
    arrays = arrays_on(driver, arrays_of(SHAPES["mla"], 1))
    with client.register(PagedKV(arrays)) as transfers:
        assert transfers.ready(), transfers.reason
        maps = Path(f"/proc/{daemon.pid}/maps").read_text()
        assert "libcuda" not in maps
        assert "numpy" not in maps
        (worker,) = fakecuda.workers_of(daemon.pid)
        assert "libcuda" in Path(f"/proc/{worker}/maps").read_text(), "the test would see it"


async def test_the_same_in_asyncio(daemon, driver):
    arrays = arrays_on(driver, arrays_of(SHAPES["kv first"], 22))
    async with AsyncClient(daemon.address) as client:
        namespace, transfers = client.namespace(NamespaceSpec(model="aio")), client.register(PagedKV(arrays, 1))
        assert await transfers.ready(), transfers.reason
        assert (await transfers.store(namespace, hashes_of(22, 5), [4, 3, 2, 1, 0])).stored == 5
        assert await transfers.load(namespace, hashes_of(22, 5), range(10, 15)) == 5
        after = [array.read() for array in arrays]
        assert stored(after, 1, 10) == stored(after, 1, 4)
        loading = transfers.load(namespace, hashes_of(22, 5), range(15, 20), layers=(1, 2), deadline_s=20.0)
        assert await loading == 5
        layers = [array.read() for array in arrays]
        assert [bool((layer[:, 15] == layer[:, 4]).all()) for layer in layers] == [False, True, False]
        await transfers.close()


def test_the_same_over_grpc(daemon, driver):
    array = DeviceArray(driver, np.random.default_rng(6).integers(0, 256, (16, 4096), np.uint8))
    with grpc.insecure_channel(daemon.grpc_target) as channel:
        stub = kvstored_pb2_grpc.KVStoreStub(channel)
        opened = stub.OpenSession(pb.OpenSessionRequest(protocol_min=1, protocol_max=1, features=["gpu"]))
        assert "gpu" in opened.features
        session = {"metadata": [(SESSION_METADATA, opened.session_id)], "timeout": 30}
        namespace = stub.OpenNamespace(
            pb.OpenNamespaceRequest(spec=NamespaceSpec(model="grpc")), **session
        ).namespace_id
        layers = [Columns(array, columns) for columns in (slice(0, 1024), slice(1024, 4096))]
        made = stub.RegisterMemory(Description(PagedKV(layers)).description(), **session)
        assert made.registration_id, made.reason
        packed = {"registration_id": made.registration_id, "namespace_id": namespace, "hash_bytes": 16}
        packed["hashes"] = b"".join(hashes_of(40, 4))
        ids = [np.arange(first, first + 4, dtype="<u4").tobytes() for first in (0, 8)]
        stored = stub.Store(pb.StoreRequest(block_ids=ids[0], **packed), **session)
        assert (stored.outcomes, stored.written, stored.error) == (b"\1" * 4, b"\1" * 4, "")
        loaded = stub.Load(pb.LoadRequest(block_ids=ids[1], **packed), **session)
        assert (loaded.blocks, loaded.next, loaded.error) == (4, pb.OUTCOME_HIT, "")
        after = array.read()
        assert (after[8:12] == after[:4]).all()
        array.write(np.zeros((16, 4096), np.uint8))
        stub.Load(pb.LoadRequest(block_ids=ids[1], first_layer=1, deadline_ms=20000, **packed), **session)
        part = array.read()
        assert (part[8:12, 1024:] == after[8:12, 1024:]).all(), "from layer 1 on"
        assert not part[8:12, :1024].any()
        for layers in ((1, 2), (2, 0), (2, 1)):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Load(
                    pb.LoadRequest(block_ids=ids[1], first_layer=layers[0], layers=layers[1], **packed), **session
                )
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for wrong in (b"", b"abc", np.arange(13, 17, dtype="<u4").tobytes(), ids[0] + ids[0][:4]):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Load(pb.LoadRequest(block_ids=wrong, **packed), **session)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stub.UnregisterMemory(pb.UnregisterMemoryRequest(registration_id=made.registration_id), **session)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Load(pb.LoadRequest(block_ids=ids[1], **packed), **session)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    array.free()


def test_a_prefix_of_several_calls_and_pieces(client, driver):
    arrays = arrays_on(driver, [np.random.default_rng(23).integers(0, 256, (2, 10000, 2048), np.uint8)])
    namespace = client.namespace(NamespaceSpec(model="long"))
    with client.register(PagedKV(arrays, 1)) as transfers:
        ids = np.random.default_rng(24).permutation(10000)[:9000]
        assert transfers.store(namespace, hashes_of(23, 9000), ids, wait_s=60.0).stored == 9000, transfers.reason
        before = arrays[0].read().copy()
        assert transfers.load(namespace, hashes_of(23, 9000), ids[::-1], wait_s=60.0) == 9000, transfers.reason
        assert (arrays[0].read()[:, ids[::-1]] == before[:, ids]).all()
    arrays[0].free()


def test_a_prefix_that_dram_cannot_hold_is_loaded_from_nvme_in_one_call(driver):
    """150 MiB through 96 MiB of DRAM: pieces come up while others are copied, and go when they were."""
    blocks, size = 2400, 64 << 10
    array = DeviceArray(driver, np.random.default_rng(5).integers(0, 256, (blocks, size), np.uint8))
    before = array.read().copy()
    settings = {"dram.capacity_bytes": "96MiB", "nvme.capacity_bytes": "512MiB", "nvme.extent_bytes": "32MiB"}
    with (
        DaemonProcess(settings, nvme=True) as daemon,
        Client(daemon.address) as client,
    ):
        namespace, hashes = client.namespace(NamespaceSpec(model="nvme")), hashes_of(7, blocks)
        with client.register(PagedKV(array)) as transfers:
            for start in range(0, blocks, 400):
                chain = hashes[start : start + 400]
                parent = hashes[start - 1] if start else b""
                result = transfers.store(
                    namespace, chain, range(start, start + 400), parent, wait_s=60.0, durability="nvme"
                )
                assert (result.stored, result.durable) == (400, 400), (result, transfers.reason)
            array.write(np.zeros((blocks, size), np.uint8))
            assert transfers.load(namespace, hashes, range(blocks)[::-1], wait_s=60.0) == blocks, transfers.reason
            assert (array.read()[::-1] == before).all()
    array.free()
