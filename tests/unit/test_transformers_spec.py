import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstored_client.engines.transformers_blocks import UnsupportedCacheError  # noqa: E402
from kvstored_client.engines.transformers_spec import (  # noqa: E402
    geometry_of,
    namespace_spec,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from kvstored_client.identity import spec_from_hf_config  # noqa: E402
from kvstored_client.weights import weights_fingerprint as file_fingerprint  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(seed=0, **settings):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SMALL | settings)).eval()


def spec_of(model, block_tokens=16, tokenizer=None, **overrides):
    return namespace_spec(model, geometry_of(model, block_tokens), tokenizer, overrides)


def test_geometry_comes_from_the_config():
    geometry = geometry_of(llama().to(torch.bfloat16), 16)
    assert geometry.block_shape == (2, 2, 2, 16, 8)
    assert geometry.block_bytes == 2 * 2 * 2 * 16 * 8 * 2


def test_the_spec_names_what_the_bytes_depend_on():
    spec = spec_of(llama(rope_parameters={"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}))
    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.block_tokens, spec.dtype) == (2, 2, 8, 16, "float32")
    assert spec.rope_theta == 5000.0
    assert spec.rope_scaling == '{"factor":2.0,"rope_type":"linear"}'
    assert "attention=" in spec.engine_format
    assert spec.layout == "layers,kv,heads,tokens,dim"


def test_two_processes_with_the_same_model_get_the_same_spec():
    assert spec_of(llama(seed=3)) == spec_of(llama(seed=3))


@pytest.mark.parametrize(
    "changed",
    [
        lambda: spec_of(llama(seed=1)),
        lambda: spec_of(llama().to(torch.bfloat16)),
        lambda: spec_of(llama(), block_tokens=32),
        lambda: spec_of(llama(rms_norm_eps=1e-5)),
        lambda: spec_of(llama(rope_parameters={"rope_theta": 5000.0, "rope_type": "default"})),
        lambda: spec_of(llama(attn_implementation="eager")),
        lambda: spec_of(llama(), permission_version="2"),
    ],
)
def test_a_difference_that_changes_the_bytes_changes_the_spec(changed):
    assert changed() != spec_of(llama())


def test_where_a_model_lies_on_disk_does_not_change_the_spec():
    here, there = llama(), llama()
    here.config._name_or_path, there.config._name_or_path = "/a/b/smol", "/c/smol"
    assert spec_of(here) == spec_of(there)
    assert spec_of(here).model == "smol"


def test_a_small_edit_of_one_tensor_changes_the_fingerprint():
    model = llama()
    before = weights_fingerprint(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.0001)
    assert weights_fingerprint(model) != before


def test_large_tensors_are_sampled_up_to_their_end():
    model = llama(vocab_size=4096)
    before = weights_fingerprint(model)
    with torch.no_grad():
        model.lm_head.weight[-8:] += 1
    assert weights_fingerprint(model) != before


def test_the_files_of_the_weights_stand_for_them_where_they_are_given(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = llama()
    model.save_pretrained(tmp_path / "m")
    geometry = geometry_of(model, 16)
    spec = namespace_spec(model, geometry, None, {}, tmp_path / "m")
    assert spec.model_version == file_fingerprint(tmp_path / "m") != spec_of(model).model_version
    assert namespace_spec(model, geometry, None, {"model_version": "mine"}, tmp_path / "m").model_version == "mine"
    llama(seed=1).save_pretrained(tmp_path / "other")
    assert namespace_spec(model, geometry, None, {}, tmp_path / "other") != spec


def test_a_saved_model_has_the_shape_that_its_config_file_says(tmp_path):
    model = llama(rope_parameters={"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0})
    model.save_pretrained(tmp_path)
    ours, files = spec_of(model), spec_from_hf_config(tmp_path)
    for name in (
        "layers",
        "kv_heads",
        "head_dim",
        "block_tokens",
        "dtype",
        "rope_theta",
        "rope_scaling",
        "quantization",
    ):
        assert getattr(ours, name) == getattr(files, name), name


def test_the_vocabulary_of_a_slow_tokenizer_is_its_version():
    class Slow:
        def __init__(self, vocabulary):
            self.get_vocab = lambda: vocabulary

    one, same, other = Slow({"a": 0, "b": 1}), Slow({"b": 1, "a": 0}), Slow({"a": 1, "b": 0})
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(same)
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)
    assert spec_of(llama(), tokenizer=one) != spec_of(llama(), tokenizer=other)


def test_an_unknown_field_of_the_spec_is_an_error():
    with pytest.raises(ValueError, match="colour"):
        spec_of(llama(), colour="red")


def test_a_block_has_at_least_one_token():
    with pytest.raises(ValueError, match="block_tokens is 0"):
        geometry_of(llama(), 0)


def test_a_model_with_sliding_windows_is_refused_and_the_layer_named():
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8))
    with pytest.raises(UnsupportedCacheError, match="layer 0 is a DynamicSlidingWindowLayer"):
        geometry_of(model, 16)


def test_rope_that_depends_on_the_length_of_the_sequence_is_refused():
    model = llama(rope_parameters={"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedCacheError, match="rope_type is dynamic"):
        geometry_of(model, 16)


def test_loaded_adapters_are_refused_by_name():
    model = llama()
    model.peft_config = {"legal": object()}
    with pytest.raises(UnsupportedCacheError, match="legal"):
        geometry_of(model, 16)


def test_weights_that_are_not_there_are_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with pytest.raises(UnsupportedCacheError, match="meta"):
        geometry_of(model, 16)
