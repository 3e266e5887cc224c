"""A real model: cold, in a new process, and after the daemon was restarted."""

import json
import random
import subprocess
import sys

import pytest

from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.vllm_process import VLLMProcess as Engine
from tests.vllm.test_engine import NVME, SETTINGS, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DRAW = random.Random(3)
PROMPTS = [[DRAW.randrange(1_000, 49_152) for _ in range(700)] for _ in range(2)]
FULL = 700 // 32 * 32
ENGINE = {"kv_cache_memory_bytes": 128 << 20, "max_model_len": 1024}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("smollm2")
    job, target = directory / "job.json", directory / "SmolLM2-135M-Instruct"
    job.write_text(json.dumps({"model_dir": str(target)}))
    subprocess.run([sys.executable, "-m", "bench.demo_reader", str(job)], check=True, capture_output=True, timeout=600)
    return str(target)


def test_a_real_model(model):
    with Engine(model, engine=ENGINE) as alone:
        expected = alone.generate(PROMPTS)["outputs"]
    with DaemonProcess({**SETTINGS, **NVME}, nvme=True) as daemon:
        stored = store(daemon)
        with Engine(model, engine=ENGINE, kvstored=stored) as engine:
            cold = engine.generate(PROMPTS)
            assert (cold["outputs"], cold["cached"]) == (expected, [0, 0])
            assert engine.do("settle")["reset"]
        for _ in range(2):  # from DRAM, then from NVMe
            with Engine(model, engine=ENGINE, kvstored=stored) as engine:
                warm = engine.generate(PROMPTS)
                assert (warm["outputs"], warm["cached"]) == (expected, [FULL, FULL])
            daemon.restart()
