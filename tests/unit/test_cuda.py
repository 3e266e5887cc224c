"""The driver layer on the fake driver: each test in processes of its own, as the driver is one per process."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import fakecuda

pytestmark = pytest.mark.skipif(bool(fakecuda.MISSING), reason=fakecuda.MISSING)

PRELUDE = """
import ctypes, os, sys, threading, time
import numpy as np
from kvstored.device.cuda import *
def started():
    driver = Driver()
    driver.bind(driver.context(0))
    return driver
def array(*values):
    return np.array(values, np.uint64)
def fails(code, call, *arguments, **more):
    try:
        call(*arguments, **more)
    except CudaError as error:
        assert error.code == code, error
    else:
        raise AssertionError(f"no error {code}")
"""


class Processes:
    def __init__(self, directory):
        self.directory = directory
        self.running = []

    def start(self, code, *arguments, **settings):
        # Nothing of the fake that other tests share.
        env = {name: value for name, value in os.environ.items() if not name.startswith("FAKECUDA_")}
        env |= fakecuda.environment(self.directory, **settings)
        env |= {name: str(value) for name, value in settings.items() if name == "CUDA_VISIBLE_DEVICES"}
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        self.running.append(process)
        return process

    def run(self, code, *arguments, **settings):
        process = self.start(code, *arguments, **settings)
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        return out.split()


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path)
    yield made
    for process in made.running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("version", [12000, 12080, 13000])
def test_copies_in_both_directions_by_every_form_of_the_call(processes, version):
    processes.run(
        f"""
        driver = started()
        assert driver.version == {version} and driver.batches == ({version} >= 12080)
        device, size, n = driver.allocate(1 << 20), 512, 5000  # more than one call takes
        host = np.zeros(n * size, np.uint8); back = np.zeros_like(host)
        host[:] = np.random.default_rng(1).integers(0, 256, n * size)
        big = driver.allocate(n * size)
        for memory in (host, back): driver.pin(memory.ctypes.data, memory.nbytes)
        stream, event, bell = driver.stream(), driver.event(), Doorbell()
        places = np.random.default_rng(2).permutation(n).astype(np.uint64) * np.uint64(size)
        sizes = np.full(n, size, np.uint64)
        steps = np.arange(n, dtype=np.uint64) * np.uint64(size)
        driver.copy(big + places, host.ctypes.data + steps, sizes, stream, to_device=True)
        driver.copy(back.ctypes.data + steps, big + places, sizes, stream, to_device=False)
        driver.record(event, stream); driver.ring(stream, bell); bell.wait(60); assert driver.happened(event)
        assert driver.happened(event) and (host == back).all()
        """,
        DRIVER=version,
        STRICT=1,
    )


def test_the_driver_that_is_not_there_says_so(processes):
    env = {**os.environ, "KVSTORED_LIBCUDA": "libcuda-of-nowhere.so.1"}
    code = PRELUDE + "try: Driver()\nexcept CudaUnavailable as error: print(error)"
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert "cannot be loaded" in out


def test_no_device_and_hidden_devices(processes):
    processes.run(
        """
        try: Driver()
        except CudaUnavailable as error: assert "CUDA_ERROR_NO_DEVICE (100)" in str(error)
        else: raise AssertionError
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    out = processes.run(
        "print(Driver().device_uuids()[0].hex(), len(Driver().device_uuids()))", DEVICES=3, CUDA_VISIBLE_DEVICES="2"
    )
    assert out == [(b"fakecuda" + bytes(7) + b"\x02").hex(), "1"]


def test_what_a_gpu_refuses_is_refused(processes):
    processes.run(
        """
        driver = started()
        device, stream = driver.allocate(4096), driver.stream()
        host = np.zeros(8192, np.uint8)
        driver.pin(host.ctypes.data, 4096)
        fails(712, driver.pin, host.ctypes.data, 64)
        fails(1, driver.copy, array(device), array(host.ctypes.data + 4000), array(200), stream, to_device=True)
        fails(1, driver.copy, array(device + 4000), array(host.ctypes.data), array(200), stream, to_device=True)
        fails(1, driver.copy, array(device), array(host.ctypes.data + 4096), array(200), stream, to_device=True)
        fails(500, driver.range_of, host.ctypes.data)
        fails(2, driver.allocate, 1 << 40)
        fails(201, driver.open, driver.export(device))
        wrong = []
        def other(): fails(201, driver.allocate, 64)
        thread = threading.Thread(target=other); thread.start(); thread.join()
        driver.unpin(host.ctypes.data)
        fails(713, driver.unpin, host.ctypes.data)
        """,
        STRICT=1,
    )


def test_a_device_pointer_is_not_the_hosts_to_follow(processes):
    process = processes.start("ctypes.string_at(started().allocate(64), 1)")
    process.communicate(timeout=100)
    assert process.returncode == -11


def test_a_fork_may_not_go_on(processes):
    assert processes.run("""
        driver = started()
        if os.fork() == 0:
            fails(3, driver.allocate, 64)
            print("refused", flush=True); os._exit(0)
        os.wait()
        """) == ["refused"]


EXPORTER = """
driver = started()
pointer = driver.allocate(1 << 20)
data = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)[:1 << 20].copy()
driver.write(pointer, data.ctypes.data, data.nbytes)
print(driver.export(pointer).hex(), flush=True)
sys.stdin.readline()
"""
IMPORTER = """
driver = started()
handle = bytes.fromhex(sys.argv[1])
pointer = driver.open(handle)
assert driver.open(handle) == pointer and driver.range_of(pointer + 5) == (pointer, 1 << 20)
driver.close(pointer)
print("open", driver.memory_info()[0] >> 20, flush=True)
sys.stdin.readline()
seen = np.zeros(1 << 20, np.uint8)
driver.read(seen.ctypes.data, pointer, 1 << 20)
assert (seen == np.arange(1 << 20, dtype=np.uint32).view(np.uint8)[:1 << 20]).all()
driver.close(pointer)
fails(1, driver.open, handle)
print(driver.memory_info()[0] >> 20)
"""


def test_imported_memory_outlives_its_exporter_and_counts_until_it_is_closed(processes):
    exporter = processes.start(EXPORTER)
    handle = exporter.stdout.readline().strip()
    importer = processes.start(IMPORTER, handle)
    assert importer.stdout.readline().split() == ["open", "255"]
    exporter.kill()
    exporter.wait()
    out, err = importer.communicate("\n", timeout=100)
    assert out.split() == ["256"], err


def test_faults_come_at_the_call_that_was_named(processes, tmp_path):
    processes.run(
        """
        driver = started()
        driver.allocate(64); fails(2, driver.allocate, 64); driver.allocate(64)
        fails(999, driver.stream); fails(999, driver.stream)
        open(os.environ["FAKECUDA_FAULT_FILE"], "w").write("cuMemAlloc_v2=700")
        fails(700, driver.allocate, 64); driver.allocate(64); driver.stream()
        os.utime(os.environ["FAKECUDA_FAULT_FILE"], ns=(0, 0)); fails(700, driver.allocate, 64); driver.allocate(64)
        open(os.environ["FAKECUDA_FAULT_FILE"], "w").write("cuMemAlloc_v2=701")
        os.utime(os.environ["FAKECUDA_FAULT_FILE"], ns=(0, 0)); fails(701, driver.allocate, 64)
        """,
        FAULT="cuMemAlloc_v2=2@2,cuStreamCreate=999@1+",
        FAULT_FILE=tmp_path / "faults",
    )


def test_an_error_in_the_midst_of_a_stream_stays(processes):
    processes.run(
        """
        driver = started()
        device, stream, event = driver.allocate(4096), driver.stream(), driver.event()
        host = np.zeros(4096, np.uint8); driver.pin(host.ctypes.data, 4096)
        driver.copy(array(device), array(host.ctypes.data), array(4096), stream, to_device=True)
        fails(700, driver.synchronize, stream)
        fails(700, driver.allocate, 64)
        """,
        FAULT="copy=700",
    )


def test_the_layer_and_the_fake_have_the_interface_of_cuda_h(tmp_path):
    """Where there is a toolkit: numbers and sizes of the fake's header, and the struct that ctypes passes."""
    header = next((path for path in Path("/usr/local").glob("cuda*/include/cuda.h")), None)
    if header is None:
        pytest.skip("there is no CUDA toolkit under /usr/local to compare with")
    text = (fakecuda.HERE / "driver_api.h").read_text()
    numbers = re.findall(r"(CU\w+) = (\d+)", text)
    assert len(numbers) > 15
    checks = [f'_Static_assert({name} == {value}, "{name}");' for name, value in numbers]
    for name, size in (("CUmemcpyAttributes", 24), ("CUipcMemHandle", 64), ("CUuuid", 16), ("CUdeviceptr", 8)):
        checks.append(f'_Static_assert(sizeof({name}) == {size}, "{name}");')
    checks.append('_Static_assert(offsetof(CUmemcpyAttributes, flags) == 20, "flags");')
    source = tmp_path / "check.c"
    source.write_text("#include <cuda.h>\n#include <stddef.h>\n" + "\n".join(checks))
    subprocess.run(["cc", "-fsyntax-only", f"-I{header.parent}", str(source)], check=True)
    code = "import ctypes; from kvstored_proto.cuda_copies import CopyAttributes as A"
    code += "; print(ctypes.sizeof(A), A.flags.offset)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["24", "20"]
