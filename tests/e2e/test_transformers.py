"""Prefix reuse through a real daemon. Run as a script, this file is one process of an engine."""

import json
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstored_client import Client  # noqa: E402
from kvstored_client.engines.transformers import PrefixStore  # noqa: E402
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

from kvstored.testing.daemon_process import DaemonProcess  # noqa: E402

SETTINGS = {"dram.capacity_bytes": "64MiB", "dram.segment_bytes": "8MiB"}
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
PREFIX_TOKENS = 256
PATIENT = {"timeout_s": 60.0, "connect_timeout_s": 60.0}  # of clients in other processes


def tiny_llama(dtype=torch.float32):
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def prompt(question):
    """The same document for every question."""
    tokens = torch.Generator().manual_seed(99)
    document = torch.randint(3, 256, (1, PREFIX_TOKENS), generator=tokens)
    tail = torch.randint(3, 256, (1, 20), generator=torch.Generator().manual_seed(question))
    return torch.cat([document, tail], dim=1)


def engine_process(address, question):
    """Answer one question in a process of its own."""
    command = [sys.executable, __file__, address, str(question)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True, timeout=280).stdout)


@pytest.fixture
def daemon(tmp_path):
    with DaemonProcess(SETTINGS, parent_directory=tmp_path) as process:
        yield process


@pytest.mark.timeout(600)
def test_a_fresh_process_reuses_what_another_one_read(daemon):
    model = tiny_llama()
    first, second = engine_process(daemon.address, 1), engine_process(daemon.address, 2)
    assert first["reused_tokens"] == 0
    assert second["reused_tokens"] == PREFIX_TOKENS
    for question, answer in ((1, first), (2, second)):
        assert answer["tokens"] == model.generate(prompt(question), **GREEDY).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_after_a_restored_prefix_are_equal_bit_for_bit(daemon, dtype):
    model, ids = tiny_llama(dtype), prompt(3)
    for block_tokens in (16, 64, 256):
        with Client(daemon.address) as client, torch.inference_mode():
            store = PrefixStore(client, model, block_tokens=block_tokens)
            computed = DynamicCache(config=model.config)
            model(ids[:, :PREFIX_TOKENS], cache=computed, use_cache=True)
            assert store.save(ids[:, :PREFIX_TOKENS], computed) == PREFIX_TOKENS // block_tokens
            restored, reused = store.load(ids)
            assert reused == PREFIX_TOKENS
            tail = ids[:, PREFIX_TOKENS:]
            expected = model(tail, cache=computed, use_cache=True).logits
            assert torch.equal(model(tail, cache=restored, use_cache=True).logits, expected)


def test_nothing_stays_held_after_loads_and_saves(daemon):
    with Client(daemon.address) as client:
        store = PrefixStore(client, tiny_llama(), block_tokens=16)
        for question in (1, 2, 3):
            store.generate(prompt(question), **GREEDY)
        assert store.stats.reused_tokens == 2 * PREFIX_TOKENS
        counters = client.status().counters
    assert (counters["held_leases"], counters["held_reservations"]) == (0, 0)


def test_a_prompt_larger_than_the_store_is_saved_as_far_as_it_fits(tmp_path):
    model = tiny_llama()
    plain = model.generate(prompt(1), **GREEDY)
    # At 4 KiB a token the tier holds 16 of the prompt's 17 blocks.
    settings = {"dram.capacity_bytes": "1MiB", "dram.segment_bytes": "1MiB"}
    with DaemonProcess(settings, parent_directory=tmp_path) as daemon, Client(daemon.address) as client:
        store = PrefixStore(client, model, block_tokens=16, wait_s=0.1)
        for _ in range(2):
            assert torch.equal(store.generate(prompt(1), **GREEDY), plain)
        assert store.stats.failures == 0
        assert 0 < store.stats.reused_tokens <= PREFIX_TOKENS


def test_without_a_daemon_generation_is_what_it_is_without_the_store(tmp_path):
    model = tiny_llama()
    with Client(f"unix:{tmp_path}/nobody.sock") as client:
        store = PrefixStore(client, model, block_tokens=16)
        assert torch.equal(store.generate(prompt(1), **GREEDY), model.generate(prompt(1), **GREEDY))
        assert (store.stats.reused_tokens, store.stats.saved_blocks) == (0, 0)


def test_generation_goes_on_while_the_daemon_dies_and_comes_back(daemon):
    model = tiny_llama()
    plain = model.generate(prompt(1), **GREEDY)
    with Client(daemon.address) as client:
        store = PrefixStore(client, model, block_tokens=16)
        assert torch.equal(store.generate(prompt(1), **GREEDY), plain)
        daemon.kill()
        assert torch.equal(store.generate(prompt(1), **GREEDY), plain)
        assert store.stats.reused_tokens == 0
        daemon.start()
        while client.status() is None:
            time.sleep(0.05)
        store.generate(prompt(1), **GREEDY)
        assert torch.equal(store.generate(prompt(1), **GREEDY), plain)
        assert store.stats.reused_tokens == (PREFIX_TOKENS + 20 - 1) // 16 * 16


def _answer(address, question):
    model = tiny_llama()
    with Client(address, **PATIENT) as client:
        store = PrefixStore(client, model, block_tokens=64)
        tokens = store.generate(prompt(question), **GREEDY).tolist()
        print(json.dumps({"tokens": tokens, "reused_tokens": store.stats.reused_tokens}))


if __name__ == "__main__":
    _answer(sys.argv[1], int(sys.argv[2]))
