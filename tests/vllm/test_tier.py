"""kvstored behind vLLM's own pool in CPU memory."""

import pytest

from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.vllm_process import VLLMProcess as Engine
from tests.vllm import models
from tests.vllm.test_engine import FULL, PROMPTS, SETTINGS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def tiered(daemon, **tier):
    """An engine's options."""
    second = {"type": "KVStoredTier", "module_path": "kvstored_client.engines.vllm.tier", "address": daemon.address}
    second |= {"model_version": "tiny", "timeout_s": 60.0}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "CPUTieringSpec",
            "spec_module_path": "tests.vllm.cpu_tiering",
            "cpu_bytes_to_use": 16 << 20,
            "secondary_tiers": [second | tier],
        },
    }


def test_what_one_engine_computes_another_has_behind_its_own_pool(tmp_path):
    model = models.tiny_llama(tmp_path / "tiny")
    with Engine(model) as alone:
        expected = alone.generate(PROMPTS)["outputs"]
    with DaemonProcess(SETTINGS) as daemon:
        with Engine(model, transfer=tiered(daemon)) as engine:
            cold = engine.generate(PROMPTS)
            assert (cold["outputs"], cold["cached"]) == (expected, [0, 0, 0])
            engine.do("settle")
            engine.generate(PROMPTS[:1], tokens=1)  # its steps hear that the stores have ended
        with Engine(model, transfer=tiered(daemon)) as engine:
            warm = engine.generate(PROMPTS)
            assert (warm["outputs"], warm["cached"]) == (expected, [FULL] * 3)
            assert engine.do("counters")["external_prefix_cache_hits"] == 3 * FULL
        with Engine(model, transfer=tiered(daemon), prepare="tests.vllm.breakage:lose_chunks") as engine:
            lost = engine.generate(PROMPTS)
            assert lost["outputs"] == expected  # the rest was computed
            assert all(0 < cached < FULL for cached in lost["cached"])
        wrong = tiered(daemon, mode="read-only")
        with Engine(model, transfer=wrong) as engine:
            assert "no key 'mode'" in engine.refused
