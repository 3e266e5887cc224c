"""Whole prefixes between the DRAM tier and an engine's memory on a GPU, beside memcpy of the same bytes.

    python -m bench.gpu --backend fake|cuda --json -

`fake` runs on the CPU, on the driver of `tests/fakecuda` with unlimited bandwidth: it says what kvstored adds to
the copies, and nothing of a card. Engine (this process), daemon and device worker are processes. Repeats are
interleaved with their ceiling; every block that is loaded is compared with its source outside the timed part.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
from kvstored_client import Client, Namespace, NamespaceSpec, PagedKV
from kvstored_client.transfers import PagedTransfers
from kvstored_proto.layout import Layout, fragments_of

from bench.common import GB, MIB, Figure, Value, Values, emit, median, median_ratio, parser, progress, run
from kvstored.device.cuda import Driver
from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.device_arrays import DeviceArray
from tests import fakecuda

FIGURES: Final = (
    Figure("fragments_per_s", "fragments prepared and submitted to a stream, of a prefix of 512 blocks", ">= 5e6"),
    Figure("load512_control_ms", "load of 512 blocks of 64 bytes, median ms: everything but the copies", "<= 1"),
    Figure("store512_control_ms", "store of 512 blocks of 64 bytes, median ms"),
    Figure("load_ratio", "time of the ceiling / time of a load of the same bytes", ">= 0.85"),
    Figure("store_ratio", "time of the ceiling / time of a store of the same bytes, hashed and readable", ">= 0.85"),
    Figure("load_gbps", "that load, GB/s"),
    Figure("store_gbps", "that store, GB/s"),
    Figure("ceiling_load_gbps", "fake: memmove of each block; cuda: one copy from pinned memory to the device, GB/s"),
    Figure("ceiling_store_gbps", "fake: memmove of each block; cuda: one copy from the device to pinned memory, GB/s"),
    Figure("wrong_blocks", "loaded blocks with other bytes than were stored", "== 0"),
    Figure("fragment_bytes", "size of a fragment"),
    Figure("block_bytes", "size of a block"),
    Figure("blocks", "blocks of a transfer"),
    Figure("repeats", "interleaved repeats behind each median"),
    Figure("backend", "fake or cuda"),
    Figure("device", "what the driver calls it"),
)
LAYERS: Final = 4
CONTROL_BLOCKS: Final = 512
_memmove: Final = ctypes.memmove


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def fragments_per_s(driver: Driver, repeats: int) -> float:
    """80 layers, K/V-first, 512 scattered blocks of 160 fragments: their addresses, and the calls that submit them."""
    blocks, each, layers = 1024, 64, 80
    shape = (2, blocks, each)
    strides = (blocks * each, each, 1)
    region = 2 * blocks * each
    fragments = [f for layer in range(layers) for f in fragments_of(layer, shape, strides, 1, 1)]
    layout = Layout(fragments, blocks, [region] * layers)
    device = driver.allocate(layers * region)
    host = np.zeros(512 * layout.block_bytes, np.uint8)
    driver.pin(host.ctypes.data, host.nbytes)
    stream = driver.stream()
    bases = [device + layer * region for layer in range(layers)]
    slots = host.ctypes.data + np.arange(512, dtype=np.uint64) * np.uint64(layout.block_bytes)
    ids = layout.check_ids(np.random.default_rng(0).permutation(blocks)[:512], 512)
    taken = []
    for _ in range(repeats):

        def submit() -> None:
            engine, stored, sizes = layout.plan(ids, bases, slots)
            driver.copy(engine, stored, sizes, stream, to_device=True)

        taken.append(seconds(submit))
        driver.synchronize(stream)
    driver.unpin(host.ctypes.data)
    driver.free(device)
    return len(fragments) * 512 / median(taken)


class Side:
    """An engine's memory of some shape, its registration, and chains that were never stored before."""

    def __init__(self, client: Client, namespace: Namespace, driver: Driver, blocks: int, fragment_bytes: int) -> None:
        rng = np.random.default_rng(1)
        self.namespace, self.blocks = namespace, blocks
        shape = (2, 2 * blocks, fragment_bytes)
        self.arrays = [DeviceArray(driver, rng.integers(0, 256, shape, np.uint8)) for _ in range(LAYERS)]
        self.transfers: PagedTransfers = client.register(PagedKV(self.arrays, 1))
        if not self.transfers.ready():
            raise SystemExit(f"the memory cannot be registered: {self.transfers.reason}")
        order = rng.permutation(2 * blocks)
        self.source, self.target = order[:blocks], order[blocks:]
        self._chains = 0

    def chain(self) -> list[bytes]:
        """Hashes of a chain that nobody has."""
        self._chains += 1
        stamp = os.urandom(8) + self._chains.to_bytes(8, "little")
        return [stamp + i.to_bytes(16, "little") for i in range(self.blocks)]

    def store(self, hashes: list[bytes]) -> None:
        """All of it, or an error."""
        result = self.transfers.store(self.namespace, hashes, self.source, wait_s=30.0)
        assert result.stored == self.blocks, (result, self.transfers.reason)

    def load(self, hashes: list[bytes]) -> None:
        """All of it, or an error."""
        loaded = self.transfers.load(self.namespace, hashes, self.target)
        assert loaded == self.blocks, (loaded, self.transfers.reason)

    def wrong_blocks(self) -> int:
        """Blocks that are not what they were stored as."""
        wrong = np.zeros(self.blocks, bool)
        for array in self.arrays:
            seen = array.read()
            wrong |= (seen[:, self.source] != seen[:, self.target]).any(axis=(0, 2))
        return int(wrong.sum())

    def close(self) -> None:
        """Give all of it back."""
        self.transfers.close()
        for array in self.arrays:
            array.free()


class Ceiling:
    """The same bytes without kvstored: memmoves by this process, or one copy of pinned memory by the device."""

    def __init__(self, driver: Driver, fake: bool, blocks: int, block_bytes: int) -> None:
        self._driver, self._fake = driver, fake
        self._blocks, self._each = blocks, block_bytes
        self._host: npt.NDArray[np.uint8] = np.ones(blocks * block_bytes, np.uint8)
        self._other: npt.NDArray[np.uint8] = np.zeros(blocks * block_bytes if fake else 1, np.uint8)
        if not fake:
            self._device, self._stream = driver.allocate(self._host.nbytes), driver.stream()
            driver.pin(self._host.ctypes.data, self._host.nbytes)

    def copy(self, *, to_device: bool) -> None:
        """Once, in one direction."""
        a, b = self._host.ctypes.data, self._other.ctypes.data
        if self._fake:
            for start in range(0, self._blocks * self._each, self._each):
                _memmove(b + start, a + start, self._each)
            return
        to, source = (self._device, a) if to_device else (a, self._device)
        pointers = [np.array([value], np.uint64) for value in (to, source, self._host.nbytes)]
        self._driver.copy(pointers[0], pointers[1], pointers[2], self._stream, to_device=to_device)
        self._driver.synchronize(self._stream)


def measure(backend: str, *, blocks: int = 512, fragment_bytes: int = 64 << 10, repeats: int = 9) -> Values:
    """All figures of a run; sets up a daemon of its own, and finds the driver by the environment for `cuda`."""
    fake = backend == "fake"
    if fake:
        # Read by the fake once per process: a second run in this one shares the first one's directory.
        directory = os.environ.get("FAKECUDA_DIR") or str(fakecuda.directory())
        os.environ |= {"KVSTORED_LIBCUDA": str(fakecuda.build()), "FAKECUDA_DIR": directory}
        os.environ.setdefault("FAKECUDA_MEM_MB", "2048")
    driver = Driver()
    driver.bind(driver.context(0))
    block_bytes = LAYERS * 2 * fragment_bytes
    total = blocks * block_bytes
    values: dict[str, Value] = {"backend": backend, "device": driver.device_name(0), "repeats": repeats}
    values |= {"fragment_bytes": fragment_bytes, "block_bytes": block_bytes, "blocks": blocks}
    values["fragments_per_s"] = fragments_per_s(driver, repeats)
    capacity = 3 * total + 512 * MIB
    with (
        DaemonProcess({"dram.capacity_bytes": str(capacity // MIB * MIB)}) as daemon,
        Client(daemon.address, timeout_s=60.0, connect_timeout_s=60.0) as client,
    ):
        progress("gpu: control")
        values |= _control(client, driver, repeats)
        progress(f"gpu: {blocks} blocks of {block_bytes >> 10} KiB")
        values |= _transfers(client, driver, fake, blocks, fragment_bytes, repeats)
    return values


def _control(client: Client, driver: Driver, repeats: int) -> Values:
    side = Side(client, client.namespace(NamespaceSpec(model="control")), driver, CONTROL_BLOCKS, 8)
    loads, stores = [], []
    for repeat in range(repeats + 1):
        hashes = side.chain()
        storing, loading = seconds(partial(side.store, hashes)), seconds(partial(side.load, hashes))
        if repeat:  # the first pins memory
            stores.append(storing)
            loads.append(loading)
    side.close()
    return {"load512_control_ms": median(loads) * 1e3, "store512_control_ms": median(stores) * 1e3}


def _transfers(client: Client, driver: Driver, fake: bool, blocks: int, fragment_bytes: int, repeats: int) -> Values:
    side = Side(client, client.namespace(NamespaceSpec(model="gpu")), driver, blocks, fragment_bytes)
    total = blocks * LAYERS * 2 * fragment_bytes
    ceiling = Ceiling(driver, fake, blocks, LAYERS * 2 * fragment_bytes)
    taken: dict[str, list[float]] = {"load": [], "store": [], "ceiling_load": [], "ceiling_store": []}
    for repeat in range(repeats + 1):
        hashes = side.chain()
        once = {
            "ceiling_store": seconds(lambda: ceiling.copy(to_device=False)),
            "store": seconds(partial(side.store, hashes)),
            "ceiling_load": seconds(lambda: ceiling.copy(to_device=True)),
            "load": seconds(partial(side.load, hashes)),
        }
        if repeat:
            for name, value in once.items():
                taken[name].append(value)
        client.delete(side.namespace, hashes)
    values: dict[str, Value] = {f"{name}_gbps": total / median(each) / GB for name, each in taken.items()}
    values["load_ratio"] = median_ratio(taken["ceiling_load"], taken["load"])
    values["store_ratio"] = median_ratio(taken["ceiling_store"], taken["store"])
    values["wrong_blocks"] = side.wrong_blocks()
    side.close()
    return values


def main() -> int:
    """The command line."""
    options = parser("bench.gpu", __doc__ or "", FIGURES)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--backend", choices=("fake", "cuda"), default="fake")
    options.add_argument("--blocks", type=int, default=512)
    options.add_argument("--fragment-kib", type=int, default=64)
    options.add_argument("--repeats", type=int, default=9)
    given = options.parse_args()
    values = measure(given.backend, blocks=given.blocks, fragment_bytes=given.fragment_kib << 10, repeats=given.repeats)
    emit(values, FIGURES, given.json)
    return 0


if __name__ == "__main__":
    run(main)
