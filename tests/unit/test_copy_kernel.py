"""The worker's copy kernel: for the CPU, compared with numpy; for a GPU where nvcc is; and on the fake driver."""

import ctypes
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kvstored.device import copy_kernel
from kvstored.testing.contract_paged import hashes_of
from kvstored.testing.daemon_process import DaemonProcess, status
from tests import fakecuda
from tests.e2e.raw_client import eventually

pytestmark = [
    pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler (c++)"),
    pytest.mark.skipif(bool(fakecuda.MISSING), reason=fakecuda.MISSING),
]


@pytest.mark.parametrize("seed", range(6))
def test_on_the_cpu_it_copies_what_numpy_copies(tmp_path, seed):
    run = ctypes.CDLL(str(fakecuda.build_kernels(tmp_path, on_the_fake=False))).kvstored_copy_on_cpu
    rng = np.random.default_rng(seed)
    count, room = int(rng.integers(1, 90)), 70_000
    step = [1, 16, 3][seed % 3]  # aligned, and not
    sizes = rng.integers(0, room // step, count).astype(np.uint64) * np.uint64(step)
    source, target = rng.integers(0, 256, (count, room + 64), np.uint8), np.zeros((count, room + 64), np.uint8)
    expected = target.copy()
    starts = rng.integers(0, 4, (2, count)) * step
    lists = [np.zeros(count, np.uint64) for _ in range(2)]
    for i, size in enumerate(sizes.tolist()):
        a, b = starts[0, i], starts[1, i]
        expected[i, a : a + size] = source[i, b : b + size]
        lists[0][i], lists[1][i] = target[i].ctypes.data + a, source[i].ctypes.data + b
    arguments = np.array([each.ctypes.data for each in (*lists, sizes)] + [count], np.uint64)
    run(ctypes.c_uint(int(rng.integers(1, 40))), ctypes.c_uint(64), ctypes.c_void_p(arguments.ctypes.data))
    assert (target == expected).all()


@pytest.mark.skipif(not shutil.which("nvcc"), reason="there is no nvcc")
def test_it_compiles_to_a_cubin(tmp_path):
    made = tmp_path / "copy_kernel.cubin"
    command = ["nvcc", "-arch=sm_90", "-cubin", "-Xptxas", "-v,-warn-spills", "-o", str(made), str(fakecuda.KERNEL)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kvstored_copy" in done.stderr
    assert "0 bytes spill stores" in done.stderr
    assert made.read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize("compiler", [copy_kernel._by_cupy, copy_kernel._by_bindings])
def test_nvrtc_compiles_it_where_it_is_installed(compiler):
    try:
        image = compiler(copy_kernel.SOURCE.read_text(), "sm_90")
    except ImportError as error:
        pytest.skip(str(error))
    assert image.startswith(b"\x7fELF")
    with pytest.raises(Exception, match="COMPILATION"):
        compiler("garbage", "sm_90")


METHODS = """
import json, numpy as np
from kvstored.device.cuda import Driver
from kvstored.device.copy_methods import CopyMethods
driver = Driver(); driver.bind(driver.context(0))
methods = CopyMethods(driver, 0)
said = methods.said()
n, size = 3000, 1000
host, back = np.random.default_rng(1).integers(0, 256, n * size, np.uint8), np.zeros(n * size, np.uint8)
for memory in (host, back): driver.pin(memory.ctypes.data, memory.nbytes)
device, stream = driver.allocate(n * size), driver.stream()
places = np.random.default_rng(2).permutation(n).astype(np.uint64) * np.uint64(size)
steps, sizes = np.arange(n, dtype=np.uint64) * np.uint64(size), np.full(n, size, np.uint64)
calls = []
plain = driver.copy
driver.copy = lambda *a, **k: (calls.append(len(a[0])), plain(*a, **k))
right = []
for below in ({True: 2000, False: 2000}, {True: 2000, False: 0}, {True: 0, False: 1000}):
    methods.below_bytes = below
    back[:] = 0
    methods.copy(device + places, host.ctypes.data + steps, sizes, stream, to_device=True)
    methods.copy(back.ctypes.data + steps, device + places, sizes, stream, to_device=False)
    driver.synchronize(stream)
    right.append(bool((host == back).all()))
print(json.dumps([said, right, calls]))
"""


def methods_on_the_fake(tmp_path, **more):
    env = {**os.environ, **fakecuda.environment(fakecuda.directory(), STRICT=1), **more}
    done = subprocess.run([sys.executable, "-c", METHODS], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_method_is_chosen_by_direction_and_size(tmp_path):
    said, right, calls = methods_on_the_fake(tmp_path, **fakecuda.with_kernel(tmp_path))
    assert said.startswith("batch, kernel below ")
    assert said.endswith(", 0 (stores)"), "the copy engines do that well"
    assert right == [True] * 3
    assert calls == [3000, 3000, 3000], "one of the second pair, both of the third"


@pytest.mark.parametrize("code", ["2", "700"])
@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"])
def test_a_kernel_that_fails_at_the_start_is_none(tmp_path, call, code):
    said, right, _ = methods_on_the_fake(tmp_path, **fakecuda.with_kernel(tmp_path), FAKECUDA_FAULT=f"{call}={code}")
    assert said.startswith(f"batch (no kernel: {call}: CUDA_ERROR")
    assert right == [True] * 3


def test_status_shows_method_and_threshold_and_transfers_are_right(tmp_path, monkeypatch):
    for name, value in {**fakecuda.environment(fakecuda.directory()), **fakecuda.with_kernel(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with DaemonProcess({"dram.capacity_bytes": "64MiB", "gpu.start": "now"}) as daemon:
        eventually(lambda: "kernel below" in str(status(daemon.session_socket).gpus), "it is shown", 60.0)
        code = ENGINE.replace("HASHES", repr(hashes_of(1, 8)))
        done = subprocess.run([sys.executable, "-c", code, daemon.address], capture_output=True, text=True, timeout=100)
        assert done.stdout.split() == ["8", "8", "True", "cuda_ipc"], done.stderr


ENGINE = """
import sys, numpy as np
from kvstored.device.cuda import Driver
from kvstored.testing.device_arrays import DeviceArray
from kvstored_client import Client, NamespaceSpec, PagedKV
driver = Driver(); driver.bind(driver.context(0))
before = np.random.default_rng(1).integers(0, 256, (2, 16, 4, 500), np.uint8)
array = DeviceArray(driver, before)
with Client(sys.argv[1], timeout_s=60, connect_timeout_s=60) as client:
    namespace, transfers = client.namespace(NamespaceSpec(model="kernel")), client.register(PagedKV([array], 1))
    print(transfers.store(namespace, HASHES, range(8)).stored, transfers.load(namespace, HASHES, range(15, 7, -1)))
    print((array.read()[:, 15:7:-1] == before[:, :8]).all(), transfers.backend)
"""
