"""Where the daemon cannot open a GPU's memory the engine copies, by the same calls, and it is said why: on the fake."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from kvstored_client import AsyncClient, Client, NamespaceSpec, Outcome, PagedKV

from kvstored.testing.async_bench import InLoopOnDevice, LoopThread
from kvstored.testing.contract_layers import EarlyLayersContract, LayersContract
from kvstored.testing.contract_paged import SHAPES, PagedContract, arrays_of, hashes_of, stored
from kvstored.testing.daemon_process import DaemonProcess, status
from kvstored.testing.device_arrays import DeviceArray, OnDevice, arrays_on
from tests import fakecuda
from tests.e2e.raw_client import eventually

pytestmark = pytest.mark.skipif(bool(fakecuda.MISSING), reason=fakecuda.MISSING)
SETTINGS = {"dram.capacity_bytes": "128MiB"}


@pytest.fixture(scope="module")
def without_driver(driver):
    """A daemon that finds no driver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORED_LIBCUDA", "libcuda-of-nowhere.so.1")
        daemon = DaemonProcess(SETTINGS)
        daemon.start()
    yield daemon
    daemon.stop()
    daemon.wipe()


@pytest.fixture(scope="module")
def daemon(driver):
    with DaemonProcess(SETTINGS) as running:
        yield running


class TestShmOfAGpu(PagedContract, LayersContract, EarlyLayersContract):
    """The contract with tensors of a GPU that the client copies."""

    @pytest.fixture
    def transfers(self, without_driver, driver, request):
        with Client(without_driver.address, staging_bytes=4 << 20) as client:
            namespace = client.namespace(NamespaceSpec(model="paged", block_tokens=16, extra=request.node.nodeid))
            made = []

            def make(arrays, axis):
                made.append(OnDevice(client, namespace, arrays_on(driver, arrays), axis))
                assert made[-1].transfers.ready()
                assert made[-1].transfers.backend == "shm"
                assert "cannot be loaded" in made[-1].transfers.reason
                return made[-1]

            yield make
            for memory in made:
                memory.close()


class TestShmOfAGpuInALoop(PagedContract, LayersContract, EarlyLayersContract):
    """The same by `AsyncClient`."""

    @pytest.fixture
    def transfers(self, without_driver, driver, request):
        loop, made = LoopThread(), []
        mover = loop.client(without_driver.address, staging_bytes=4 << 20)
        with Client(without_driver.address) as client:
            namespace = client.namespace(NamespaceSpec(model="paged", block_tokens=16, extra=request.node.nodeid))

            def make(arrays, axis):
                made.append(InLoopOnDevice(loop, mover, client, namespace, arrays_on(driver, arrays), axis))
                assert made[-1].transfers.ready()
                assert made[-1].transfers.backend == "shm"
                return made[-1]

            yield make
            for memory in made:
                memory.close()
        loop.run(mover.close())
        loop.close()


ENGINE = """
import json, sys, numpy as np
from kvstored.device.cuda import Driver
from kvstored.testing.contract_paged import hashes_of
from kvstored.testing.device_arrays import DeviceArray
from kvstored_client import Client, NamespaceSpec, PagedKV
driver = Driver(); driver.bind(driver.context(0))
before = np.random.default_rng(1).integers(0, 256, (2, 16, 4096), np.uint8)
array = DeviceArray(driver, before)
with Client(sys.argv[1], timeout_s=60, connect_timeout_s=60, staging_bytes=2 << 20) as client:
    namespace, transfers = client.namespace(NamespaceSpec(model=sys.argv[2])), client.register(PagedKV([array], 1))
    hashes = hashes_of(1, 4)
    stored = transfers.store(namespace, hashes, [3, 1, 0, 2]).stored
    loaded = transfers.load(namespace, hashes, [8, 15, 9, 10])
    right = bool((array.read()[:, [8, 15, 9, 10]] == before[:, [3, 1, 0, 2]]).all())
    print(json.dumps([stored, loaded, right, transfers.backend, transfers.reason, dict(client.status().gpus)]))
"""


def engine(daemon, model, **settings):
    """What an engine of its own sees, whose driver has these settings."""
    env = {**os.environ, **{f"FAKECUDA_{name}": str(value) for name, value in settings.items()}}
    command = [sys.executable, "-c", ENGINE, daemon.address, model]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("the engine copies" in done.stderr) == (json.loads(done.stdout)[3] == "shm"), "and it is logged there"
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"NO_IPC": 1}, "cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED (801): there is no CUDA IPC on "),
        ({"HANDLE_PID": 1}, "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE (1)"),
        ({"FAULT": "cuIpcGetMemHandle=2@1+"}, "cuIpcGetMemHandle: CUDA_ERROR_OUT_OF_MEMORY (2)"),
    ],
    ids=["MIG or WSL", "process ids of its own", "the engine's driver refuses"],
)
def test_an_engine_whose_memory_cannot_be_opened_copies_and_says_why(daemon, settings, why):
    stored, loaded, right, backend, reason, gpus = engine(daemon, why, **settings)
    assert (stored, loaded, right, backend) == (4, 4, True, "shm")
    assert why in reason
    assert why in gpus["shm"]
    assert "1 memories" in gpus["shm"]
    assert why in daemon.log_path.read_text(), "a line of the daemon's log"
    eventually(lambda: "shm" not in status(daemon.session_socket).gpus, "it goes with the engine")


def test_an_engine_whose_memory_can_be_opened_says_nothing(daemon):
    stored, loaded, right, backend, reason, gpus = engine(daemon, "fine")
    assert (stored, loaded, right, backend, reason) == (4, 4, True, "cuda_ipc", "")
    assert "shm" not in gpus


@pytest.mark.parametrize("settings", [{}, {"DRIVER": 12080}, {"DRIVER": 12000}])
def test_shared_memory_is_registered_before_it_is_copied(without_driver, settings):
    """The strict fake refuses copies of memory that is not, which would be slow on a card."""
    stored, loaded, right, backend, *_ = engine(without_driver, f"strict {settings}", STRICT=1, **settings)
    assert (stored, loaded, right, backend) == (4, 4, True, "shm")


@pytest.mark.parametrize("settings", [{"READ_ONLY": 0}, {"FAULT": "cuMemHostRegister_v2=2@1+"}])
def test_where_it_cannot_be_registered_it_is_copied_all_the_same(without_driver, settings):
    stored, loaded, right, backend, *_ = engine(without_driver, f"plain {settings}", **settings)
    assert (stored, loaded, right, backend) == (4, 4, True, "shm")


def test_a_copy_that_fails_is_a_miss(without_driver):
    stored, loaded, _, backend, *_ = engine(without_driver, "failing", FAULT="cuMemcpyBatchAsync_v2=999@1+")
    assert (stored, loaded, backend) == (0, 0, "shm")
    stored, loaded, right, *_ = engine(without_driver, "failing")
    assert (stored, loaded, right) == (4, 4, True), "and nothing was stored of it"


def test_memory_whose_bytes_are_others_is_copied_by_the_engine(driver, tmp_path, monkeypatch):
    """What the worker reads differs each time from what the engine saw: it is not the memory that is meant."""
    monkeypatch.setattr("kvstored_client.cuda_export.Exporter.read", lambda self, pointer, size: os.urandom(size))
    with DaemonProcess(SETTINGS) as daemon, Client(daemon.address) as client:
        array = DeviceArray(driver, np.random.default_rng(2).integers(0, 256, (16, 4096), np.uint8))
        with client.register(PagedKV([array])) as transfers:
            assert transfers.ready()
            assert (transfers.backend, "bytes differ" in transfers.reason) == ("shm", True)
            namespace = client.namespace(NamespaceSpec(model="probe"))
            assert transfers.store(namespace, hashes_of(3, 4), range(4)).stored == 4
            assert transfers.load(namespace, hashes_of(3, 4), range(8, 12)) == 4
            assert (array.read()[8:12] == array.read()[:4]).all()
        array.free()


def test_the_daemon_is_asked_again_when_it_said_that_it_may_be_otherwise(driver, tmp_path, monkeypatch):
    """A worker that does not come up at first: the engine copies until it does."""
    faults = tmp_path / "faults"
    faults.write_text("cuDevicePrimaryCtxRetain=2@1+")
    monkeypatch.setenv("FAKECUDA_FAULT_FILE", str(faults))
    with DaemonProcess(SETTINGS) as daemon, Client(daemon.address) as client:
        array = DeviceArray(driver, np.random.default_rng(3).integers(0, 256, (16, 4096), np.uint8))
        namespace = client.namespace(NamespaceSpec(model="later"))
        with client.register(PagedKV([array])) as transfers:
            assert transfers.store(namespace, hashes_of(4, 4), range(4)).stored == 4
            assert transfers.backend == "shm"
            assert "CUDA_ERROR_OUT_OF_MEMORY" in client.status().gpus["shm"]
            faults.write_text("")

            def by_the_daemon():
                return transfers.load(namespace, hashes_of(4, 4), range(4)) == 4 and transfers.backend == "cuda_ipc"

            eventually(by_the_daemon, "the daemon copies")
            assert transfers.reason == ""
            assert "shm" not in client.status().gpus
        array.free()


async def test_the_same_in_asyncio(without_driver, driver):
    arrays = arrays_on(driver, arrays_of(SHAPES["kv first"], 22))
    async with AsyncClient(without_driver.address) as client:
        namespace, transfers = client.namespace(NamespaceSpec(model="aio")), client.register(PagedKV(arrays, 1))
        assert await transfers.ready(), transfers.reason
        assert transfers.backend == "shm"
        assert (await transfers.store(namespace, hashes_of(22, 5), [4, 3, 2, 1, 0])).stored == 5
        assert await transfers.load(namespace, hashes_of(22, 5), range(10, 15)) == 5
        after = [array.read() for array in arrays]
        assert stored(after, 1, 10) == stored(after, 1, 4)
        await transfers.close()
    for array in arrays:
        array.free()


def test_a_prefix_of_several_calls(without_driver, driver):
    array = DeviceArray(driver, np.random.default_rng(23).integers(0, 256, (10000, 512), np.uint8))
    before = array.read().copy()
    with Client(without_driver.address) as client, client.register(PagedKV(array)) as transfers:
        namespace, hashes = client.namespace(NamespaceSpec(model="long")), hashes_of(23, 9000)
        assert transfers.store(namespace, hashes[:8900], range(8900), wait_s=60.0).stored == 8900
        array.write(np.zeros_like(before))
        assert transfers.load(namespace, hashes, range(9000)) == 8900
        assert (array.read()[:8900] == before[:8900]).all()
    array.free()


def test_where_neither_can_copy_it_is_a_miss_and_said(daemon, driver, monkeypatch):
    array = DeviceArray(driver, np.zeros((4, 512), np.uint8))
    monkeypatch.setenv("KVSTORED_LIBCUDA", "libcuda-of-nowhere.so.1")
    with Client(daemon.address) as client, client.register(PagedKV(array)) as transfers:
        namespace = client.namespace(NamespaceSpec(model="nobody"))
        assert not transfers.ready()
        assert "cannot be loaded" in transfers.reason
        assert transfers.load(namespace, hashes_of(5, 2), [0, 1]) == 0
        result = transfers.store(namespace, hashes_of(5, 2), [0, 1])
        assert (result.refused, "cannot be loaded" in str(result.error)) == (2, True)
        assert client.contains(namespace, hashes_of(5, 2)) == [Outcome.MISS] * 2
    array.free()
