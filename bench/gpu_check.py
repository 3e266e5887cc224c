"""What a real card must answer, stage by stage: one command, five minutes at most, no network.

    python -m bench.gpu_check [--backend cuda|fake] [--json FILE] [--stage NAME ...]

Each stage is a process with a limit of its own, so one that hangs or dies takes nothing along; its
lines are printed as they come. A driver, numpy and what kvstored itself imports are needed; torch
only for the stage of that name. On the fake driver the same code runs, and its times say nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench.common import GB, MIB, progress
from kvstored.device.cuda import IPC_HANDLE_BYTES, CudaError, CudaUnavailable, Driver
from tests import fakecuda

BUDGET_S: Final = 300.0
STAGE_MAX_S: Final = 90.0
EXPORTER: Final = """
import sys
from kvstored.device.cuda import Driver
driver = Driver(); driver.bind(driver.context(0))
pointer = driver.allocate(int(sys.argv[1]))
host = bytes(range(256)) * 16
import ctypes
held = ctypes.create_string_buffer(host, len(host))
driver.write(pointer, ctypes.addressof(held), len(host))
print(driver.export(pointer).hex(), flush=True)
sys.stdin.readline()
"""


class Host:
    """Memory of a memfd, faulted in, as the DRAM tier's is."""

    def __init__(self, size_bytes: int) -> None:
        fd = os.memfd_create("gpu-check")
        os.ftruncate(fd, size_bytes)
        self._mapping = mmap.mmap(fd, size_bytes)
        os.close(fd)
        self.bytes = np.frombuffer(self._mapping, np.uint8)
        self.bytes[::4096] = 1
        self.address = self.bytes.ctypes.data
        self.size_bytes = size_bytes


def say(name: str, value: object) -> None:
    """One result, for people and for whoever collects them."""
    print(json.dumps({name: value}), flush=True)


def median_s(action: Callable[[], object], repeats: int = 5) -> float:
    """Median of some repeats after one that does not count."""
    taken = []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        action()
        if repeat:
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def driver_here() -> Driver:
    """The driver with the first device bound."""
    driver = Driver()
    driver.bind(driver.context(0))
    return driver


def pieces(driver: Driver, device: int, host: int, total: int, each: int, stream: int, *, to_device: bool) -> float:
    """Seconds to copy `total` bytes in scattered pieces of `each`, submitted and waited for."""
    count = total // each
    rng = np.random.default_rng(0)
    there = np.uint64(device) + rng.permutation(count).astype(np.uint64) * np.uint64(each)
    here = np.uint64(host) + rng.permutation(count).astype(np.uint64) * np.uint64(each)
    to, source = (there, here) if to_device else (here, there)
    sizes = np.full(count, each, np.uint64)

    def copy() -> None:
        driver.copy(to, source, sizes, stream, to_device=to_device)
        driver.synchronize(stream)

    return median_s(copy)


# ---- stages ----


def stage_environment(small: bool) -> None:
    """What there is: driver, device, memory, node, copy method."""
    driver = driver_here()
    say("driver", driver.version)
    say("device", driver.device_name(0))
    say("uuid", driver.device_uuids()[0].hex())
    say("memory_free_total_bytes", driver.memory_info())
    say("numa_node", driver.numa_node(0))
    say("copies_by", "batch" if driver.batches else "loop")


def stage_ceiling(small: bool) -> None:
    """One large copy from and to pinned memory of a memfd, each direction and both at once; and unpinned."""
    driver = driver_here()
    total = (16 if small else 1024) * MIB
    device, stream = driver.allocate(total), driver.stream()
    host = Host(total)
    for kind in ("pageable", "pinned"):
        if kind == "pinned":
            say("pin_s_per_gb", _pin(driver, host))
        for name, to_device in (("h2d", True), ("d2h", False)):
            taken = pieces(driver, device, host.address, total, total, stream, to_device=to_device)
            say(f"{kind}_{name}_gbps", total / taken / GB)


def _pin(driver: Driver, host: Host) -> float:
    started = time.perf_counter()
    driver.pin(host.address, host.size_bytes)
    return (time.perf_counter() - started) / host.size_bytes * GB


def stage_pieces(small: bool) -> None:
    """Scattered pieces of several sizes, both directions, batch against loop: where T lies, and what is reached."""
    driver = driver_here()
    total = (8 if small else 512) * MIB
    device, stream, host = driver.allocate(total), driver.stream(), Host(total)
    driver.pin(host.address, total)
    ceiling = {to: pieces(driver, device, host.address, total, total, stream, to_device=to) for to in (True, False)}
    for kib in (16, 64) if small else (4, 8, 16, 24, 28, 32, 64, 128, 256, 1024):
        each = kib << 10
        for name, to_device in (("h2d", True), ("d2h", False)):
            taken = pieces(driver, device, host.address, total // each * each, each, stream, to_device=to_device)
            say(f"{name}_{kib}k_share_of_ceiling", ceiling[to_device] / taken)
    driver.copies._batch = None  # what a driver before 12.8 would do
    for name, to_device in (("h2d", True), ("d2h", False)):
        taken = pieces(driver, device, host.address, total, 64 << 10, stream, to_device=to_device)
        say(f"{name}_64k_loop_share_of_ceiling", ceiling[to_device] / taken)


def stage_batch(small: bool) -> None:
    """Whether calls of as many descriptors as we use come back, many times over."""
    driver = driver_here()
    count, each = 4096, 4096
    total = count * each
    device, stream, host = driver.allocate(total), driver.stream(), Host(total)
    driver.pin(host.address, total)
    for _ in range(2 if small else 50):
        pieces(driver, device, host.address, total, each, stream, to_device=True)
    say("calls_of_4096_copies", "all came back")


def _exporter(size_bytes: int) -> tuple[subprocess.Popen[str], bytes]:
    command = [sys.executable, "-c", EXPORTER, str(size_bytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, bytes.fromhex(process.stdout.readline())


def stage_ipc(small: bool) -> None:
    """Another process's memory: open, read, range; its owner's death in mid-copy; what is held until the close."""
    driver = driver_here()
    size = (8 if small else 4096) * MIB
    free_before = driver.memory_info()[0]
    process, handle = _exporter(size)
    say("open_ms", median_s(lambda: driver.close(driver.open(handle)), 3) * 1e3)
    pointer = driver.open(handle)
    say("second_open_has_the_same_pointer", driver.open(handle) == pointer)
    driver.close(pointer)
    say("range_is_the_allocation", driver.range_of(pointer) == (pointer, size))
    seen = ctypes.create_string_buffer(4096)
    driver.read(ctypes.addressof(seen), pointer, 4096)
    say("bytes_are_the_owners", seen.raw == bytes(range(256)) * 16)
    say("own_handle", _outcome(lambda: driver.open(driver.export(driver.allocate(4096)))))
    host, stream = Host(min(size, 1024 * MIB)), driver.stream()
    driver.pin(host.address, host.size_bytes)
    one = [np.array([value], np.uint64) for value in (host.address, pointer, host.size_bytes)]
    for _ in range(4):
        driver.copy(one[0], one[1], one[2], stream, to_device=False)
    process.kill()
    process.wait()
    say("copies_after_the_owners_death", _outcome(lambda: driver.synchronize(stream)))
    say("bytes_after_it", bool((host.bytes[:4096] == np.tile(np.arange(256, dtype=np.uint8), 16)).all()))
    say("held_until_the_close_bytes", free_before - driver.memory_info()[0])
    started = time.perf_counter()
    say("close_after_it", _outcome(lambda: driver.close(pointer)))
    say("close_after_it_ms", (time.perf_counter() - started) * 1e3)
    time.sleep(0.5)
    say("held_after_the_close_bytes", free_before - driver.memory_info()[0])
    say("open_after_it", _outcome(lambda: driver.open(handle)))
    say("nonsense_handle", _outcome(lambda: driver.open(bytes(IPC_HANDLE_BYTES))))


def _outcome(action: Callable[[], object]) -> str:
    try:
        action()
        return "ok"
    except CudaError as error:
        return str(error)


def stage_torch(small: bool) -> None:
    """Whether torch's allocators give memory that can be exported, and what the client makes of it."""
    for setting in ("", "expandable_segments:True"):
        code = (
            "import torch\nfrom kvstored_client import PagedKV\nfrom kvstored_client.cuda_export import *\n"
            "kv = PagedKV([torch.zeros(2, 64, 16, 8, 128, dtype=torch.bfloat16, device='cuda')], 1)\n"
            "exporter, tensor, chunks = Exporter(), kv.tensors[0], {}\n"
            "try:\n"
            "    if exporter.has_handles(tensor.address):\n"
            "        print('by handle,', exporter.allocation_of(tensor.address).size_bytes, 'bytes')\n"
            "    else:\n"
            "        exporter.chunks_of(tensor.address, tensor.span_bytes, chunks)\n"
            "        print('by descriptor, chunks of', {each.size_bytes for each in chunks.values()}, 'bytes')\n"
            "except NotExportable as error: print(error)\n"
        )
        env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        say(f"torch {setting or 'default'}", (done.stdout or done.stderr[-300:]).strip())


def stage_end_to_end(small: bool) -> None:
    """Load and store through daemon and worker, as `bench.gpu` measures them."""
    from bench import gpu

    backend = "fake" if os.environ.get("FAKECUDA_DIR") else "cuda"
    for kib in (64,) if small else (16, 64, 256):
        blocks = 16 if small else 65536 // (gpu.LAYERS * 2 * kib)
        values = gpu.measure(backend, blocks=max(16, blocks), fragment_bytes=kib << 10, repeats=2 if small else 9)
        say(f"fragments of {kib} KiB", values)


STAGES: Final[dict[str, Callable[[bool], None]]] = {
    name.removeprefix("stage_"): function
    for name, function in list(globals().items())
    if name.startswith("stage_") and callable(function)
}


# ---- running them ----


def run_stage(name: str, limit_s: float, *, small: bool) -> dict[str, object]:
    """One stage in a process of its own; what it said, and how it ended where not well."""
    command = [sys.executable, "-m", "bench.gpu_check", "--inside", name, *(["--small"] if small else [])]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True)
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = f"did not end within {limit_s:.0f} s"
        out.seek(0)
        lines = out.read().splitlines()
    found: dict[str, object] = {}
    for line in lines:
        if line.startswith("{"):
            found |= json.loads(line)
    if code:
        found["failed"] = f"{code}: {' '.join(lines[-2:])[-300:]}"
    return found


def check(backend: str, stages: Sequence[str], *, small: bool = False) -> dict[str, dict[str, object]]:
    """All stages, printed as they end."""
    if backend == "fake":
        os.environ |= {"KVSTORED_LIBCUDA": str(fakecuda.build()), "FAKECUDA_DIR": str(fakecuda.directory())}
        os.environ.setdefault("FAKECUDA_MEM_MB", "2048")
    ends_s = time.monotonic() + BUDGET_S
    results: dict[str, dict[str, object]] = {}
    for name in stages:
        left_s = min(STAGE_MAX_S, ends_s - time.monotonic())
        results[name] = run_stage(name, left_s, small=small) if left_s > 5 else {"failed": "no time was left"}
        progress(f"== {name}\n" + "\n".join(f"   {key}: {value}" for key, value in results[name].items()))
    return results


def main() -> int:
    """The command line."""
    options = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--backend", choices=("cuda", "fake"), default="cuda")
    options.add_argument("--stage", choices=sorted(STAGES), action="append", help="only these")
    options.add_argument("--small", action="store_true", help="a few megabytes: for the fake driver")
    options.add_argument("--json", metavar="FILE", help="write all results to FILE")
    options.add_argument("--inside", choices=sorted(STAGES), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.inside:
        try:
            STAGES[given.inside](given.small)
        except (CudaUnavailable, CudaError) as error:
            print(error)
            return 1
        return 0
    small = given.small or given.backend == "fake"
    stages = given.stage or [name for name in STAGES if given.backend == "cuda" or name != "torch"]
    results = check(given.backend, stages, small=small)
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1) + "\n")
    return int(any("failed" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
