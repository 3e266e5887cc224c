"""Memory that its allocator made by chunks (torch's expandable segments), shared by descriptors: on the fake driver."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from kvstored_client import Client, NamespaceSpec, PagedKV
from kvstored_client.device_verbs import DeviceMemory
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.contract_paged import PagedContract, hashes_of
from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.device_arrays import ChunkedArray, DeviceArray, OnDevice
from tests import fakecuda
from tests.e2e.raw_client import eventually

pytestmark = pytest.mark.skipif(bool(fakecuda.MISSING), reason=fakecuda.MISSING)
SETTINGS = {"dram.capacity_bytes": "128MiB", "gpu.drain_max_s": "60"}
CHUNKS = 5
SHAPE = (CHUNKS * 256, 8 << 10)  # of five chunks


@pytest.fixture(scope="module")
def daemon(driver):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKECUDA_STRICT", "1")
        with DaemonProcess(SETTINGS) as running:
            yield running


def held_chunks(daemon):
    """How many descriptors of chunks the daemon's own process has."""
    return sum("fakecuda-chunk" in target for target in daemon.descriptors())


class TestChunks(PagedContract):
    """The contract: tensors in chunks, the second in two that the first has a part of, the third with a handle."""

    @pytest.fixture
    def transfers(self, daemon, driver, request):
        made = []
        with Client(daemon.address, staging_bytes=4 << 20) as client:
            namespace = client.namespace(NamespaceSpec(model="chunks", extra=request.node.name))

            def make(arrays, axis):
                kinds = [ChunkedArray, ChunkedArray, DeviceArray]
                placed = [kinds[i % 3](driver, a, (2 << 20) - 5000 * i) for i, a in enumerate(arrays)]
                made.append(OnDevice(client, namespace, placed, axis))
                return made[-1]

            yield make
            for memory in made:
                assert memory.transfers.backend == "cuda_ipc", memory.transfers.reason
                memory.close()
        assert not held_chunks(daemon)


def test_blocks_that_lie_over_the_ends_of_chunks(daemon, driver):
    before = np.random.default_rng(1).integers(0, 256, SHAPE, np.uint8)
    array = ChunkedArray(driver, before, 1000)
    ids = np.random.default_rng(2).permutation(SHAPE[0])[:600]
    with Client(daemon.address) as client, client.register(PagedKV(array)) as transfers:
        namespace, hashes = client.namespace(NamespaceSpec(model="ends")), hashes_of(1, 600)
        assert transfers.store(namespace, hashes, ids).stored == 600, transfers.reason
        assert transfers.backend == "cuda_ipc"
        assert held_chunks(daemon) == CHUNKS + 1, "for the worker that may follow"
        assert transfers.load(namespace, hashes, ids[::-1]) == 600
        assert (array.read()[ids[::-1]] == before[ids]).all()
    assert not held_chunks(daemon)
    array.free()


def test_a_worker_that_follows_maps_them_again(daemon, driver):
    array = ChunkedArray(driver, np.random.default_rng(3).integers(0, 256, SHAPE, np.uint8))
    with Client(daemon.address) as client, client.register(PagedKV(array)) as transfers:
        namespace = client.namespace(NamespaceSpec(model="follows"))
        assert transfers.store(namespace, hashes_of(2, 8), range(8)).stored == 8, transfers.reason
        (worker,) = fakecuda.workers_of(daemon.pid)
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: transfers.load(namespace, hashes_of(2, 8), range(8, 16)) == 8, "it works again")
        assert (array.read()[8:16] == array.read()[:8]).all()
        assert transfers.backend == "cuda_ipc"
    array.free()


ENGINE = """
import sys, time, numpy as np
from kvstored.device.cuda import Driver
from kvstored.testing.device_arrays import ChunkedArray
from kvstored_client import Client, NamespaceSpec, PagedKV
driver = Driver(); driver.bind(driver.context(0))
array = ChunkedArray(driver, np.full((1024, 8 << 10), 7, np.uint8))
client = Client(sys.argv[1], timeout_s=60, connect_timeout_s=60)
transfers = client.register(PagedKV([array]))
assert transfers.ready() and transfers.backend == "cuda_ipc", transfers.reason
print("ready", flush=True)
time.sleep(60)
"""


def test_an_engine_that_is_killed_has_its_memory_back(daemon, driver):
    free_before = driver.memory_info()[0]
    process = subprocess.Popen([sys.executable, "-c", ENGINE, daemon.address], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait()
    eventually(lambda: driver.memory_info()[0] == free_before, "the worker holds nothing")
    eventually(lambda: not held_chunks(daemon), "nor does the daemon")


def test_chunks_that_cannot_be_exported_are_copied_by_the_engine(daemon, driver):
    array = ChunkedArray(driver, np.random.default_rng(4).integers(0, 256, SHAPE, np.uint8), exportable=False)
    with Client(daemon.address) as client, client.register(PagedKV(array)) as transfers:
        namespace = client.namespace(NamespaceSpec(model="cannot"))
        assert transfers.ready()
        assert transfers.backend == "shm"
        assert "expandable segments" in transfers.reason
        assert "cuMemExportToShareableHandle" in client.status().gpus["shm"]
        assert transfers.store(namespace, hashes_of(3, 8), range(8)).stored == 8
        assert transfers.load(namespace, hashes_of(3, 8), range(8, 16)) == 8
        assert (array.read()[8:16] == array.read()[:8]).all()
    array.free()


def test_what_makes_no_sense_is_refused_and_nothing_is_held(daemon, driver):
    array = ChunkedArray(driver, np.zeros(SHAPE, np.uint8))
    memory = DeviceMemory(PagedKV([array]))
    with Client(daemon.address) as client:
        client.status()
        connection = client._core.connection

        def reason(descriptors, **changes):
            request = memory.description()
            own = memory.take_descriptors()
            sent = descriptors(own)
            for fd in set(own) - set(sent):
                os.close(fd)
            number = memory.own_number
            connection.give(pb.OPERATION_OFFER_DESCRIPTORS, pb.OfferDescriptors(memory_number=number), tuple(sent))
            for name, value in changes.items():
                if name == "chunk_bytes":
                    del request.chunk_bytes[:]
                    request.chunk_bytes.extend(value)
                else:
                    setattr(request.regions[0], name, value)
            reply = client.call(pb.OPERATION_REGISTER_MEMORY, request, pb.RegisterMemoryReply, 20.0)
            assert not reply.registration_id
            assert not held_chunks(daemon)
            return reply.reason

        def as_they_are(own):
            return own

        assert "4 descriptors came for 5 chunks" in reason(lambda own: own[1:])
        assert "bytes differ" in reason(as_they_are, probe=b"other bytes")
        assert "bytes differ" in reason(as_they_are, probe_end=b"other bytes")
        assert "of 10485760" in reason(as_they_are, offset=1)
        assert "CUDA_ERROR_INVALID_VALUE" in reason(as_they_are, chunk_bytes=[4 << 20] * 5)
        pipes = [fd for _ in range(3) for fd in os.pipe()][:5]
        assert "cuMemImportFromShareableHandle" in reason(lambda own: pipes)
    array.free()


def test_descriptors_that_nobody_names_go_with_their_session(daemon):
    before = len(daemon.descriptors())
    with Client(daemon.address) as client:
        connection = client._core.connection
        for number in range(3):
            fds = [os.memfd_create("stray") for _ in range(100)]
            connection.give(pb.OPERATION_OFFER_DESCRIPTORS, pb.OfferDescriptors(memory_number=number), tuple(fds))
        client.status()
        assert sum("stray" in target for target in daemon.descriptors()) == 300
        fds = [os.memfd_create("stray") for _ in range(100)]
        connection.give(pb.OPERATION_KEEP_ALIVE, pb.KeepAliveRequest(), tuple(fds))  # nobody asked for these
        client.status()
        assert sum("stray" in target for target in daemon.descriptors()) == 300
        for number in range(60):  # more than a session may have
            fds = [os.memfd_create("stray") for _ in range(100)]
            connection.give(pb.OPERATION_OFFER_DESCRIPTORS, pb.OfferDescriptors(memory_number=number), tuple(fds))
        client.status()
        assert sum("stray" in target for target in daemon.descriptors()) <= 4096
    eventually(lambda: len(daemon.descriptors()) <= before, "all are closed")
