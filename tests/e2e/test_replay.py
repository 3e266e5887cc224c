"""`bench.replay`: a real daemon has exactly the hits of the simulator, with NVMe below too, whatever it admits."""

import json
import random
import subprocess
import sys

import pytest

CHAINS, CHAIN_BLOCKS, REQUESTS, DRAM_BLOCKS = 40, 24, 200, 300


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Conversations that grow, some of which never come back."""
    rng, path = random.Random(3), tmp_path_factory.mktemp("trace") / "trace.jsonl"
    lengths = [rng.randrange(2, 8) for _ in range(CHAINS)]
    requests = []
    for _ in range(REQUESTS):
        chain = min(rng.randrange(CHAINS), rng.randrange(CHAINS))
        lengths[chain] = min(CHAIN_BLOCKS, lengths[chain] + rng.randrange(3))
        requests.append([1000 * chain + place for place in range(lengths[chain])])
    return written(path, requests)


@pytest.fixture(scope="module")
def repeats(tmp_path_factory):
    """Chains that are asked for several times in a row, so that a get may meet the release of the one before it."""
    rng, path = random.Random(3), tmp_path_factory.mktemp("repeats") / "trace.jsonl"
    requests = []
    for _ in range(REQUESTS):
        chain = rng.randrange(CHAINS)
        requests += [[1000 * chain + place for place in range(8)]] * rng.choice((1, 1, 2, 3, 4))
    return written(path, requests)


def written(path, requests):
    lines = [
        json.dumps({"timestamp": stamp, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids})
        for stamp, ids in enumerate(requests)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def replayed(trace, directory, *arguments):
    command = [sys.executable, "-m", "bench.replay", str(trace), "--directory", str(directory), "--json", "-"]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["simulated_hits"] is not None, "the simulation says nothing of this workload"
    assert (found["hits_minus_simulated"], found["wrong_bytes"], found["refused_blocks"]) == (0, 0, 0)
    assert 0 < found["hits"] < found["blocks"]
    return found


@pytest.mark.parametrize(
    ("eviction", "admission"),
    [("shelf_life", "admit_all"), ("lru", "second_hit"), ("s3fifo", "second_hit"), ("lru", "hinted")],
)
def test_the_daemon_with_nvme_has_the_hits_of_the_simulator(tmp_path, trace, eviction, admission):
    arguments = ["--dram-blocks", DRAM_BLOCKS, "--nvme-blocks", 4000, "--eviction", eviction, "--admission", admission]
    found = replayed(trace, tmp_path, *arguments)
    assert found["written_minus_simulated"] == 0
    assert bool(found["written_blocks"]) is (admission != "hinted")


@pytest.mark.parametrize("eviction", ["shelf_life", "heat"])
def test_orders_that_count_uses_see_each_one_of_a_replay(tmp_path, repeats, eviction):
    replayed(repeats, tmp_path, "--dram-blocks", DRAM_BLOCKS // 2, "--eviction", eviction)


def test_a_chain_that_fills_the_tier_is_replayed_as_it_is_simulated(tmp_path):
    requests = [list(range(95)), list(range(1000, 1010)), list(range(95)), list(range(2000, 2100)), list(range(80))]
    trace = written(tmp_path / "long.jsonl", requests * 3)
    replayed(trace, tmp_path, "--dram-blocks", 100, "--eviction", "lru")
