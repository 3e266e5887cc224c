"""What of an engine is in its namespaces, and what is refused, with fakes for vLLM's configuration."""

import json
from types import SimpleNamespace as Some

import pytest
from kvstored_client.engines.vllm.checks import Engine, check_loads
from kvstored_client.engines.vllm.identity import specs_of
from kvstored_client.engines.vllm.namespaces import Namespaces
from kvstored_client.engines.vllm.settings import Settings, UnsupportedError
from kvstored_client.engines.vllm.shape import shape_of

ENGINE = Engine("0.32.0", "cpu,x86_64,AVX512", "constant")
HF = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_size": 256,
    "rope_theta": 10000.0,
}


class FullAttentionSpec(Some):
    pass


class MLAAttentionSpec(Some):
    pass


class SlidingWindowSpec(Some):
    pass


class SlidingWindowMLASpec(Some):
    pass


class ChunkedLocalAttentionSpec(Some):
    pass


class MambaSpec(Some):
    pass


def config(**changes):
    """A configuration; `changes` are section__name."""
    made = Some(
        parallel_config=Some(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        cache_config=Some(
            prefix_caching_hash_algo="sha256",
            cache_dtype="auto",
            calculate_kv_scales=False,
            enable_prefix_caching=True,
        ),
        model_config=Some(
            model="/models/tiny",
            revision=None,
            quantization=None,
            dtype="torch.bfloat16",
            hf_config=HF,
            max_model_len=2048,
        ),
        load_config=Some(load_format="auto", download_dir=None),
        scheduler_config=Some(async_scheduling=False),
        device_config=Some(device_type="cpu"),
        attention_config=Some(backend=None),
        speculative_config=None,
    )
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            setattr(getattr(made, section), field, value)
        else:
            setattr(made, section, value)
    return made


def cache(spec=None, groups=1, **changes):
    spec = spec or FullAttentionSpec(block_size=32, page_size_bytes=16384)
    group = Some(kv_cache_spec=spec, layer_names=["a", "b", "c", "d"])
    return Some(**{"kv_cache_groups": [group] * groups, "kv_cache_layout": "LBHNC", "hash_block_size": 32, **changes})


def specs(made=None, kv=None, engine=ENGINE, **settings):
    made, kv = made or config(), kv or cache()
    shape = shape_of(made, kv, engine)
    return specs_of(made, kv, shape, Settings(**{"model_version": "v1", **settings}), engine)[0]


def text(spec):
    return spec.SerializeToString(deterministic=True)


def test_the_same_engine_has_the_same_namespace():
    assert text(specs()[0]) == text(specs()[0])
    with_adapters = config(lora_config=Some(lora_dtype="torch.bfloat16"))  # whose requests have others
    assert text(specs(with_adapters)[0]) == text(specs()[0])


@pytest.mark.parametrize(
    "other",
    [
        {"made": config(model_config__dtype="torch.float16")},
        {"made": config(model_config__model="/models/other")},
        {"made": config(model_config__revision="abc")},
        {"made": config(model_config__quantization="awq")},
        {"made": config(model_config__hf_config={**HF, "rope_theta": 500000.0})},
        {"made": config(model_config__hf_config={**HF, "rms_norm_eps": 1e-5})},
        {"made": config(cache_config__cache_dtype="fp8_e5m2")},
        {"made": config(cache_config__prefix_caching_hash_algo="sha256_cbor")},
        {"made": config(parallel_config__tensor_parallel_size=2)},
        {"made": config(attention_config=Some(backend="TRITON"))},
        {"made": config(model_config__multimodal_config=Some(mm_processor_kwargs={"max_pixels": 1 << 20}))},
        {"made": config(lora_config=Some(lora_dtype="torch.float16"))},
        {"kv": cache(kv_cache_layout="LBNHC")},
        {"kv": cache(FullAttentionSpec(block_size=64, page_size_bytes=16384), hash_block_size=64)},
        {"kv": cache(FullAttentionSpec(block_size=32, page_size_bytes=16384, sliding_window=128))},
        {"engine": Engine("0.30.0", "cpu,x86_64,AVX512", "constant")},
        {"engine": Engine("0.32.0", "cpu,x86_64,AMX", "constant")},
        {"engine": Engine("0.32.0", "cpu,x86_64,AVX512", "0")},
        {"model_version": "v2"},
    ],
)
def test_whatever_changes_the_bytes_changes_the_namespace(other):
    assert text(specs()[0]) != text(specs(**other)[0])


def test_the_longest_sequence_counts_where_positions_depend_on_it():
    long = {**HF, "rope_scaling": {"rope_type": "longrope"}}
    one, other = (config(model_config__hf_config=long, model_config__max_model_len=n) for n in (2048, 4096))
    assert text(specs(one)[0]) != text(specs(other)[0])
    assert text(specs()[0]) == text(specs(config(model_config__max_model_len=4096))[0])


def test_each_shard_has_a_namespace():
    shards = specs(config(parallel_config__tensor_parallel_size=4))
    assert [(s.tp_rank, s.tp_size) for s in shards] == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_what_several_workers_hold_alike_is_stored_once():
    made = config(parallel_config__tensor_parallel_size=4)
    heads = shape_of(made, cache(kv_tp_replicas=2), ENGINE)
    assert heads.shards == 2
    assert [heads.shard_of(r) for r in range(4)] == [(0, True), (0, False), (1, True), (1, False)]


@pytest.mark.parametrize(
    ("made", "kv", "engine", "named"),
    [
        (config(parallel_config__pipeline_parallel_size=2), cache(), ENGINE, "pipeline_parallel_size"),
        (config(parallel_config__decode_context_parallel_size=2), cache(), ENGINE, "decode_context"),
        (config(cache_config__prefix_caching_hash_algo="xxhash"), cache(), ENGINE, "xxhash"),
        (config(), cache(), Engine("0.28.0", "cpu", None), "PYTHONHASHSEED"),
        (config(cache_config__cache_dtype="nvfp4"), cache(), ENGINE, "nvfp4"),
        (config(cache_config__calculate_kv_scales=True), cache(), ENGINE, "calculate_kv_scales"),
        (config(speculative_config=Some(method="eagle")), cache(), ENGINE, "eagle"),
        (config(device_config=Some(device_type="cuda")), cache(), ENGINE, "cuda"),
        (config(), cache(ChunkedLocalAttentionSpec(block_size=32, page_size_bytes=16384)), ENGINE, "ChunkedLocal"),
        (config(), cache(SlidingWindowMLASpec(block_size=32, page_size_bytes=16384)), ENGINE, "SlidingWindowMLASpec"),
        (config(), cache(groups=0), ENGINE, "no KV cache"),
        (config(), cache(groups=2, hash_block_size=24), ENGINE, "one hash for 24"),
        (config(), cache(MambaSpec(block_size=32, page_size_bytes=16384)), ENGINE, "MambaSpec"),
        (config(), cache(hash_block_size=16), ENGINE, "one hash for 16"),
        (config(), cache(kv_cache_layout="BLHNC"), ENGINE, "layout BLHNC keeps all layers of a block together"),
        (config(), cache(kv_cache_layout="BLNHC"), ENGINE, "VLLM_KV_CACHE_LAYOUT"),
        (config(), cache(FullAttentionSpec(block_size=32, page_size_bytes=64)), ENGINE, "larger block_size"),
        (config(), cache(FullAttentionSpec(block_size=32, page_size_bytes=8 << 20)), ENGINE, "smaller block_size"),
    ],
)
def test_what_is_not_supported_is_named(made, kv, engine, named):
    with pytest.raises(UnsupportedError, match=named):
        shape_of(made, kv, engine)


def test_weights_that_nothing_tells_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="model_version"):
        specs(config(model_config__model=str(tmp_path)), model_version="")
    with pytest.raises(UnsupportedError, match="dummy"):
        specs(config(load_config=Some(load_format="dummy", download_dir=None)), model_version="")


def test_a_config_that_loading_changed_in_one_process_is_that_of_its_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**HF, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}))
    objects = ({**HF, "rope_scaling": {"rope_type": kind, "factor": 2.0}} for kind in ("yarn", "deepseek_yarn"))
    one, other = (config(model_config__model=str(tmp_path), model_config__hf_config=each) for each in objects)
    assert text(specs(one)[0]) == text(specs(other)[0])
    other.model_config.hf_overrides = {"rope_theta": 5.0}
    assert text(specs(one)[0]) != text(specs(other)[0])


def test_weights_are_told_by_their_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 4096)
    one = specs(config(model_config__model=str(tmp_path)), model_version="")[0]
    (tmp_path / "model.safetensors").write_bytes(b"\1" * 4097)
    other = specs(config(model_config__model=str(tmp_path)), model_version="")[0]
    assert one.model_version != other.model_version


@pytest.mark.parametrize(
    "made", [config(parallel_config__tensor_parallel_size=2), config(scheduler_config=Some(async_scheduling=True))]
)
def test_loads_within_a_step_are_for_one_worker_and_one_step_at_a_time(made):
    check_loads(Settings(), made, ENGINE, whole_loads=False)
    with pytest.raises(UnsupportedError, match="load_async"):
        check_loads(Settings(load_async=False), made, ENGINE, whole_loads=False)


def test_loads_that_are_of_use_as_a_whole_only_need_an_engine_that_can_be_told_so():
    check_loads(Settings(), config(), ENGINE, whole_loads=True)
    with pytest.raises(UnsupportedError, match="load_async"):
        check_loads(Settings(load_async=False), config(), ENGINE, whole_loads=True)
    with pytest.raises(UnsupportedError, match="disable_hybrid_kv_cache_manager"):
        check_loads(Settings(), config(), Engine("0.29.0", "cpu", "0", False), whole_loads=True)


# ---- kinds of layers ----


def groups_of(*given, **changes):
    made = [
        Some(kv_cache_spec=spec, layer_names=[f"{number}.{i}" for i in range(4)]) for number, spec in enumerate(given)
    ]
    return Some(**{"kv_cache_groups": made, "kv_cache_layout": "LBHNC", **changes})


FULL = FullAttentionSpec(block_size=32, page_size_bytes=16384)
WINDOW = SlidingWindowSpec(block_size=32, page_size_bytes=16384, sliding_window=128)


def test_each_group_of_layers_has_its_namespaces():
    kv = groups_of(FULL, WINDOW, WINDOW)
    made = config(parallel_config__tensor_parallel_size=2)
    shape = shape_of(made, kv, ENGINE)
    all_of_them = specs_of(made, kv, shape, Settings(model_version="v1"), ENGINE)
    assert [(s.kv_group, s.kv_group_kind, s.window_tokens) for s, _ in all_of_them] == [
        (0, "", 0),
        (1, "window", 128),
        (2, "window", 128),
    ]
    assert len({text(spec) for shards in all_of_them for spec in shards}) == 6


def test_windows_whose_blocks_are_kept_whole_are_of_another_namespace():
    whole = FullAttentionSpec(block_size=32, page_size_bytes=16384, sliding_window=128)
    assert text(specs(kv=groups_of(WINDOW))[0]) != text(specs(kv=groups_of(whole))[0])
    assert not shape_of(config(), groups_of(whole), ENGINE).whole_loads
    assert shape_of(config(), groups_of(WINDOW), ENGINE).whole_loads


def test_blocks_of_different_length():
    short, long = FULL, SlidingWindowSpec(block_size=96, page_size_bytes=16384, sliding_window=128)
    shape = shape_of(config(), groups_of(short, long), ENGINE)
    assert (shape.hash_tokens, shape.unit_tokens) == (32, 96)
    hashes = [bytes([i]) for i in range(9)]
    assert shape.keys(32, hashes, 2, 5) == [b"\2", b"\3", b"\4"]
    assert shape.keys(96, hashes, 1, 3) == [b"\5", b"\x08"]  # a block's last hash


def test_what_is_padded_is_not_stored():
    padded = FullAttentionSpec(block_size=32, page_size_bytes=20480, real_page_size_bytes=16384)
    assert shape_of(config(), groups_of(padded), ENGINE).groups[0].block_bytes == 4 * 16384


@pytest.mark.parametrize(
    ("spec", "heads", "told", "replicas"),
    [
        (MLAAttentionSpec(block_size=32, page_size_bytes=16384), 8, {}, 4),  # one latent vector for all heads
        (FULL, 2, {}, 2),
        (FULL, 8, {}, 1),
        (FULL, 2, {"kv_tp_replicas": 4}, 4),  # newer engines say it
    ],
)
def test_kv_that_several_workers_hold_alike_is_stored_by_one(spec, heads, told, replicas):
    made = config(parallel_config__tensor_parallel_size=4)
    made.model_config.get_total_num_kv_heads = lambda: heads
    shape = shape_of(made, groups_of(spec, **told), ENGINE)
    assert (shape.replicas, shape.shards) == (replicas, 4 // replicas)
    assert [shape.shard_of(rank)[1] for rank in range(4)].count(True) == shape.shards


def test_memory_that_is_not_the_engine_s_own_and_compressed_kv_are_refused():
    kv = groups_of(FULL)
    kv.kv_cache_groups[0].host_resident = True
    with pytest.raises(UnsupportedError, match="not the engine's own memory"):
        shape_of(config(), kv, ENGINE)
    with pytest.raises(UnsupportedError, match="one state for 4 tokens"):
        shape_of(
            config(), groups_of(MLAAttentionSpec(block_size=32, page_size_bytes=16384, tokens_per_state=4)), ENGINE
        )


# ---- handles ----


class Opens:
    """A client whose namespaces are their specs."""

    def namespace(self, spec):
        return spec


def test_generations_and_adapters_have_namespaces_of_their_own():
    made = config(parallel_config__tensor_parallel_size=2)
    kv = groups_of(FULL, WINDOW)
    shape = shape_of(made, kv, ENGINE)
    handles = Namespaces(Opens(), shape, specs_of(made, kv, shape, Settings(model_version="v1"), ENGINE))
    ways = [("", ""), ("", "tone:1"), ("", "tone:2"), ("reset", ""), ("reset", "tone:1")]
    opened = {text(spec) for way in ways for shard in (0, 1) for spec in handles.of_shard(shard, *way)}
    assert len(opened) == len(ways) * 2 * 2
    asked = {text(spec) for way in ways for track in handles.tracks(*way) for spec in track.namespaces}
    assert asked == opened  # what is looked up is what workers load and save
    assert handles.tracks("", "tone:1") is handles.tracks("", "tone:1")
