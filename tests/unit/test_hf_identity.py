"""Namespaces of Hugging Face models from config and weights: what they read, and that what differs never matches."""

import copy
import json
import os
import shutil
import struct
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvstored_client import adapter_identity, spec_from_hf_config, weights_fingerprint
from kvstored_client.hf_config import ConfigError
from kvstored_client.weights import WeightsError
from kvstored_proto import namespace

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def spec_of(config=LLAMA, **arguments):
    return spec_from_hf_config(config, **{"model_version": "v1", **arguments})


def with_(**changed):
    return {key: value for key, value in {**LLAMA, **changed}.items() if value is not None}


def weights(folder, fill=1, name="model.safetensors"):
    header = json.dumps({"w": {"dtype": "U8", "shape": [9000], "data_offsets": [0, 9000]}}).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + bytes([fill]) * 9000)
    return folder


def model(folder, config=LLAMA, fill=1):
    weights(folder, fill)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- what it reads ----


def test_a_directory_is_all_that_is_needed(tmp_path):
    folder = model(tmp_path / "smol")
    spec = spec_from_hf_config(folder, tp_rank=1, tp_size=2, layout="l", template_version="t")
    assert (spec.model, spec.model_version) == ("smol", weights_fingerprint(folder))
    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.block_tokens) == (32, 8, 128, 16)
    assert (spec.dtype, spec.rope_theta, spec.rope_scaling) == (
        "bfloat16",
        500000.0,
        '{"factor":8.0,"rope_type":"llama3"}',
    )
    assert (spec.tp_rank, spec.tp_size, spec.pp_rank, spec.pp_size) == (1, 2, 0, 1)
    assert (spec.layout, spec.template_version, spec.kv_group_kind, spec.window_tokens) == ("l", "t", "", 0)
    assert spec.extra.startswith("config=")
    assert spec == spec_from_hf_config(
        str(folder / "config.json"), tp_rank=1, tp_size=2, layout="l", template_version="t"
    )


def test_a_moved_model_has_the_same_spec_and_another_fine_tune_has_not(tmp_path):
    first = spec_from_hf_config(model(tmp_path / "a" / "smol"))
    assert spec_from_hf_config(model(tmp_path / "b" / "smol")) == first
    assert spec_from_hf_config(model(tmp_path / "c" / "smol", fill=2)) != first


def test_a_model_in_the_cache_of_the_hub_is_called_like_its_repository(tmp_path):
    folder = model(tmp_path / "models--org--smol-1" / "snapshots" / "0123abcd")
    assert spec_from_hf_config(folder).model == "org/smol-1"


SHAPES = {
    "gpt2": ({"n_layer": 12, "n_head": 12, "n_embd": 768}, (12, 12, 64)),
    "falcon": ({"multi_query": True, "num_attention_heads": 71, "hidden_size": 4544, "num_kv_heads": 71}, (0, 1, 64)),
    "head_dim": ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "head_dim": 32}, (2, 4, 32)),
    "latent": (
        {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        (61, 1, 576),
    ),
    "nested": ({"text_config": {"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 8}}, (3, 2, 4)),
    "strange": ({"num_hidden_layers": -1, "num_attention_heads": True, "num_kv_heads": [1, 2]}, (0, 0, 0)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_in_the_words_of_many_architectures(name):
    config, shape = SHAPES[name]
    spec = spec_of(config, dtype="float16")
    assert (spec.layers, spec.kv_heads, spec.head_dim) == shape


ROPES = {
    "none": ({}, (0.0, "")),
    "theta": ({"rope_theta": 10000}, (10000.0, "")),
    "old name": ({"rotary_emb_base": 10000, "rotary_pct": 0.25}, (10000.0, '{"rotary_pct":0.25}')),
    "default": ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, (1e6, "")),
    "type": (
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        (1e6, '{"factor":4.0,"rope_type":"yarn"}'),
    ),
    "parameters": (
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
        (1e6, '{"factor":4.0,"rope_type":"yarn"}'),
    ),
    "two bases": (
        {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        (1e6, '{"factor":8.0,"rope_local_base_freq":10000.0,"rope_type":"linear"}'),
    ),
    "per layer type": (
        {
            "rope_parameters": {
                "full_attention": {"type": "linear", "rope_theta": 1e6},
                "sliding_attention": {"rope_theta": 1e4},
            }
        },
        (
            0.0,
            '{"full_attention":{"rope_theta":1000000.0,"rope_type":"linear"},"sliding_attention":{"rope_theta":10000.0}}',
        ),
    ),
    "unreadable": ({"rope_theta": "big", "rope_scaling": [1]}, (0.0, '{"rope_scaling":[1]}')),
    "alibi": ({"alibi": True}, (0.0, '{"alibi":true}')),
}


@pytest.mark.parametrize("name", ROPES)
def test_all_forms_of_rotary_settings(name):
    config, expected = ROPES[name]
    spec = spec_of({**config, "dtype": "float16"})
    assert (spec.rope_theta, spec.rope_scaling) == expected


WINDOWS = {
    "all": ({"model_type": "mistral", "sliding_window": 4096}, (4096, "window", "")),
    "all by type": ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, (8, "window", "")),
    "off": ({"sliding_window": 4096, "use_sliding_window": False}, (0, "", "")),
    "no type": ({"model_type": "gemma2", "sliding_window": 4096}, (0, "", ";sliding_window=4096")),
    "full": ({"layer_types": ["full_attention"] * 2}, (0, "", "")),
    "mixed": (
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8},
        (0, "", ";layer_types=full_attention:1,sliding_attention:2;sliding_window=8"),
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_and_layers_of_several_kinds(name):
    config, (window, kind, words) = WINDOWS[name]
    spec = spec_of({**config, "dtype": "float16"})
    assert (spec.window_tokens, spec.kv_group_kind) == (window, kind)
    assert spec.extra[len("config=") + 32 :] == words


def test_types_have_one_name_and_stored_ones_may_differ_from_computed_ones():
    for name in ("bfloat16", "BF16", "torch.bfloat16"):
        assert spec_of(dtype=name) == spec_of()
    stored = spec_of(kv_dtype="fp8_e4m3")
    assert stored.dtype == "fp8_e4m3"
    assert stored.extra.endswith(";dtype=bfloat16")
    assert stored != spec_of(kv_dtype="fp8_e4m3", dtype="float16")


def test_own_fields_win_and_extra_is_added_to():
    spec = spec_of(extra="tools=off", layers=7, model="mine", kv_group=1)
    assert (spec.layers, spec.model, spec.kv_group) == (7, "mine", 1)
    assert spec.extra == f"{spec_of().extra};tools=off"
    with pytest.raises(ValueError, match="colour"):
        spec_of(colour="red")


def test_what_names_or_steers_changes_nothing():
    for changed in ({"_name_or_path": "/x/llama"}, {"transformers_version": "9"}, {"use_cache": False}):
        assert spec_of(with_(**changed)).extra == spec_of().extra


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": with_(torch_dtype=None)}, "give dtype="),
        ({"config": with_(torch_dtype="auto")}, "give dtype="),
        ({"config": with_(is_encoder_decoder=True)}, "encoder-decoder"),
        ({"config": 7}, "a int is no config"),
        ({"config": "/absent"}, "/absent is not there"),
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank is 2 of tp_size 2"),
        ({"pp_rank": -1}, "pp_rank is -1"),
        ({"block_tokens": 0}, "block_tokens is 0"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(**arguments)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_file_that_is_no_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json is no"):
        spec_of(tmp_path)


def test_weights_must_be_told(tmp_path):
    with pytest.raises(ConfigError, match="give weights="):
        spec_from_hf_config(LLAMA)
    with pytest.raises(ConfigError, match="give weights="):
        spec_from_hf_config({**LLAMA, "_name_or_path": "org/llama"})
    with pytest.raises(WeightsError, match="has no weights"):
        spec_from_hf_config(LLAMA, weights=tmp_path)
    folder = weights(tmp_path / "w")
    assert spec_from_hf_config(LLAMA, weights=folder).model_version == weights_fingerprint(folder)
    assert spec_from_hf_config({**LLAMA, "_name_or_path": str(folder)}).model_version == weights_fingerprint(folder)


def test_an_adapter_is_known_by_its_settings_and_its_weights(tmp_path):
    def adapter(folder, fill=1, alpha=16):
        weights(tmp_path / folder / "legal", fill, "adapter_model.safetensors")
        settings = {"r": 8, "lora_alpha": alpha, "base_model_name_or_path": folder}
        (tmp_path / folder / "legal" / "adapter_config.json").write_text(json.dumps(settings))
        return adapter_identity(tmp_path / folder / "legal")

    first = adapter("a")
    assert first.startswith("legal:")
    assert adapter("b") == first
    assert len({first, adapter("c", fill=2), adapter("d", alpha=32)}) == 3
    shutil.rmtree(tmp_path / "a" / "legal")
    with pytest.raises(ConfigError, match="adapter_config"):
        adapter_identity(tmp_path / "a" / "legal")


def test_a_path_that_is_no_text_is_named_all_the_same(tmp_path):
    folder = model(tmp_path / os.fsdecode(b"smol-\xff"))
    assert spec_from_hf_config(folder).model == "smol-\\udcff"


# ---- what differs never matches ----

NUMBERS = st.integers(1, 1 << 20)
CHANGES = {
    "layers": lambda n: {"config": with_(num_hidden_layers=n)},
    "kv heads": lambda n: {"config": with_(num_key_value_heads=n)},
    "width": lambda n: {"config": with_(hidden_size=32 * n)},
    "head dim": lambda n: {"config": with_(head_dim=n)},
    "latent": lambda n: {"config": with_(kv_lora_rank=n, qk_rope_head_dim=64)},
    "norm": lambda n: {"config": with_(rms_norm_eps=1e-6 * n)},
    "what nobody knows": lambda n: {"config": with_(brand_new={"deep": [n]})},
    "theta": lambda n: {"config": with_(rope_theta=float(n))},
    "rope factor": lambda n: {"config": with_(rope_scaling={"rope_type": "llama3", "factor": n / 16})},
    "rope type": lambda n: {"config": with_(rope_scaling={"rope_type": f"t{n}", "factor": 8.0})},
    "rope of one layer type": lambda n: {
        "config": with_(rope_theta=None, rope_scaling=None, rope_parameters={"full_attention": {"rope_theta": n}})
    },
    "window": lambda n: {"config": with_(model_type="mistral", sliding_window=n)},
    "layer types": lambda n: {"config": with_(layer_types=["full_attention"] * (n % 50) + ["mamba"])},
    "quantisation": lambda n: {"config": with_(quantization_config={"bits": n})},
    "weights": lambda n: {"model_version": f"v1.{n}"},
    "type": lambda n: {"dtype": ("float16", "float32")[n % 2]},
    "stored type": lambda n: {"kv_dtype": ("fp8_e4m3", "fp8_e5m2", "float16")[n % 3]},
    "block": lambda n: {"block_tokens": 16 + n},
    "tensor ranks": lambda n: {"tp_size": 1 + n},
    "tensor rank": lambda n: {"tp_rank": n, "tp_size": n + 1},
    "pipeline ranks": lambda n: {"pp_size": 1 + n},
    "pipeline rank": lambda n: {"pp_rank": n, "pp_size": n + 1},
    "adapter": lambda n: {"adapter": f"legal:{n}"},
    "layout": lambda n: {"layout": f"order {n}"},
    "tokenizer": lambda n: {"tokenizer_version": str(n)},
    "extra": lambda n: {"extra": str(n)},
}
CHANGE = st.tuples(st.sampled_from(sorted(CHANGES)), NUMBERS)


def arguments_of(change):
    name, number = change
    return {"config": LLAMA, **CHANGES[name](number)}


def digest(arguments):
    return namespace.digest("t", spec_of(model="same", **copy.deepcopy(arguments)))


@settings(
    max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(CHANGE, CHANGE)
def test_one_name_and_any_difference_never_match(one, other):
    first, second = arguments_of(one), arguments_of(other)
    assert (digest(first) == digest(second)) == (first == second)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_each_difference_from_the_same_model_is_another_namespace(name):
    assert digest(arguments_of((name, 77))) != digest({"config": LLAMA})


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_shards_share_their_chain_seed_and_nothing_else_does(name):
    def seed(arguments):
        return namespace.chain_seed("t", spec_of(model="same", **arguments))

    shard = "rank" in name
    assert (seed(arguments_of((name, 77))) == seed({"config": LLAMA})) == shard


# ---- with Transformers, and without ----


def test_config_objects_of_transformers_say_the_same_about_shapes():
    transformers = pytest.importorskip("transformers")
    spec = spec_of(transformers.LlamaConfig(num_key_value_heads=8, rope_theta=500000.0), dtype="bfloat16")
    assert (spec.layers, spec.kv_heads, spec.head_dim, spec.dtype) == (32, 8, 128, "bfloat16")
    latent = spec_of(transformers.DeepseekV3Config(), dtype="bfloat16")
    assert (latent.kv_heads, latent.head_dim) == (1, 576)
    mixed = spec_of(transformers.Gemma3TextConfig(), dtype="bfloat16")
    assert "sliding_attention" in mixed.rope_scaling
    assert "layer_types=full_attention:4,sliding_attention:22" in mixed.extra


def test_it_needs_neither_torch_nor_transformers():
    heavy = {"torch", "transformers", "safetensors"}
    code = f"import sys, kvstored_client.identity; print(sorted({heavy} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
