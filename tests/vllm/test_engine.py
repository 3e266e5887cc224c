"""Outputs of a real vLLM with the connector are those of vLLM alone, and what was loaded is counted."""

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.vllm_process import VLLMProcess as Engine
from tests.vllm import models
from tests.vllm.breakage import await_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = {"dram.capacity_bytes": "256MiB", "dram.segment_bytes": "16MiB"}
NVME = {"nvme.capacity_bytes": "512MiB", "nvme.extent_bytes": "32MiB"}
BLOCK = 32
PROMPTS = models.prompts(3, 541)
FULL = 541 // BLOCK * BLOCK  # what can be loaded of each
SHARED = models.prompts(3, 541, seed=5, shared=FULL)
LONG = models.prompts(4, 452, seed=2)
LONG_TOKENS = 110


@pytest.fixture(scope="module")
def alone(model):
    """What vLLM answers without the connector."""
    with Engine(model) as engine:
        return {"outputs": engine.generate(PROMPTS)["outputs"], "shared": engine.generate(SHARED)["outputs"]}


@pytest.fixture(scope="module")
def filled_daemon(model, alone):
    """One that has the prompts, for tests that only load them."""
    with DaemonProcess(SETTINGS) as process:
        filled(model, process, alone["outputs"])
        yield process


def store(daemon, **settings):
    """The connector's settings; it is patient, since others may use the CPUs: what is late is computed, and no hit."""
    limits = dict.fromkeys(("timeout_s", "lookup_wait_s", "load_timeout_s", "save_wait_s"), 60.0)
    return {"address": daemon.address, **limits, **settings}


def filled(model, daemon, expected):
    """Have an engine compute and save the prompts."""
    with Engine(model, kvstored=store(daemon)) as engine:
        cold = engine.generate(PROMPTS)
        assert cold["outputs"] == expected
        assert cold["cached"] == [0, 0, 0]
        assert engine.do("settle") == {"reset": True}


def test_cold_then_warm_in_the_same_process_then_apart_by_salt(model, alone, daemon):
    with Engine(model, kvstored=store(daemon)) as engine:
        cold = engine.generate(PROMPTS)
        assert (cold["outputs"], cold["cached"]) == (alone["outputs"], [0, 0, 0])
        engine.do("settle")
        warm = engine.generate(PROMPTS)
        assert (warm["outputs"], warm["cached"]) == (alone["outputs"], [FULL] * 3)
        counts = engine.do("counters")
        assert counts["external_prefix_cache_hits"] == counts["kvstored_hit_tokens"] == 3 * FULL
        assert counts["kvstored_loaded_blocks"] == 3 * FULL // BLOCK
        assert counts["kvstored_failed_loads"] == counts["kvstored_cancelled_saves"] == 0
        for salt, cached in (("a", 0), ("b", 0), ("a", FULL), (None, FULL)):
            engine.do("settle")
            salted = engine.generate(PROMPTS[:1], salt=salt)
            assert (salted["outputs"], salted["cached"]) == (alone["outputs"][:1], [cached]), salt


@pytest.mark.parametrize("load_async", [True, False])
def test_warm_in_a_new_process(model, alone, filled_daemon, load_async):
    sync = {} if load_async else {"engine": {"async_scheduling": False}}
    with Engine(model, kvstored=store(filled_daemon, load_async=load_async), **sync) as engine:
        warm = engine.generate(PROMPTS)
        assert (warm["outputs"], warm["cached"]) == (alone["outputs"], [FULL] * 3)
        assert engine.do("counters")["external_prefix_cache_hits"] == 3 * FULL


def test_requests_that_share_a_prefix_load_it_once(model, alone, daemon):
    with Engine(model, kvstored=store(daemon)) as engine:
        assert engine.generate(SHARED[:1])["outputs"] == alone["shared"][:1]
        engine.do("settle")
        at_once = engine.generate(SHARED)
        assert (at_once["outputs"], at_once["cached"]) == (alone["shared"], [FULL] * 3)
        assert engine.do("counters")["kvstored_loaded_blocks"] == FULL // BLOCK


def test_engine_and_scheduler_in_processes_of_their_own(model, alone, filled_daemon):
    with Engine(model, kvstored=store(filled_daemon), environ={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}) as engine:
        warm = engine.generate(PROMPTS)
        assert (warm["outputs"], warm["cached"]) == (alone["outputs"], [FULL] * 3)


def test_after_a_restart_of_the_daemon_and_with_a_corrupt_block(model, alone):
    with DaemonProcess({**SETTINGS, **NVME}, nvme=True) as daemon:
        filled(model, daemon, alone["outputs"])
        daemon.restart()
        with Engine(model, kvstored=store(daemon)) as engine:
            warm = engine.generate(PROMPTS)
            assert (warm["outputs"], warm["cached"]) == (alone["outputs"], [FULL] * 3)
        daemon.stop()
        (extent,) = (daemon.nvme_path / "extents").iterdir()
        with extent.open("r+b") as file:  # in the middle of the first blocks
            for at in range(4096 * 5, 1 << 20, 300_000):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
        daemon.start()
        with Engine(model, kvstored=store(daemon)) as engine:
            corrupt = engine.generate(PROMPTS)
            assert corrupt["outputs"] == alone["outputs"]
            assert 0 < sum(corrupt["cached"]) < 3 * FULL
            engine.do("settle")  # what was computed again is stored again
            again = engine.generate(PROMPTS)
            assert (again["outputs"], again["cached"]) == (alone["outputs"], [FULL] * 3)


def test_preemption(model, daemon):
    # In float32: what is computed again after a preemption is rounded otherwise in bfloat16, by vLLM alone too.
    exact = {"dtype": "float32", "max_model_len": 1024}
    with Engine(model, engine=exact) as engine:
        expected = engine.generate(LONG, tokens=LONG_TOKENS)["outputs"]
    few = {**exact, "num_gpu_blocks_override": 50, "max_num_seqs": 8}
    with Engine(model, kvstored=store(daemon), engine=few) as engine:
        for _ in range(2):
            assert engine.generate(LONG, tokens=LONG_TOKENS)["outputs"] == expected
            assert engine.do("settle") == {"reset": True}
        counts = engine.do("counters")
        assert counts["num_preemptions"] > 0
        assert counts["external_prefix_cache_hits"] > 0
        assert counts["kvstored_failed_loads"] == 0


def test_an_abort_in_mid_load_keeps_its_blocks_until_the_load_ends(model, alone, filled_daemon, tmp_path):
    held = {"prepare": "tests.vllm.breakage:hold_loads", "directory": str(tmp_path)}
    with Engine(model, kvstored=store(filled_daemon), actions="tests.vllm.breakage", **held) as engine:
        aborted = engine.do("abort_in_load", prompt=PROMPTS[0], directory=str(tmp_path))
        assert aborted["used"] == aborted["kept"] > 0
        assert aborted["left"] == 0
        assert aborted["reset"]
        after = engine.generate(PROMPTS)
        assert (after["outputs"], after["cached"]) == (alone["outputs"], [FULL] * 3)


def test_the_daemon_is_killed_in_mid_load_and_comes_back(model, alone, daemon, tmp_path):
    filled(model, daemon, alone["outputs"])
    held = {"prepare": "tests.vllm.breakage:hold_loads", "directory": str(tmp_path)}
    with Engine(model, kvstored=store(daemon), **held) as engine:
        engine.begin("generate", prompts=PROMPTS)
        await_file(tmp_path / "entered")
        daemon.kill()
        (tmp_path / "go").touch()
        failed = engine.answer()
        assert failed["outputs"] == alone["outputs"]
        assert failed["finished"] == ["length"] * 3
        assert engine.do("counters")["kvstored_failed_loads"] > 0
        engine.do("settle")
        assert engine.generate(PROMPTS)["outputs"] == alone["outputs"]  # still gone
        engine.do("settle")
        daemon.start()
        for _ in range(20):  # until the client has tried again
            back = engine.generate(PROMPTS)
            assert back["outputs"] == alone["outputs"]
            engine.do("settle")
            if back["cached"] == [FULL] * 3:
                return
        raise AssertionError("nothing hits after the daemon is back")


def test_without_a_daemon_nothing_is_lost_but_time(model, alone, tmp_path):
    with Engine(model, kvstored={"address": f"unix:{tmp_path}/nobody"}) as engine:
        assert engine.generate(PROMPTS)["outputs"] == alone["outputs"]


def test_two_models_do_not_see_each_other_s(model, alone, daemon, directory):
    other = models.tiny_llama(directory / "other", seed=1)
    with Engine(model, kvstored=store(daemon)) as one, Engine(other, kvstored=store(daemon)) as two:
        assert one.generate(PROMPTS)["outputs"] == alone["outputs"]
        one.do("settle")
        theirs = two.generate(PROMPTS)
        assert theirs["cached"] == [0, 0, 0]
        assert theirs["outputs"] != alone["outputs"]
        two.do("settle")
        warm = two.generate(PROMPTS)
        assert (warm["outputs"], warm["cached"]) == (theirs["outputs"], [FULL] * 3)
        again = one.generate(PROMPTS)
        assert (again["outputs"], again["cached"]) == (alone["outputs"], [FULL] * 3)


def test_one_engine_computes_and_another_goes_on(model, alone, daemon):
    with (
        Engine(model, kvstored=store(daemon, mode="write-only")) as prefill,
        Engine(model, kvstored=store(daemon, mode="read-only"), by_name=True) as decode,
    ):
        assert prefill.generate(PROMPTS, tokens=1)["cached"] == [0, 0, 0]
        prefill.do("settle")
        handed = decode.generate(PROMPTS)
        assert (handed["outputs"], handed["cached"]) == (alone["outputs"], [FULL] * 3)
        decode.do("settle")
        counts = decode.do("counters")
        assert counts["kvstored_saved_blocks"] == counts["kvstored_existing_blocks"] == 0


def test_what_is_loaded_is_really_used(model, alone, daemon):
    with Engine(model, kvstored=store(daemon), prepare="tests.vllm.breakage:zero_saves") as engine:
        assert engine.generate(PROMPTS)["outputs"] == alone["outputs"]
        engine.do("settle")
    with Engine(model, kvstored=store(daemon)) as engine:
        zeros = engine.generate(PROMPTS)
        assert zeros["cached"] == [FULL] * 3
        assert all(one != other for one, other in zip(zeros["outputs"], alone["outputs"], strict=True))


def test_what_is_not_supported_is_refused_at_the_start(model, daemon):
    with Engine(model, kvstored=store(daemon), engine={"prefix_caching_hash_algo": "xxhash"}) as refused:
        assert "xxhash" in refused.refused
