"""Other kinds of KV than one group of full attention: outputs are vLLM's own, and only what is needed is loaded."""

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from kvstored.testing.vllm_process import VLLMProcess as Engine
from tests.vllm import models
from tests.vllm.breakage import await_file
from tests.vllm.test_engine import BLOCK, FULL, PROMPTS, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TWO_WORKERS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
WINDOW = 128
WINDOW_BLOCKS = WINDOW // BLOCK  # that the last 127 tokens before a block's end lie in
LATENT = {"dtype": "float32", "block_size": 16}
LATENT_FULL = 541 // 16 * 16
BRANCHED = PROMPTS[0][:300] + PROMPTS[1][300:]  # shares what no prompt ends at


@pytest.fixture(scope="module")
def latent(directory):
    """A model with latent attention, and what vLLM answers with it."""
    path = models.tiny_deepseek(directory / "latent")
    with Engine(path, engine=LATENT) as one:
        return path, one.generate(PROMPTS)["outputs"]


def cold_and_warm(engine, expected, full):
    """Counters after the prompts were computed, and after they were loaded."""
    cold = engine.generate(PROMPTS)
    assert (cold["outputs"], cold["cached"]) == (expected, [0, 0, 0])
    engine.do("settle")
    before = engine.do("counters")
    warm = engine.generate(PROMPTS)
    assert (warm["outputs"], warm["cached"]) == (expected, [full] * 3)
    return before, engine.do("counters")


def test_fp8(model, daemon):
    engine = {"kv_cache_dtype": "fp8"}
    with Engine(model, engine=engine) as one:
        if "requires x86 with AVX-512" in one.refused:
            pytest.skip(one.refused)
        expected = one.generate(PROMPTS)["outputs"]
    with Engine(model, engine=engine, kvstored=store(daemon)) as one:
        cold_and_warm(one, expected, FULL)
    with Engine(model, kvstored=store(daemon)) as other:  # of bfloat16: nothing of it is this engine's
        assert other.generate(PROMPTS)["cached"] == [0, 0, 0]


@pytest.mark.parametrize("layers", [("sliding_attention", "full_attention") * 2, ("sliding_attention",) * 4])
def test_sliding_windows(layers, daemon, directory, tmp_path):
    model = models.tiny_gemma(directory / f"window-{layers[1]}", WINDOW, layers)
    with Engine(model) as one:
        expected = one.generate(PROMPTS)["outputs"]
        branched = one.generate([BRANCHED])["outputs"]
    held = {"prepare": "tests.vllm.breakage:hold_loads", "directory": str(tmp_path)}
    (tmp_path / "go").touch()
    with Engine(model, kvstored=store(daemon), **held) as one:
        _, counts = cold_and_warm(one, expected, FULL)
        whole = FULL // BLOCK if "full_attention" in layers else 0
        assert counts["kvstored_loaded_blocks"] == 3 * (whole + WINDOW_BLOCKS)
        one.do("settle")
        other = one.generate([BRANCHED])
        assert (other["outputs"], other["cached"]) == (branched, [300 // BLOCK * BLOCK])
        one.do("settle")
        for name in ("go", "entered"):
            (tmp_path / name).unlink()
        one.begin("generate", prompts=PROMPTS)
        await_file(tmp_path / "entered")
        daemon.kill()
        (tmp_path / "go").touch()
        failed = one.answer()
        assert (failed["outputs"], failed["finished"]) == (expected, ["length"] * 3)
        assert one.do("counters")["kvstored_failed_loads"] > counts["kvstored_failed_loads"]


def test_latent_attention(latent, daemon):
    model, expected = latent
    with Engine(model, engine=LATENT, kvstored=store(daemon)) as one:
        cold_and_warm(one, expected, LATENT_FULL)


def test_layers_that_lie_together_are_refused_at_the_start(latent, daemon):
    environ = {"VLLM_KV_CACHE_LAYOUT": "BLNHC"}
    with Engine(latent[0], environ=environ, engine=LATENT, kvstored=store(daemon)) as refused:
        assert "keeps all layers of a block together" in refused.refused


def test_latent_vectors_are_stored_by_one_of_two_workers(latent, daemon):
    model, expected = latent
    engine = {**LATENT, "tensor_parallel_size": 2}
    with Engine(model, environ=TWO_WORKERS, engine=engine, kvstored=store(daemon)) as one:
        before, counts = cold_and_warm(one, expected, LATENT_FULL)
        given = before["kvstored_saved_blocks"] + before["kvstored_existing_blocks"]
        assert 3 * LATENT_FULL // 16 <= given <= 3 * (541 + 16) // 16  # each once, the answers' too
        assert counts["kvstored_loaded_blocks"] == 2 * 3 * LATENT_FULL // 16  # by both workers


def test_two_workers(model, daemon):
    environ = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    engine = {"tensor_parallel_size": 2}
    with Engine(model, environ=environ, engine=engine) as one:
        expected = one.generate(PROMPTS)["outputs"]
    with Engine(model, environ=environ, engine=engine, kvstored=store(daemon)) as one:
        assert one.generate(PROMPTS)["outputs"] == expected
        assert one.do("settle")["reset"]
        warm = one.generate(PROMPTS)
        assert (warm["outputs"], warm["cached"]) == (expected, [FULL] * 3)


def test_adapters_do_not_see_each_other_s(model, daemon, directory):
    adapters = [(f"tone{n}", n, models.tiny_adapter(directory / f"tone{n}", n)) for n in (1, 2)]
    engine = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    ways = [None, *adapters]
    with Engine(model, engine=engine) as one:
        expected = [one.generate(PROMPTS[:1], lora=way)["outputs"] for way in ways]
    assert len({str(outputs) for outputs in expected}) == 3
    with Engine(model, engine=engine, kvstored=store(daemon)) as one:
        for full in (0, FULL):
            for way, outputs in zip(ways, expected, strict=True):
                answered = one.generate(PROMPTS[:1], lora=way)
                assert (answered["outputs"], answered["cached"]) == (outputs, [full]), way
            one.do("settle")
