"""Whose KV it is: the namespaces of one engine.

vLLM's block hash covers tokens, cache salt, multimodal inputs and adapters. Everything else that decides about the
bytes is in the namespace: weights, shape, types, positions, shard, layout and the engine's version.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

from kvstored_client import hf_config
from kvstored_client.engines.vllm.checks import KV_DTYPES, Engine
from kvstored_client.engines.vllm.settings import Settings, UnsupportedError
from kvstored_client.engines.vllm.shape import Group, Shape
from kvstored_client.identity import ConfigError, WeightsError, spec_from_hf_config

_FORMAT: Final = 1  # of a block's bytes as `pages` lays them out
# Rotary embeddings that vLLM computes from the longest sequence it was started for.
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


def specs_of(
    config: Any, kv_cache_config: Any, shape: Shape, settings: Settings, engine: Engine
) -> list[list[NamespaceSpec]]:
    """The namespaces: for each group of layers those of its shards.

    Raises UnsupportedError where nothing tells which weights these are.
    """
    weights = None if settings.model_version else weights_directory(config, settings)
    content = _hf_config(config)
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or "default"
    first_shards = [_spec(config, content, layout, group, shape, settings, engine, weights) for group in shape.groups]
    return [[_shard(first, rank) for rank in range(shape.shards)] for first in first_shards]


def _spec(
    config: Any,
    content: dict[str, Any],
    layout: str,
    group: Group,
    shape: Shape,
    settings: Settings,
    engine: Engine,
    weights: Path | None,
) -> NamespaceSpec:
    """The namespace of one group's first shard. `content` is the model's own config."""
    model = config.model_config
    computed = hf_config.dtype_name(model.dtype)
    stored = KV_DTYPES[config.cache_config.cache_dtype] or computed
    fields: dict[str, Any] = {
        "model": hf_config.model_name(str(model.model)),
        "layout": f"vllm/{layout},{group.kind},{engine.platform}",
        "engine_format": f"vllm/{engine.version}/{_FORMAT}",
        "kv_group": group.number,
        "kv_group_kind": "window" if group.window_tokens else "",
        "window_tokens": group.window_tokens,
        "extra": _extra(config, content, group, shape, engine),
    }
    if settings.model_version:
        fields["model_version"] = settings.model_version
    try:
        spec = spec_from_hf_config(
            content,
            weights=weights,
            dtype=computed,
            kv_dtype=stored,
            block_tokens=group.block_tokens,
            tp_size=shape.shards,
            **fields,
        )
    except (ConfigError, WeightsError, OSError) as error:
        raise UnsupportedError(f"{error} (as `weights` or `model_version` in kv_connector_extra_config)") from error
    if stored.startswith("fp8"):
        spec.quantization = ";".join(filter(None, (spec.quantization, "kv-scales=weights")))
    return spec


def _shard(spec: NamespaceSpec, rank: int) -> NamespaceSpec:
    copy = NamespaceSpec()
    copy.CopyFrom(spec)
    copy.tp_rank = rank
    return copy


def _hf_config(config: Any) -> dict[str, Any]:
    """What the model's config says, as its file has it.

    vLLM's object for it is changed by some models while they are loaded, which not every process does.
    """
    model = config.model_config
    overrides = getattr(model, "hf_overrides", None) or {}
    where = getattr(model, "hf_config_path", None) or model_directory(config)
    try:
        if where is not None and isinstance(overrides, Mapping):
            return {**hf_config.read(where)[0], **overrides}
    except ConfigError:
        pass  # of another format
    return hf_config.read(model.hf_config)[0]


def _extra(config: Any, content: dict[str, Any], group: Group, shape: Shape, engine: Engine) -> str:
    """Everything else that must be equal, as text that `kvstorectl explain` shows."""
    model, cache = config.model_config, config.cache_config
    settings: dict[str, Any] = {
        "hash": cache.prefix_caching_hash_algo,
        "seed": engine.hash_seed,
        "revision": model.revision or "",
        "quantization": model.quantization or "",
        "attention": str(getattr(getattr(config, "attention_config", None), "backend", None) or "auto"),
        "block_bytes": group.block_bytes,
        "workers": shape.workers,
        "layers": hashlib.sha256(json.dumps(group.layers).encode()).hexdigest()[:16],
        "window": group.seen_tokens,
    }
    _, scaling = hf_config.rope_of(hf_config.text_part(content))
    if any(kind in scaling for kind in _LENGTH_DEPENDENT_ROPE):
        settings["max_model_len"] = model.max_model_len
    # Who names images by identifiers of their own leaves out what is done to them.
    inputs = getattr(getattr(model, "multimodal_config", None), "mm_processor_kwargs", None)
    if inputs:
        settings["inputs"] = hashlib.sha256(hf_config.canonical_json(inputs).encode()).hexdigest()[:16]
    adapters = hf_config.dtype_name(getattr(getattr(config, "lora_config", None), "lora_dtype", None))
    if adapters and adapters != hf_config.dtype_name(model.dtype):
        settings["adapters"] = adapters  # what their weights are rounded to
    return ",".join(f"{key}={value}" for key, value in settings.items())


def weights_directory(config: Any, settings: Settings) -> Path | None:
    """Where the weights lie on this machine; None where that is not known."""
    load_format = str(getattr(config.load_config, "load_format", "auto"))
    if load_format == "dummy":
        raise UnsupportedError("load_format=dummy: random weights are nobody else's; give model_version to share them")
    return Path(settings.weights) if settings.weights else model_directory(config)


def model_directory(config: Any) -> Path | None:
    """Where the model lies on this machine; None where that is not known."""
    model = str(config.model_config.model)
    if os.path.exists(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        cache = getattr(config.load_config, "download_dir", None)
        revision = config.model_config.revision
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception:  # any way in which the hub's cache does not know it
        return None
