import logging
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstored_client.engines.transformers import PrefixStore, UnsupportedCacheError  # noqa: E402
from kvstored_client.errors import Unavailable  # noqa: E402
from kvstored_client.keys import chain  # noqa: E402
from kvstored_proto.namespace import digest  # noqa: E402
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


class MemoryClient:
    """The client's verbs over a dict, with switches for what may go wrong."""

    def __init__(self, room=10**6):
        self.blocks = {}
        self.calls = Counter()
        self.room = room
        self.connected = True
        self.error = None
        self.deliver = True

    def namespace(self, spec):
        seed = digest("tests", spec)
        return SimpleNamespace(
            key=seed, chain_seed=seed, chain=lambda tokens, block_tokens: chain(seed, tokens, block_tokens)
        )

    def lookup(self, ns, hashes):
        self._called("lookup")
        return SimpleNamespace(prefix_blocks=self._leading(ns, hashes))

    @contextmanager
    def get(self, ns, hashes, wait_s=0.0):
        self._called("get")
        count = self._leading(ns, hashes)
        yield HeldBlocks([self.blocks[ns.key, h] for h in hashes[:count]], self.deliver)

    @contextmanager
    def stage(self, ns, hashes, block_bytes, parent=b"", wait_s=0.0):
        self._called("stage")
        assert not parent or (ns.key, parent) in self.blocks, "a child before its parent"
        wanted = [h for h in hashes if (ns.key, h) not in self.blocks]
        granted = set(wanted[: max(0, self.room - len(self.blocks))])
        buffers = {h: bytearray(block_bytes) for h in granted}

        def commit():
            self.blocks.update({(ns.key, h): bytes(buffer) for h, buffer in buffers.items()})
            return SimpleNamespace(stored=len(granted), existing=len(hashes) - len(wanted), pending=0)

        yield SimpleNamespace(views=[memoryview(buffers[h]) if h in granted else None for h in hashes], commit=commit)

    def _leading(self, ns, hashes):
        return next((i for i, h in enumerate(hashes) if (ns.key, h) not in self.blocks), len(hashes))

    def _called(self, verb):
        self.calls[verb] += 1
        if self.error:
            raise self.error


class HeldBlocks(list):
    def __init__(self, blocks, delivered):
        super().__init__(blocks)
        self._delivered = delivered
        self.sizes_bytes = [len(block) for block in blocks]

    def torch(self, index, dtype, shape):
        return torch.frombuffer(bytearray(self[index]), dtype=dtype).view(shape)

    def valid(self):
        return self._delivered


def tiny_llama(dtype=torch.float32, **settings):
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def prompt(tokens, seed=1):
    return torch.randint(0, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


def prefill(model, ids, cache):
    with torch.no_grad():
        return model(ids, cache=cache, use_cache=True).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [4, 16, 64])
def test_logits_after_a_restored_prefix_equal_those_of_a_split_forward(block_tokens, dtype):
    model, ids = tiny_llama(dtype), prompt(150)
    cut = 149 // block_tokens * block_tokens
    recomputed = DynamicCache(config=model.config)
    prefill(model, ids[:, :cut], recomputed)
    store = PrefixStore(MemoryClient(), model, block_tokens=block_tokens)
    store.save(ids[:, :cut], recomputed)
    restored, reused = PrefixStore(store._client, model, block_tokens=block_tokens).load(ids)
    assert reused == cut
    expected = prefill(model, ids[:, cut:], recomputed)
    assert torch.equal(prefill(model, ids[:, cut:], restored), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_tokens", [8, 64])
def test_greedy_tokens_with_the_store_equal_those_without(block_tokens, dtype):
    model, ids = tiny_llama(dtype), prompt(200)
    plain = model.generate(ids, **GREEDY)
    store = PrefixStore(MemoryClient(), model, block_tokens=block_tokens)
    assert torch.equal(store.generate(ids, **GREEDY), plain)
    assert store.stats.reused_tokens == 0
    assert torch.equal(store.generate(ids, **GREEDY), plain)
    assert store.stats.reused_tokens == 199 // block_tokens * block_tokens


def test_stores_that_name_the_same_weight_files_share_and_others_do_not(model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model.save_pretrained(tmp_path / "a")
    other = tiny_llama()
    other.model.layers[0].mlp.up_proj.weight.data += 1
    other.save_pretrained(tmp_path / "b")
    client, ids, cache = MemoryClient(), prompt(40), DynamicCache(config=model.config)
    prefill(model, ids, cache)
    assert PrefixStore(client, model, block_tokens=16, weights=tmp_path / "a").save(ids, cache) == 2
    for folder, reused in ((tmp_path / "a", 32), (tmp_path / "b", 0), (None, 0)):
        assert PrefixStore(client, model, block_tokens=16, weights=folder).load(ids)[1] == reused


def test_only_the_common_prefix_of_another_prompt_is_reused(model):
    store = PrefixStore(MemoryClient(), model, block_tokens=16)
    first = prompt(100)
    second = torch.cat([first[:, :70], prompt(40, seed=2)], dim=1)
    store.generate(first, **GREEDY)
    assert torch.equal(store.generate(second, **GREEDY), model.generate(second, **GREEDY))
    assert store.stats.reused_tokens == 64


def test_one_token_is_always_left_to_compute(model):
    store = PrefixStore(MemoryClient(), model, block_tokens=16)
    cache = DynamicCache(config=model.config)
    prefill(model, prompt(64), cache)
    assert store.save(prompt(64), cache) == 4
    assert store.load(prompt(64))[1] == 48


def test_only_full_blocks_that_are_missing_are_stored(model):
    client = MemoryClient()
    store = PrefixStore(client, model, block_tokens=16)
    store.generate(prompt(40), **GREEDY)
    assert store.stats.saved_blocks == len(client.blocks) == 2
    store.generate(prompt(40), **GREEDY)
    assert store.stats.saved_blocks == 2


def test_a_long_prompt_is_staged_in_pieces(model, monkeypatch):
    client = MemoryClient()
    store = PrefixStore(client, model, block_tokens=16)
    monkeypatch.setattr("kvstored_client.engines.transformers._STAGE_BYTES", 3 * store._geometry.block_bytes)
    store.generate(prompt(16 * 8), **GREEDY)
    assert client.calls["stage"] == 3
    assert store.stats.saved_blocks == 8
    assert store.load(prompt(16 * 8))[1] == 16 * 7


def test_saving_ends_where_the_store_is_full(model):
    client = MemoryClient(room=3)
    store = PrefixStore(client, model, block_tokens=4)
    store.generate(prompt(40), **GREEDY)
    assert store.stats.saved_blocks == 3
    assert store.load(prompt(40))[1] == 12


def test_generated_tokens_are_stored_on_request_only(model):
    for save_reply, blocks in ((False, 2), (True, 3)):
        store = PrefixStore(MemoryClient(), model, block_tokens=16, save_reply=save_reply)
        store.generate(prompt(40), **{**GREEDY, "max_new_tokens": 12})
        assert store.stats.saved_blocks == blocks


def test_a_reply_given_back_as_the_next_prompt_is_reused(model):
    store = PrefixStore(MemoryClient(), model, block_tokens=8, save_reply=True)
    turn = store.generate(prompt(30), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
    assert store.load(turn)[1] == 48


@pytest.mark.parametrize("block_tokens", [8, 16])
def test_other_weights_and_other_block_sizes_do_not_meet(model, block_tokens):
    client = MemoryClient()
    PrefixStore(client, model, block_tokens=16).generate(prompt(64), **GREEDY)
    other = model if block_tokens == 8 else tiny_llama(rms_norm_eps=1e-4)
    assert PrefixStore(client, other, block_tokens=block_tokens).load(prompt(64))[1] == 0


def test_a_store_that_fails_is_a_miss_and_a_warning(model, caplog):
    client = MemoryClient()
    client.error = Unavailable("no daemon")
    store = PrefixStore(client, model)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(store.generate(prompt(100), **GREEDY), model.generate(prompt(100), **GREEDY))
    assert store.stats.failures == 2
    assert "no daemon" in caplog.text


def test_a_daemon_never_reached_means_plain_generation(model):
    client = MemoryClient()
    store = PrefixStore(client, model, block_tokens=16)
    store._namespace.chain_seed = b""
    assert torch.equal(store.generate(prompt(50), **GREEDY), model.generate(prompt(50), **GREEDY))
    assert not client.calls


def test_bytes_that_were_not_delivered_are_not_used(model):
    client = MemoryClient()
    store = PrefixStore(client, model, block_tokens=16)
    store.generate(prompt(64), **GREEDY)
    client.deliver = False
    assert torch.equal(store.generate(prompt(64), **GREEDY), model.generate(prompt(64), **GREEDY))
    assert store.stats.reused_tokens == 0
    assert store.stats.failures == 1


def test_blocks_of_another_size_are_a_miss(model):
    client = MemoryClient()
    store = PrefixStore(client, model, block_tokens=16)
    store.generate(prompt(64), **GREEDY)
    client.blocks = {key: block[:-4] for key, block in client.blocks.items()}
    assert store.load(prompt(64))[1] == 0
    assert store.stats.failures == 1


def test_a_batch_is_refused_by_load_and_save(model):
    store = PrefixStore(MemoryClient(), model)
    with pytest.raises(UnsupportedCacheError, match="one sequence"):
        store.load(torch.zeros(2, 8, dtype=torch.long))
    cache = DynamicCache(config=model.config)
    prefill(model, prompt(8), cache)
    with pytest.raises(UnsupportedCacheError, match="one sequence"):
        store.save(torch.zeros(2, 8, dtype=torch.long), cache)


def test_a_cache_of_another_model_is_refused_by_save(model):
    store = PrefixStore(MemoryClient(), model, block_tokens=4)
    cache = DynamicCache([(torch.zeros(1, 3, 8, 16), torch.zeros(1, 3, 8, 16))] * 3)
    with pytest.raises(UnsupportedCacheError, match="keys of cache layer 0"):
        store.save(prompt(8), cache)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_beams": 2}, "beam"),
        ({"num_return_sequences": 2, "do_sample": True}, "several sequences"),
        ({"use_cache": False}, "its own cache"),
        ({"cache_implementation": "static"}, "its own cache"),
        ({"prompt_lookup_num_tokens": 2}, "assisted"),
        ({"attention_mask": torch.tensor([[0] * 4 + [1] * 36])}, "hides tokens"),
        ({"position_ids": torch.arange(40)[None]}, "position_ids"),
        ({"generation_config": GenerationConfig(num_beams=2, max_new_tokens=3, pad_token_id=0)}, "beam"),
    ],
)
def test_a_generation_that_one_restored_cache_cannot_serve_bypasses_the_store(model, arguments, reason):
    client = MemoryClient()
    store = PrefixStore(client, model, block_tokens=16)
    store.generate(prompt(40), **GREEDY)
    client.calls.clear()
    torch.manual_seed(1)
    through_store = store.generate(prompt(40), **GREEDY | arguments)
    torch.manual_seed(1)
    assert torch.equal(through_store, model.generate(prompt(40), **GREEDY | arguments))
    assert not client.calls
    assert any(reason in text for text in store.stats.bypassed)


def test_a_batch_goes_to_the_model_without_the_store(model):
    store = PrefixStore(MemoryClient(), model, block_tokens=16)
    ids = torch.cat([prompt(40), prompt(40, seed=2)])
    assert torch.equal(store.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
    assert sum(store.stats.bypassed.values()) == 1


def test_a_full_attention_mask_and_sampling_use_the_store(model):
    store = PrefixStore(MemoryClient(), model, block_tokens=16)
    arguments = {**GREEDY, "do_sample": True, "attention_mask": torch.ones(1, 40)}
    for _ in range(2):
        torch.manual_seed(5)
        answer = store.generate(prompt(40), **arguments)
    torch.manual_seed(5)
    assert torch.equal(answer, model.generate(prompt(40), **arguments))
    assert store.stats.reused_tokens == 32


def test_a_returned_dict_is_passed_through(model):
    store = PrefixStore(MemoryClient(), model, block_tokens=16)
    output = store.generate(prompt(40), return_dict_in_generate=True, output_scores=True, **GREEDY)
    assert len(output.scores) == output.sequences.shape[1] - 40
    assert store.stats.saved_blocks == 2
