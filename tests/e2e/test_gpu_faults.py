"""What goes wrong around a device worker, on the fake driver: nothing half-copied is committed, nothing is held for
long, a transfer that failed is a miss, and the next one works. Engines, daemon and worker are real processes."""

import contextlib
import ctypes
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from itertools import product

import numpy as np
import pytest
from kvstored_client import Client, NamespaceSpec, Outcome, PagedKV, Unavailable
from kvstored_client.device_verbs import DeviceMemory
from kvstored_client.effects import LOST_PAUSE_S, Sleep
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing import process_figures
from kvstored.testing.contract_paged import hashes_of
from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.device_arrays import ChunkedArray, Columns, DeviceArray
from tests import fakecuda
from tests.e2e.raw_client import eventually

pytestmark = pytest.mark.skipif(bool(fakecuda.MISSING), reason=fakecuda.MISSING)

BLOCKS, BLOCK_BYTES = 64, 64 << 10
SPEC = NamespaceSpec(model="faults")
SETTINGS = {"dram.capacity_bytes": "128MiB", "gpu.silence_max_s": "60", "gpu.drain_max_s": "60"}
HASTY = {"gpu.silence_max_s": "4", "gpu.drain_max_s": "4"}  # where a worker is to be killed for its silence


class Rig:
    """A daemon whose worker's driver can be broken at any time, and this process as an engine."""

    def __init__(self, driver, directory, daemon, kind=DeviceArray, pieces=1):
        """`pieces`: so many tensors have a part of each block, and nothing of it is joined."""
        self.driver = driver
        self.faults = fakecuda.FaultFile(directory / "faults")
        self.daemon = daemon
        self.array = kind(driver, np.random.default_rng(1).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8))
        self.client = Client(daemon.address)
        self.namespace = self.client.namespace(SPEC)
        step = BLOCK_BYTES // pieces
        columns = [Columns(self.array, slice(i, i + step)) for i in range(0, BLOCK_BYTES, step)]
        self.tensors = columns if pieces > 1 else [self.array]
        self.register()

    def register(self):
        """The array's memory, anew."""
        self.transfers = self.client.register(PagedKV(self.tensors))

    def breaks(self, text):
        """What the worker's driver does from its next call on."""
        self.faults.says(text)

    def holds_copies(self):
        """The next transfer of all blocks stops in the midst of them, until `breaks` says something else."""
        self.faults.holds_copies(BLOCKS // 2)

    def in_mid_copy(self):
        """Wait until a transfer has stopped there."""
        eventually(self.faults.in_mid_copy, "a copy is under way")

    @property
    def worker(self):
        """Process id of the worker; 0 where there is none."""
        return next(iter(fakecuda.workers_of(self.daemon.pid)), 0)

    def works(self, seed, backend="cuda_ipc"):
        """Whether all is as if nothing had ever happened; called until it is, as a worker may just be starting."""
        hashes = hashes_of(seed, 8)
        self.transfers._device.ask_again_at_s = 0.0  # a memory that could not be opened a moment ago
        if self.transfers.store(self.namespace, hashes, range(8)).outcomes != [Outcome.HIT] * 8:
            return False
        before = self.array.read().copy()
        if self.transfers.load(self.namespace, hashes, range(8, 16)) != 8:
            return False
        assert (self.array.read()[8:16] == before[:8]).all()
        return self.transfers.backend == backend

    def idle(self):
        """Nothing is held but the registration."""
        held = {name: n for name, n in self.client.status().counters.items() if name.startswith("held_") and n}
        return set(held) <= {"held_sessions", "held_staging_bytes", "held_registrations"}

    def stored_wrong(self, hashes):
        """How many of these blocks are readable and not what stands in this engine's blocks."""
        mine, wrong = self.array.read(), 0
        for i, hash_ in enumerate(hashes):
            with self.client.get(self.namespace, [hash_]) as blocks:
                wrong += len(blocks) == 1 and bytes(blocks[0]) != mine[i].tobytes()
        return wrong

    def close(self):
        self.transfers.close()
        self.client.close()
        self.array.free()


def rig_of(driver, tmp_path, monkeypatch, settings=(), **more):
    monkeypatch.setenv("FAKECUDA_FAULT_FILE", str(tmp_path / "faults"))
    return DaemonProcess({**SETTINGS, **dict(settings)}, **more)


@pytest.fixture
def rig(driver, tmp_path, monkeypatch):
    with rig_of(driver, tmp_path, monkeypatch) as daemon:
        made = Rig(driver, tmp_path, daemon)
        yield made
        made.close()


@pytest.fixture
def hasty(driver, tmp_path, monkeypatch):
    with rig_of(driver, tmp_path, monkeypatch, HASTY) as daemon:
        made = Rig(driver, tmp_path, daemon)
        yield made
        made.close()


# What is held in mid-copy is copied in reverse order, or neighbours would be one copy, done at once.
ENGINE = """
import sys, numpy as np
from kvstored.device.cuda import Driver
from kvstored.testing.device_arrays import ChunkedArray, DeviceArray
from kvstored.testing import process_figures
from kvstored.testing.contract_paged import hashes_of
from kvstored_client import Client, NamespaceSpec, PagedKV
driver = Driver(); driver.bind(driver.context(0))
array = DeviceArray(driver, np.full((64, 64 << 10), 7, np.uint8))
client = Client(sys.argv[1], timeout_s=60, connect_timeout_s=60)
namespace, transfers = client.namespace(NamespaceSpec(model="faults")), client.register(PagedKV([array]))
assert transfers.ready(), transfers.reason
print("ready", flush=True)
"""


def engine(daemon, code):
    """An engine of its own that has registered its memory."""
    env = {name: value for name, value in os.environ.items() if name != "FAKECUDA_FAULT_FILE"}
    command = [sys.executable, "-c", ENGINE + textwrap.dedent(code), daemon.address]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("to_device", [False, True])
def test_an_engine_that_is_killed_in_mid_copy_holds_nothing_and_leaves_nothing(rig, to_device):
    hashes, free_before = hashes_of(9, BLOCKS), rig.driver.memory_info()[0]
    if to_device:
        assert rig.transfers.store(rig.namespace, hashes, range(BLOCKS)).stored == BLOCKS
    rig.holds_copies()
    verb = "load" if to_device else "store"
    process = engine(rig.daemon, f"transfers.{verb}(namespace, hashes_of(9, 64), range(63, -1, -1))")
    rig.in_mid_copy()
    worker = rig.worker
    process.kill()
    process.wait()
    assert rig.driver.memory_info()[0] < free_before, "the worker holds the memory while it copies"
    rig.breaks("")
    eventually(lambda: rig.driver.memory_info()[0] == free_before, "the memory comes back")
    eventually(rig.idle, "nothing is held")
    found = rig.client.contains(rig.namespace, hashes)
    assert found == [Outcome.HIT if to_device else Outcome.MISS] * BLOCKS
    assert rig.worker == worker, "it was not needed to kill the worker"


@pytest.mark.parametrize("kill_worker", [False, True])
def test_a_slot_that_is_being_written_serves_nobody_else_before_the_copy_has_ended(rig, kill_worker):
    """The engine dies in mid-store and all of DRAM is filled at once: what was put must stay as it is."""
    rig.holds_copies()
    process = engine(rig.daemon, "transfers.store(namespace, hashes_of(9, 64), range(63, -1, -1))")
    rig.in_mid_copy()
    process.kill()
    process.wait()
    count, other = 2500, rig.client.namespace(NamespaceSpec(model="other"))
    data = np.random.default_rng(3).integers(0, 256, (count, BLOCK_BYTES), np.uint8)
    hashes = hashes_of(8, count)
    stored = rig.client.put(other, hashes, data).stored
    assert stored > 1500, "nearly all of DRAM"
    if kill_worker:
        os.kill(rig.worker, signal.SIGKILL)
    rig.breaks("")
    eventually(rig.idle, "nothing is held")
    right = 0
    for i, hash_ in enumerate(hashes):
        with rig.client.get(other, [hash_]) as blocks:
            if len(blocks):
                assert bytes(blocks[0]) == data[i].tobytes(), f"block {i} was overwritten"
                right += 1
    assert right > 1000


@pytest.mark.parametrize("to_device", [False, True])
def test_a_worker_that_is_killed_in_mid_copy_is_replaced(rig, to_device):
    hashes, backwards = hashes_of(10, BLOCKS), range(BLOCKS)[::-1]
    if to_device:
        assert rig.transfers.store(rig.namespace, hashes, range(BLOCKS)).stored == BLOCKS
    assert rig.transfers.ready(), rig.transfers.reason
    worker = rig.worker
    rig.holds_copies()
    start = rig.transfers.start_load if to_device else rig.transfers.start_store
    moving = start(rig.namespace, hashes, backwards)
    if not to_device:
        moving.ready(1)
    rig.in_mid_copy()
    os.kill(worker, signal.SIGKILL)
    if to_device:
        assert moving.result() == 0
    else:
        result = moving.result()
        assert (result.stored, result.refused) == (0, BLOCKS)
        assert rig.client.contains(rig.namespace, hashes) == [Outcome.MISS] * BLOCKS
    rig.breaks("")
    assert "the device worker ended" in rig.transfers.reason
    assert rig.idle()
    eventually(lambda: rig.works(11), "it works again")
    assert rig.worker not in (0, worker)


@pytest.mark.parametrize("call", ["copy=hang", "cuEventQuery=hang", "cuMemcpyBatchAsync_v2=hang"])
def test_a_worker_that_hangs_is_killed_and_replaced(hasty, call):
    eventually(lambda: hasty.works(20), "it works")
    worker = hasty.worker
    hasty.breaks(call)
    assert hasty.transfers.load(hasty.namespace, hashes_of(20, 8), range(8)) == 0
    hasty.breaks("")
    eventually(lambda: hasty.works(21), "it works again")
    assert hasty.worker != worker
    assert hasty.idle()


def test_a_session_whose_copy_hangs_holds_up_no_other_one(driver, tmp_path, monkeypatch):
    with rig_of(driver, tmp_path, monkeypatch) as daemon:
        rig = Rig(driver, tmp_path, daemon)
        other = Rig(driver, tmp_path, daemon)
        try:
            assert rig.works(22)
            assert other.works(23)
            rig.breaks("copy=hang")  # the next one, and no other
            loading = rig.transfers.start_load(rig.namespace, hashes_of(22, 8), range(16, 24))
            eventually(lambda: rig.client.status().counters["held_leases"], "it is under way")
            storing = rig.transfers.start_store(rig.namespace, hashes_of(26, 2), [0, 1])
            storing.ready(1)
            eventually(lambda: storing.copied() == (2, 1), "its other direction goes on too")
            assert other.works(24)
            assert not loading.done()
            rig.breaks("")
            os.kill(rig.worker, signal.SIGKILL)
            assert loading.result() == 0
            assert storing.result().stored in (0, 2)
            eventually(lambda: rig.works(25), "it works again")
        finally:
            rig.close()
            other.close()


def test_an_engine_that_dies_while_the_worker_hangs_gets_its_memory_back_by_force(hasty):
    eventually(lambda: hasty.works(25), "it works")
    free_before = hasty.driver.memory_info()[0]
    process = engine(hasty.daemon, "")
    process.wait()
    eventually(lambda: hasty.driver.memory_info()[0] == free_before, "the memory comes back")
    process = engine(hasty.daemon, "sys.stdin.read()")
    hasty.breaks("cuIpcCloseMemHandle=hang")
    process.kill()
    process.wait()
    eventually(lambda: hasty.driver.memory_info()[0] == free_before, "the memory comes back")
    hasty.breaks("")
    eventually(lambda: hasty.works(26), "it works again")


def test_an_error_that_ends_the_context_ends_the_worker(rig):
    assert rig.works(30)
    worker = rig.worker
    rig.breaks("copy=700")
    result = rig.transfers.store(rig.namespace, hashes_of(31, 8), range(8))
    assert (result.stored, result.refused) == (0, 8)
    rig.breaks("")
    eventually(lambda: rig.works(31), "it works again")
    assert rig.worker != worker
    assert rig.idle()


EXPORTED = set(re.findall(r"CUresult (cu\w+)\(", (fakecuda.HERE / "fakecuda.c").read_text()))
# What is called of engines, or finds functions, or is the older form of what is called.
NOT_THE_WORKERS = {
    *("cuIpcGetMemHandle", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemcpyHtoD_v2", "cuPointerGetAttribute"),
    *("cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"),  # of the kernel
    *("cuMemCreate", "cuMemRetainAllocationHandle", "cuMemExportToShareableHandle", "cuCtxGetCurrent"),
    *("cuGetProcAddress_v2", "cuGetErrorName", "cuMemcpyBatchAsync", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"),
}
OF_CHUNKS = {
    *("cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuCtxGetDevice"),
    *("cuMemRelease", "cuMemUnmap", "cuMemAddressFree"),
}
CALLS = {DeviceArray: [*sorted(EXPORTED - NOT_THE_WORKERS - OF_CHUNKS), "copy"], ChunkedArray: sorted(OF_CHUNKS)}
CODES = ("2", "700", "die")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("kind", CALLS)
def test_whatever_call_fails_nothing_wrong_is_read_and_all_works_afterwards(
    driver, tmp_path, monkeypatch, kind, running
):
    """Each call in turn, with one error each: of a worker that starts, and of one that has copied before."""
    faults = [(call, CODES[(number + running) % len(CODES)]) for number, call in enumerate(CALLS[kind])]
    with rig_of(driver, tmp_path, monkeypatch) as daemon:
        rig = Rig(driver, tmp_path, daemon, kind)
        try:
            for number, (call, code) in enumerate(faults):
                one_fault(rig, 1000 + 2 * number, call, code, running=running)
            eventually(lambda: rig.works(9999), "it works again")
        finally:
            rig.close()
        chunks = [target for target in daemon.descriptors() if "fakecuda-chunk" in target]
        assert not chunks


def one_fault(rig, seed, call, code, *, running):
    """A store and a load while a call fails; what came of the load."""
    eventually(lambda: rig.works(seed), f"it works again before {call}={code}")
    if not running:
        os.kill(rig.worker, signal.SIGKILL)
    rig.breaks(f"{call}={code}")
    if running:  # closed and opened in a worker that goes on
        rig.transfers.close()
        rig.register()
    hashes = hashes_of(seed + 1, 8)
    stored = rig.transfers.store(rig.namespace, hashes, range(8)).stored
    assert not rig.stored_wrong(hashes), call
    before = rig.array.read().copy()
    came = rig.transfers.load(rig.namespace, hashes, range(8, 16))
    assert (rig.array.read()[8 : 8 + came] == before[:came]).all(), call
    rig.breaks("")
    assert rig.idle(), call
    return stored, came


# Of a kernel that copies, by whether the worker has copied before: itself, and what it needs.
KERNEL_FAULTS = {
    False: [
        *product(["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"], CODES),
        *zip(["cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostRegister_v2"], CODES, strict=True),  # it is measured
    ],
    True: [
        *product(["cuLaunchKernel"], CODES),
        *product(["cuEventRecord", "cuEventQuery", "copy"], CODES[:2]),
    ],
}


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler (c++)")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("running", [False, True])
def test_whatever_fails_where_a_kernel_copies_the_same_is_true(driver, tmp_path, monkeypatch, running):
    """The copy engines are made slower than it is; without batches stores go by it, too."""
    settings = {**fakecuda.with_kernel(tmp_path), "FAKECUDA_DRIVER": "12000", "FAKECUDA_OP_DELAY_US": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with rig_of(driver, tmp_path, monkeypatch) as daemon:
        rig = Rig(driver, tmp_path, daemon, pieces=16)
        try:
            assert rig.works(999)
            (said,) = [text for text in rig.client.status().gpus.values() if "copies by" in text]
            below = [int(size) for size in re.findall(r"(\d+)(?: bytes)? \((?:loads|stores)\)", said)]
            assert min(below) > BLOCK_BYTES // 16, said
            for number, (call, code) in enumerate(KERNEL_FAULTS[running]):
                stored, came = one_fault(rig, 1000 + 2 * number, call, code, running=running)
                if running and call == "cuLaunchKernel":
                    assert (stored, came) == (0, 0), "it is the kernel that copies"
            eventually(lambda: rig.works(9999), "it works again")
        finally:
            rig.close()


def test_memory_that_is_unregistered_while_copies_run_is_free_when_the_call_returns(rig):
    hashes, free_before = hashes_of(40, BLOCKS), rig.driver.memory_info()[0]
    with Client(rig.daemon.address) as client:
        array = DeviceArray(rig.driver, np.zeros((BLOCKS, BLOCK_BYTES), np.uint8))
        transfers, namespace = client.register(PagedKV([array])), client.namespace(SPEC)
        assert transfers.ready(), transfers.reason
        rig.holds_copies()
        results = []
        storing = threading.Thread(
            target=lambda: results.append(transfers.store(namespace, hashes, range(BLOCKS)[::-1]))
        )
        storing.start()
        rig.in_mid_copy()
        letting_go = threading.Timer(0.5, rig.breaks, [""])
        letting_go.start()
        transfers.close()
        array.free()
        assert rig.driver.memory_info()[0] == free_before, "the worker does not hold it any more"
        storing.join()
        letting_go.join()
        assert results[0].stored + results[0].refused == BLOCKS
        eventually(rig.idle, "nothing is held")


def test_sleep_mode_unregister_free_and_register_again(rig):
    namespace, data = rig.client.namespace(NamespaceSpec(model="sleep")), np.arange(256, dtype=np.uint8)
    for round_ in range(3):
        array = DeviceArray(rig.driver, np.broadcast_to(data, (16, 256)).copy())
        with rig.client.register(PagedKV([array])) as transfers:
            transfers.store(namespace, hashes_of(50 + round_, 4), range(4))
            assert transfers.load(namespace, hashes_of(50, 4), range(4, 8)) == 4
        array.free()


def test_a_call_that_gives_up_comes_back_when_the_copy_has_ended(rig):
    hashes = hashes_of(60, BLOCKS)
    with Client(rig.daemon.address) as client:
        transfers, namespace = client.register(PagedKV([rig.array])), client.namespace(SPEC)
        assert transfers.ready(), transfers.reason
        client._core.settings = dataclasses.replace(client._core.settings, timeout_s=1.0)
        rig.holds_copies()
        with copies_go_on(rig, after_s=3.0):
            result = transfers.store(namespace, hashes, range(BLOCKS)[::-1])
        assert result.refused == BLOCKS
        assert rig.idle(), "no copy runs any more"
        assert rig.client.contains(rig.namespace, hashes) == [Outcome.MISS] * BLOCKS, "the engine may change them"
        assert client.stats.timeouts == 1


def test_a_call_that_is_refused_keeps_no_words_of_the_session_page(rig):
    assert rig.works(60)
    free = len(rig.client._core.connection.page._words)
    rig.transfers._device.number += 1000  # the daemon does not know it
    for by_layer in (False, True):
        loading = rig.transfers.start_load(rig.namespace, hashes_of(60, 8), range(8), by_layer=by_layer)
        assert loading.result() == 0
    storing = rig.transfers.start_store(rig.namespace, hashes_of(61, 8), range(8))
    storing.ready(1)
    assert storing.result().refused == 8
    assert len(rig.client._core.connection.page._words) == free


def test_a_store_that_is_cancelled_when_the_session_is_lost_pauses_until_nothing_reads_its_blocks(rig):
    assert rig.works(62)
    storing = rig.transfers.start_store(rig.namespace, hashes_of(63, 8), range(8))
    ending = storing._begun.finish(cancel=True)
    next(ending)
    paused = ending.throw(Unavailable("lost"))
    assert paused == Sleep(LOST_PAUSE_S, whole=True)
    ending.close()


@contextlib.contextmanager
def copies_go_on(rig, after_s):
    """What is held goes on after so long: where something else is to be over by then, much longer than that takes."""
    timer = threading.Timer(after_s, rig.breaks, [""])
    timer.start()
    yield
    timer.join()


def test_what_has_not_come_by_its_deadline_is_given_up_and_answered_when_the_copy_has_ended(rig):
    hashes, backwards = hashes_of(61, BLOCKS), range(BLOCKS)[::-1]
    assert rig.transfers.ready(), rig.transfers.reason
    rig.holds_copies()
    with copies_go_on(rig, after_s=3.0):
        result = rig.transfers.store(rig.namespace, hashes, backwards, deadline_s=1.0)
    assert (result.stored, result.refused) == (0, BLOCKS)
    assert "deadline" in rig.transfers.reason
    assert rig.idle(), "no copy runs any more"
    assert rig.client.contains(rig.namespace, hashes) == [Outcome.MISS] * BLOCKS
    assert rig.transfers.store(rig.namespace, hashes, backwards).stored == BLOCKS
    rig.holds_copies()
    with copies_go_on(rig, after_s=3.0):
        came = rig.transfers.load(rig.namespace, hashes, backwards, deadline_s=1.0)
    assert came in (0, BLOCKS), "all of it is one piece, which had begun"
    with rig.client.stage(rig.namespace, hashes_of(62, 1), BLOCK_BYTES):
        assert rig.transfers.load(rig.namespace, hashes_of(62, 1), [0], wait_s=60.0, deadline_s=0.2) == 0
    assert "deadline" in rig.transfers.reason, "it did not wait for the block that is being written"
    assert rig.idle()


@pytest.mark.parametrize("end", ["killed", "unregistered"])
def test_an_engine_that_goes_between_two_layers_of_a_store_leaves_nothing(rig, end):
    hashes, free_before = hashes_of(63, 8), rig.driver.memory_info()[0]
    process = engine(
        rig.daemon,
        """
        from kvstored_client import PagedKV
        half = DeviceArray(driver, np.full((8, 4096), 7, np.uint8)); other = DeviceArray(driver, half.read())
        transfers = client.register(PagedKV([half, other]))
        storing = transfers.start_store(namespace, hashes_of(63, 8), range(8)); storing.ready(1)
        while storing.copied() != (8, 1): pass
        print("copied", flush=True); sys.stdin.readline()
        transfers.close(); half.free(); other.free(); print("closed", flush=True); sys.stdin.readline()
        """,
    )
    assert process.stdout.readline() == "copied\n"
    if end == "unregistered":
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        eventually(rig.idle, "nothing is held")
    process.kill()
    process.wait()
    eventually(rig.idle, "nothing is held")
    eventually(lambda: rig.driver.memory_info()[0] == free_before, "the memory comes back")
    assert rig.client.contains(rig.namespace, hashes) == [Outcome.MISS] * 8
    assert rig.works(64)


def test_a_daemon_that_restarts_is_registered_with_again(rig):
    assert rig.works(70)
    rig.daemon.restart()
    eventually(lambda: rig.works(71), "it works again")


def test_a_worker_of_a_daemon_that_was_killed_ends_before_its_memory_is_used_again(driver, tmp_path, monkeypatch):
    with rig_of(driver, tmp_path, monkeypatch, supervised=True) as daemon:
        rig = Rig(driver, tmp_path, daemon)
        try:
            assert rig.transfers.ready(), rig.transfers.reason
            worker = rig.worker
            os.kill(worker, signal.SIGSTOP)  # it cannot see that its daemon is gone
            daemon.crash()
            daemon.wait_serving()
            assert process_figures.ended(worker)
            eventually(lambda: rig.works(80), "it works again")
        finally:
            rig.close()


def test_without_a_driver_everything_else_is_served_and_the_reason_is_told(driver, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("KVSTORED_LIBCUDA", "libcuda-of-nowhere.so.1")
        daemon = DaemonProcess(SETTINGS)
        daemon.start()
    try:
        rig = Rig(driver, tmp_path, daemon)
        assert rig.transfers.ready()
        assert (rig.transfers.backend, "cannot be loaded" in rig.transfers.reason) == ("shm", True)
        assert rig.works(91, "shm"), "the engine copies"
        host = np.zeros((8, 4096), np.uint8)
        on_cpu = rig.client.register(PagedKV(host))
        assert on_cpu.store(rig.namespace, hashes_of(90, 2), [0, 1]).stored == 2
        assert on_cpu.load(rig.namespace, hashes_of(90, 2), [2, 3]) == 2
        assert "cannot be loaded" in str(rig.client.status().gpus)
        rig.close()
    finally:
        daemon.stop()
        daemon.wipe()


def test_memory_that_cannot_be_opened_is_refused_with_the_reason(rig):
    good = DeviceMemory(PagedKV([rig.array])).description()

    def reason(**changes):
        request = pb.RegisterMemoryRequest()
        request.CopyFrom(good)
        for name, value in changes.items():
            setattr(request if hasattr(request, name) else request.regions[0], name, value)
        reply = rig.client.call(pb.OPERATION_REGISTER_MEMORY, request, pb.RegisterMemoryReply, 20.0)
        assert bool(reply.reason) == (not reply.registration_id)
        return reply.reason

    assert reason() == ""
    assert "bytes differ" in reason(probe=b"other bytes")
    assert "bytes differ" in reason(probe_end=b"other bytes")
    twin = DeviceArray(rig.driver, rig.array.read())  # the same but for its last byte
    rig.driver.write(twin.address + BLOCKS * BLOCK_BYTES - 1, (ctypes.c_ubyte * 1)(rig.array.read()[-1, -1] ^ 1), 1)
    assert "bytes differ" in reason(ipc_handle=rig.driver.export(twin.pointer))
    twin.free()
    assert "of 4194304" in reason(offset=1)
    assert "fragment 0 ends at byte" in reason(blocks=BLOCKS + 1)
    assert "CUDA_ERROR_INVALID_VALUE" in reason(ipc_handle=bytes(64))
    assert "a handle of 3 bytes" in reason(ipc_handle=b"abc")
    assert "no device with UUID" in reason(device_uuid=bytes(16))
    assert "16" in reason(device_uuid=b"short")
    rig.breaks("cuIpcOpenMemHandle_v2=2")
    with Client(rig.daemon.address) as other:
        array = DeviceArray(rig.driver, np.zeros((4, 512), np.uint8))
        transfers = other.register(PagedKV([array]))
        assert transfers.ready()
        assert (transfers.backend, "CUDA_ERROR_OUT_OF_MEMORY" in transfers.reason) == ("shm", True)
        transfers.close()
        array.free()
    assert rig.works(99)


def test_status_shows_the_workers_and_what_they_copied(rig):
    assert rig.works(101)
    status = rig.client.status()
    assert any("fakecuda device 0, driver 13000, copies by batch" in said for said in status.gpus.values())
    assert status.counters["gpu_bytes_loaded"] >= 8 * BLOCK_BYTES
    assert status.counters["gpu_worker_starts"] == 1
