"""How many threads a batch is worth: all but one CPU while its client copies the next one, all where it waits."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kvstored.store.commits import WHOLE_COPY_BYTES, in_copiers

MIB = 1 << 20


@pytest.mark.parametrize(
    ("copy_threads", "total_bytes", "jobs"),
    [(1, 8 * MIB, 1), (1, WHOLE_COPY_BYTES, 2), (3, 4 * MIB, 2), (3, 8 * MIB, 3), (3, 32 * MIB, 4), (4, 1, 1)],
)
async def test_a_batch_is_shared_among_so_many_threads(copy_threads, total_bytes, jobs):
    shares = []

    def work(blocks):
        shares.append(len(blocks))
        return [b"%d" % block for block in blocks]

    with ThreadPoolExecutor(copy_threads) as copiers, ThreadPoolExecutor(1) as spare:
        parts = SimpleNamespace(copy_threads=copy_threads, copiers=copiers, spare_copier=spare)
        found = await in_copiers(parts, work, range(64), total_bytes)
    assert len(shares) == jobs
    assert found == [b"%d" % block for block in range(64)], "in order, whoever was first"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is shared by all")
async def test_threads_that_copy_one_batch_share_no_cpu():
    cpus, all_copy = [], threading.Barrier(2, timeout=60)

    def work(blocks):
        all_copy.wait()
        cpus.append(os.sched_getaffinity(0))
        return list(blocks)

    with ThreadPoolExecutor(1) as copiers, ThreadPoolExecutor(1) as spare:
        parts = SimpleNamespace(copy_threads=1, copiers=copiers, spare_copier=spare)
        await in_copiers(parts, work, [b"a", b"b"], WHOLE_COPY_BYTES)
        assert cpus[0].isdisjoint(cpus[1])
        for pool in (copiers, spare):
            assert pool.submit(os.sched_getaffinity, 0).result(60) == os.sched_getaffinity(0), "only meanwhile"
