"""Tensors of random shapes and strides on a GPU, both ways and by every form of the copy call, against numpy: fake."""

import numpy as np
import pytest
from kvstored_client import Client, NamespaceSpec, PagedKV

from kvstored.testing.contract_paged import blocks_of, hashes_of, stored
from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.device_arrays import ChunkedArray, DeviceArray, OnDevice
from tests import fakecuda

pytestmark = pytest.mark.skipif(bool(fakecuda.MISSING), reason=fakecuda.MISSING)
CASES = 12  # for each form of the call


def tensor(rng, blocks):
    """One tensor, K/V-first, blocks-first, MLA, cross-layer or anything between, and its axis of blocks."""
    shape = [int(n) for n in rng.integers(1, 6, rng.integers(0, 4))] + [int(rng.integers(1, 300))]
    axis = int(rng.integers(0, len(shape)))
    shape.insert(axis, blocks)
    order = rng.permutation(len(shape))  # as the axes lie in memory
    padded = [shape[i] + int(rng.integers(0, 3)) for i in order]  # and not all of it is the tensor's
    lying = rng.integers(0, 256, padded, np.uint8)
    cut = lying[tuple(slice(0, shape[i]) for i in order)]
    return cut.transpose(np.argsort(order)), axis


@pytest.mark.parametrize("version", [12000, 12080, 13000])
def test_what_is_stored_is_what_numpy_takes(driver, monkeypatch, version):
    monkeypatch.setenv("FAKECUDA_DRIVER", str(version))
    monkeypatch.setenv("FAKECUDA_STRICT", "1")
    settings = {"dram.capacity_bytes": "256MiB"}
    with DaemonProcess(settings) as daemon, Client(daemon.address) as client:
        for case in range(CASES):
            rng = np.random.default_rng(1000 * version + case)
            blocks, count = int(rng.integers(8, 40)), int(rng.integers(1, 5))
            made = [tensor(rng, blocks) for _ in range(count)]
            before, axes = [array for array, _ in made], [axis for _, axis in made]
            kind = [DeviceArray, ChunkedArray][case % 2]
            arrays = [kind(driver, array, int(rng.integers(0, 999))) for array in before]
            kv = PagedKV(arrays, axes)
            hashes, ids = hashes_of(case, 7), rng.permutation(blocks)[:7]
            namespace = client.namespace(NamespaceSpec(model=f"random {case}"))
            expected = [b"".join(stored([a], x, i) for a, x in made) for i in ids]
            with client.register(kv) as transfers:
                assert transfers.store(namespace, hashes, ids).stored == 7, (case, transfers.reason)
                assert transfers.backend == "cuda_ipc"
                bench = OnDevice.__new__(OnDevice)  # of an axis for each tensor
                bench.client, bench.namespace = client, namespace
                assert blocks_of(bench, hashes, len(expected[0])) == expected, case
                places = rng.permutation(blocks)[:7]
                assert transfers.load(namespace, hashes, places) == 7, (case, transfers.reason)
                after = [array.read() for array in arrays]
                for block in range(blocks):
                    (came,) = np.nonzero(places == block)
                    source = int(ids[came[0]]) if len(came) else block
                    for new, old, axis in zip(after, before, axes, strict=True):
                        assert stored([new], axis, block) == stored([old], axis, source), (case, block)
            for array in arrays:
                array.free()
