"""`kvstorectl plan`: worked examples, configs as they are published, and what it refuses."""

import contextlib
import json
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstored_client import ctl
from kvstored_client.ctl import model_config
from kvstored_client.kv_shape import Model, SizingError
from kvstored_client.sizing import BLOCK_BYTES_MAX, EXTENT_BYTES, HIGH_WATERMARK

from kvstored import keys
from kvstored.config.schema import Config, Mover, Nvme

LLAMA_70B = ("--layers", 80, "--kv-heads", 8, "--head-dim", 128, "--dtype", "fp16")
LLAMA_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_size": 7168,
    "torch_dtype": "bfloat16",
}
GEMMA2_9B = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "hidden_size": 3584,
    "sliding_window": 4096,
    "dtype": "bfloat16",
}


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        ctl.main(["plan", *(str(argument) for argument in arguments)])
    return int(stopped.value.code or 0)


@pytest.fixture
def plan(capsys, tmp_path):
    """Runs the command, with a config or with options, and gives its JSON."""

    def planned(*arguments, config=None):
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
            arguments = (tmp_path, *arguments)
        assert run(*arguments, "-o", "json") == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return planned


# ---- sizes and times ----


def test_llama_3_70b_keeps_327680_bytes_a_token(plan):
    assert plan(*LLAMA_70B)["bytes_per_token"] == 327_680
    assert plan(*LLAMA_70B, "--context", 4096)["request"]["bytes"] == 1_342_177_280
    assert plan(*LLAMA_70B, "--context", 32_768)["request"]["bytes"] == 10_737_418_240


def test_a_batch_of_32_at_32000_tokens_moves_in_5_seconds_and_a_hundredth_of_it_in_52_ms(plan):
    found = plan(*LLAMA_70B, "--context", 32_000, "--requests", 32, "--pcie", 64, "--read", "128KiB", "--part", 1)
    assert found["total"]["bytes"] == 335_544_320_000
    assert found["total"]["pcie_s"] == pytest.approx(5.243, abs=0.001)
    assert found["part"]["bytes"] == 3_355_443_200
    assert found["part"]["pcie_s"] == pytest.approx(0.0524, abs=0.0001)
    assert found["part"]["reads"] == 25_600


def test_the_table_shows_the_same_in_round_figures(capsys):
    assert run(*LLAMA_70B, "--context", 32_000, "--requests", 32) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "all 32 requests 335.5 GB 5.24 s 47.9 s 205 s 2,560,000" in lines
    assert "1 % of all 3.36 GB 52.4 ms 479 ms 2.05 s 25,600" in lines
    assert run(*LLAMA_70B, "--context", 4096) == 0
    assert "a request of 4,096 tokens 1.34 GB" in " ".join(capsys.readouterr().out.split())


def test_a_config_says_the_same_as_options(plan):
    by_config, by_options = plan(config=LLAMA_CONFIG), plan(*LLAMA_70B)
    assert by_config["dtype"] == "bfloat16"
    for key in ("bytes_per_token", "block", "request", "total", "tiers", "settings", "bottleneck"):
        assert by_config[key] == by_options[key]


def test_options_win_over_the_config(plan):
    assert plan("--dtype", "fp8", config=LLAMA_CONFIG)["bytes_per_token"] == 163_840
    assert plan("--kv-heads", 4, "--layers", 40, config=LLAMA_CONFIG)["bytes_per_token"] == 81_920


def test_latent_attention_keeps_one_vector_a_layer_on_every_gpu(plan):
    found = plan("--tp", 8, config=DEEPSEEK_V3)
    assert found["bytes_per_token"] == found["bytes_per_token_per_gpu"] == 61 * (512 + 64) * 2
    assert found["block"]["shards"] == 1
    by_options = plan("--layers", 61, "--kv-lora-rank", 512, "--qk-rope-head-dim", 64, "--dtype", "bf16")
    assert by_options["bytes_per_token"] == 70_272


def test_windows_bound_what_a_request_keeps(plan):
    found = plan("--context", 32_768, config=GEMMA2_9B)
    layer = 2 * 8 * 256 * 2
    assert found["bytes_per_token"] == 42 * layer
    assert found["bytes_per_token_past_windows"] == 21 * layer
    assert found["request"]["bytes"] == 21 * layer * 32_768 + 21 * layer * 4096
    assert found["block"]["shards"] == 2  # layers of either kind are blocks of their own
    assert found["stored_bytes_per_request"] == found["request"]["bytes"]
    assert plan("--context", 4096, config=GEMMA2_9B)["request"]["bytes"] == 42 * layer * 4096
    assert any("21 of 42 layers keep only the last 4096 tokens" in note for note in found["notes"])


def test_a_window_can_be_given_for_some_of_the_layers(plan):
    shape = ("--layers", 24, "--kv-heads", 8, "--head-dim", 64, "--window", 128)
    assert plan(*shape, "--context", 1024)["request"]["bytes"] == 24 * 2048 * 128
    assert plan(*shape[:-1], 1 << 24, "--context", 1024)["request"]["bytes"] == 24 * 2048 * 1024
    found = plan(*shape, "--window-layers", 12, "--context", 1024, "--pp", 2)
    assert found["request"]["bytes"] == 12 * 2048 * (1024 + 128)
    assert found["block"]["shards"] == 4  # each stage has its share of both kinds
    off = LLAMA_CONFIG | {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 80}
    assert plan(config=off)["request"]["bytes"] == 327_680 * 32_768
    assert plan("--window", 4096, config=off)["request"]["bytes"] == 327_680 * 4096
    unsaid = LLAMA_CONFIG | {"model_type": "new", "sliding_window": 4096}
    assert plan("--window-layers", 80, config=unsaid)["request"]["bytes"] == 327_680 * 4096


def test_gpus_share_heads_and_layers_and_load_at_once(plan):
    one, eight = plan(*LLAMA_70B), plan(*LLAMA_70B, "--tp", 4, "--pp", 2)
    assert eight["gpus"] == 8
    assert eight["bytes_per_token_per_gpu"] == 327_680 // 8
    assert eight["total"]["pcie_s"] == pytest.approx(one["total"]["pcie_s"] / 8)
    assert eight["total"]["nvme_s"] == one["total"]["nvme_s"]
    assert (eight["block"]["shards"], eight["block"]["shard_bytes_max"]) == (8, 655_360)
    assert eight["tiers"]["gpu"]["requests"] == 8 * one["tiers"]["gpu"]["requests"] == 32


def test_heads_on_several_gpus_are_stored_once_and_loaded_by_each(plan):
    found = plan(*LLAMA_70B, "--tp", 16)
    assert found["bytes_per_token_per_gpu"] == 327_680 // 8
    assert found["block"]["shards"] == 8
    assert found["stored_bytes_per_request"] == 327_680 * 32_768
    assert any("one copy" in note for note in found["notes"])


def test_the_stage_with_most_layers_decides_what_fits_on_a_gpu(plan):
    assert plan(*LLAMA_70B, "--pp", 3)["bytes_per_token_per_gpu"] == 27 * 4096


# ---- what fits, and what limits ----


def test_tiers_tell_what_fits_and_where_the_wish_lies(plan):
    sizes = ("--context", 32_768, "--requests", 10, "--gpu", "20GiB", "--dram", "50GiB", "--nvme", "10GiB")
    found = plan(*LLAMA_70B, *sizes)
    tiers = found["tiers"]
    assert [tiers[name]["requests"] for name in ("gpu", "dram", "nvme")] == [2, 5, 1]
    assert [tiers[name]["placed"] for name in ("gpu", "dram", "nvme")] == [2, 5, 1]
    assert [tiers[name]["tokens"] for name in ("gpu", "dram", "nvme")] == [65_536, 163_840, 32_768]
    assert found["bottleneck"]["name"] == "capacity"
    assert "2 of 10 requests fit in no tier" in found["bottleneck"]["text"]


def test_blocks_take_whole_slots_and_partial_ones_are_not_stored(plan):
    # 3 x 2 x 1 x 10 x 2 = 120 bytes a token; a block of 16 has 1920 bytes and takes a slot of 4096
    found = plan("--layers", 3, "--kv-heads", 1, "--head-dim", 10, "--context", 100, "--dram", "1MiB")
    assert found["block"]["slot_bytes"] == 4096
    assert found["stored_bytes_per_request"] == 6 * 4096
    assert found["tiers"]["dram"]["tokens"] == 256 * 16
    assert found["request"]["bytes"] == 12_000


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        (("--gpu", "1TiB"), "none", "GPU memory holds all 32 requests"),
        (
            ("--dram", "1TiB", "--pcie", 1),
            "pcie",
            "PCIe bandwidth: a request loads in 10.7 s, and is computed in 6.55 s",
        ),
        (("--dram", "1TiB"), "pcie", "39.1 times faster than computing it"),
        (("--nvme-rate", 1), "nvme", "NVMe bandwidth: a request loads in 10.7 s, and is computed in 6.55 s"),
        (("--nvme-rate", 7), "nvme", "4.27 times faster"),
        (("--nvme-rate", 100), "pcie", "times faster"),
    ],
)
def test_the_bottleneck_is_named(plan, arguments, name, words):
    found = plan(*LLAMA_70B, *arguments)["bottleneck"]
    assert found["name"] == name
    assert words in found["text"]


def test_loading_pays_above_the_rate_at_which_prefill_makes_kv(plan):
    found = plan(*LLAMA_70B, "--prefill", 5000)
    assert found["break_even_bytes_per_s"]["nvme"] == pytest.approx(327_680 * 5000)
    at_even = plan(*LLAMA_70B, "--prefill", 5000, "--nvme-rate", 327_680 * 5000 / 1e9)["request"]
    assert at_even["nvme_s"] == pytest.approx(at_even["recompute_s"])


def test_without_nvme_there_is_no_time_and_no_setting_for_it(plan, capsys):
    found = plan(*LLAMA_70B, "--nvme", 0)
    assert found["request"]["nvme_s"] is None
    assert list(found["settings"]) == ["dram.capacity_bytes"]
    assert run(*LLAMA_70B, "--nvme", 0) == 0
    assert "of NVMe (" not in capsys.readouterr().out


def test_the_suggested_settings_are_taken_by_the_daemon_and_hold_the_wish(capsys, plan):
    hardware = (*LLAMA_70B, "--dram", "1TiB", "--nvme", "2TiB")
    assert run(*hardware) == 0
    out = capsys.readouterr().out
    lines = out[out.index("[dram]") : out.index("\n\n", out.index("[dram]"))]
    config = Config.model_validate(tomllib.loads(lines))
    found = plan(*hardware)
    stored = found["stored_bytes_per_request"] * 32
    assert found["settings"]["dram.capacity_bytes"] == config.dram.capacity_bytes
    assert config.dram.capacity_bytes * config.mover.high_watermark >= stored
    assert config.nvme.capacity_bytes >= stored + 2 * config.nvme.extent_bytes
    assert found["short_bytes"] == {}


def test_settings_go_no_further_than_the_hardware_and_say_what_is_missing(plan):
    found = plan(*LLAMA_70B, "--dram", "64GiB")
    assert found["settings"]["dram.capacity_bytes"] == 64 << 30
    assert found["short_bytes"]["dram.capacity_bytes"] == int(320 * (1 << 30) / 0.9) - (64 << 30)
    (note,) = [note for note in found["notes"] if "too small" in note]
    assert note == "too small for all of the wish: dram.capacity_bytes by 313.1 GB (NVMe holds all of it)"
    found = plan(*LLAMA_70B, "--dram", "64GiB", "--nvme", "64GiB")
    assert found["settings"] == {"dram.capacity_bytes": 64 << 30, "nvme.capacity_bytes": 64 << 30}
    assert any("nvme.capacity_bytes by" in note and "holds" not in note for note in found["notes"])


def test_a_block_that_the_daemon_does_not_take_is_pointed_out(plan):
    (note,) = [note for note in plan(*LLAMA_70B, "--block-tokens", 64)["notes"] if "16 MiB" in note]
    assert "give --block-tokens 51 or less" in note
    assert not any("the daemon takes 16 MiB" in note for note in plan(*LLAMA_70B, "--block-tokens", 51)["notes"])


def test_what_is_assumed_is_said(capsys, plan):
    assert plan(*LLAMA_70B, "--tp", 1)["assumed"] == {
        "pp": 1,
        "context": 32_768,
        "requests": 32,
        "block-tokens": 16,
        "gpu": "40GiB",
        "dram": "256GiB",
        "nvme": "2TiB",
        "pcie": 64.0,
        "nvme-rate": 7.0,
        "prefill": 5000.0,
        "read": "128KiB",
        "part": 1.0,
    }
    assert run(*LLAMA_70B) == 0
    assert "assumed: --tp 1, --pp 1, --context 32768" in capsys.readouterr().out


def test_the_daemon_s_limits_are_those_that_it_plans_with():
    assert BLOCK_BYTES_MAX == keys.BLOCK_BYTES_MAX
    assert Mover().high_watermark == HIGH_WATERMARK
    assert Nvme().extent_bytes == EXTENT_BYTES


# ---- configs ----


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 12 * 2 * 768 * 2),  # GPT-2
        (
            {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True},
            32 * 2 * 64 * 2,
        ),
        ({"text_config": LLAMA_CONFIG, "torch_dtype": "float32"}, 327_680),
        ({"text_config": LLAMA_CONFIG | {"torch_dtype": None}, "torch_dtype": "bfloat16"}, 327_680),
        (LLAMA_CONFIG | {"torch_dtype": "float32"}, 655_360),
        (LLAMA_CONFIG | {"torch_dtype": "auto"}, 327_680),
        (LLAMA_CONFIG | {"num_kv_shared_layers": 40}, 163_840),
        (LLAMA_CONFIG | {"full_attention_interval": 4}, 81_920),
        (LLAMA_CONFIG | {"v_head_dim": 64}, 80 * 8 * (128 + 64) * 2),
        (LLAMA_CONFIG | {"layer_types": ["full_attention"] * 20 + ["mamba"] * 60}, 81_920),
    ],
)
def test_configs_are_read_as_they_are_published(plan, config, token_bytes):
    assert plan(config=config)["bytes_per_token"] == token_bytes


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 4096}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 131_072}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 5}),
        ("Gemma2", {}),
        ("Gemma3Text", {}),
        ("Cohere2", {}),
        ("GptOss", {}),
        ("Olmo3", {}),
        ("Qwen3Next", {"full_attention_interval": 4}),
        ("Llama4Text", {}),
        ("Exaone4", {"sliding_window": 4096, "sliding_window_pattern": 4}),
    ],
)
def test_layers_are_of_the_kinds_that_transformers_makes_of_the_same_config(name, settings):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(num_hidden_layers=12, **settings)
    # As it is published: with what was given, and without the list that newer versions write.
    published = config.to_dict() | settings
    expected = (
        published.pop("layer_types", None)
        or ["sliding_attention" if published.get("sliding_window") else "full_attention"] * 12
    )
    assert model_config.layer_types(published, 12) == expected
    assert model_config.layer_types(published | {"layer_types": expected}, 12) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers or n_layer or n_layers or num_layers: give --layers"),
        ({"num_hidden_layers": "80"}, "num_hidden_layers is '80': must be a whole number"),
        ({"num_hidden_layers": 1_000_000}, "has 1000000 layers: at most 16384"),
        ({"num_key_value_heads": -8}, "num_key_value_heads is -8"),
        ({"num_attention_heads": None, "num_key_value_heads": None}, "give --kv-heads"),
        ({"hidden_size": None}, "give --head-dim"),
        ({"hidden_size": 8191}, "64 heads do not share a width of 8191 evenly"),
        ({"kv_lora_rank": 512}, "give --qk-rope-head-dim"),
        ({"layer_types": ["full_attention"]}, "layer_types must list the kinds of all 80 layers"),
        ({"layer_types": ["magic"] * 80}, "layer_types has 'magic': not known"),
        ({"layer_types": ["sliding_attention"] * 80}, "give --window"),
        ({"layer_types": ["mamba"] * 80}, "no layer that keeps KV"),
        ({"layers_block_type": ["attention"] * 80}, "in a form that is not known (layers_block_type)"),
        ({"sliding_window": 8, "sliding_window_pattern": "XY"}, "sliding_window_pattern is 'XY'"),
        ({"global_head_dim": 512, "layer_types": ["full_attention"] * 80}, "form that is not known (global_head_dim)"),
        ({"sliding_window": 8, "model_type": "new"}, "does not say in which layers: give --window-layers"),
        ({"attention_chunk_size": 8192, "no_rope_layers": [1, 0]}, "no_rope_layers must have an entry for each"),
        ({"num_kv_shared_layers": 80}, "num_kv_shared_layers is 80, of 80 layers"),
        ({"torch_dtype": "int3"}, "dtype 'int3' is none of float32"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line_that_says_why(tmp_path, capsys, changed, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_CONFIG | changed))
    assert_one_line(capsys, message, path)


FIELDS = st.sampled_from(
    [
        *(*GEMMA2_9B, *DEEPSEEK_V3, "text_config", "layer_types", "sliding_window_pattern", "use_sliding_window"),
        *("max_window_layers", "attention_chunk_size", "no_rope_layers", "full_attention_interval"),
        "num_kv_shared_layers",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(["mamba", "LLG"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(FIELDS, VALUES, max_size=5))
def test_whatever_a_config_says_it_is_read_or_refused(changed):
    with contextlib.suppress(SizingError):
        layers, _ = model_config.layers_of({**LLAMA_CONFIG, **changed})
        assert Model(layers, 2).request_bytes(1000) > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[1]", "holds no object"),
        (b"[" * 100_000, "is no JSON"),
        (b" " * (model_config.CONFIG_BYTES_MAX + 1), "more than 8 MiB"),
        (None, "is not there: give the path of a config.json"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, capsys, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    assert_one_line(capsys, message, tmp_path)
    with pytest.raises(SizingError, match=r"config\.json"):
        model_config.read_config(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model is named: give its config.json, or --layers, --kv-heads and --head-dim"),
        (("--layers", 80), "give --kv-heads"),
        (("--layers", 80, "--kv-heads", 8), "give --head-dim"),
        (("--kv-lora-rank", 512, "--layers", 2, "--kv-heads", 8), "leave --kv-heads and --head-dim away"),
        ((*LLAMA_70B, "--dtype", "int3"), "dtype 'int3' is none of"),
        ((*LLAMA_70B, "--tp", 3), "tensor parallelism 3 cannot deal out 8 KV heads evenly"),
        ((*LLAMA_70B, "--pp", 81), "pipeline parallelism 81 needs as many layers"),
        ((*LLAMA_70B, "--context", 10), "a request of 10 tokens fills no block of 16"),
        ((*LLAMA_70B, "--window-layers", 4), "--window-layers needs --window"),
        ((*LLAMA_70B, "--window", 8, "--window-layers", 81), "--window-layers 81: the model has 80 layers"),
        ((*LLAMA_70B, "--gpu", "8XB"), '--gpu 8XB: give a size in bytes, such as 8589934592 or "8GiB"'),
        ((*LLAMA_70B, "--dram", "0"), "--dram 0: give 1.0 MiB or more"),
        ((*LLAMA_70B, "--nvme", "1MiB"), "--nvme 1MiB: give 512.0 MiB or more, or 0"),
        ((*LLAMA_70B, "--read", "1"), "--read 1: give 512 B or more"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(capsys, arguments, message):
    assert_one_line(capsys, message, *arguments)


@pytest.mark.parametrize(
    "arguments", [("--layers", 0), ("--pcie", 0), ("--pcie", "inf"), ("--pcie", "nan"), ("--part", 101), ("--tp", "x")]
)
def test_an_option_out_of_bounds_is_named(capsys, arguments):
    assert run(*LLAMA_70B, *arguments) == 2
    assert f"'{arguments[0]}'" in capsys.readouterr().err


def assert_one_line(capsys, message, *arguments):
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvstorectl: ")
    assert message in err
    assert err.count("\n") == 1
