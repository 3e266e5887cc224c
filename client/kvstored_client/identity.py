"""The namespace of a Hugging Face model from its config and its weights, without loading either.

    spec = spec_from_hf_config("/models/llama-3-8b", dtype="bfloat16", layout="layers,kv,heads,tokens,dim")
    namespace = client.namespace(spec)

Two specs are equal only where nothing that is known of the two models differs; an engine adds what only it knows: its
`layout` and `engine_format`, and `tokenizer_version`, `template_version`, `permission_version` where they matter.
(A function, because classes that protobuf generates take no methods.)
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

from kvstored_client import hf_config
from kvstored_client.hf_config import ConfigError
from kvstored_client.weights import WeightsError, has_weights, weights_fingerprint

__all__ = ["ConfigError", "WeightsError", "adapter_identity", "spec_from_hf_config", "weights_fingerprint"]


def spec_from_hf_config(
    config: object,
    *,
    weights: str | os.PathLike[str] | None = None,
    dtype: object = None,
    kv_dtype: object = None,
    block_tokens: int = 16,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_size: int = 1,
    adapter: str = "",
    **fields: Any,
) -> NamespaceSpec:
    """Spec of the namespace that holds the KV of one shard of a model.

    Layers, KV heads, head dimension, rotary settings, types of layers and quantisation come from the config. What it
    says in a form that is not known here (a new architecture) leaves those fields at 0 and separates all the same: a
    hash of the whole config is in `extra`. A config object fills in defaults that its file does not have, and so has
    another hash: describe a model in the same way everywhere.

    Args:
        config: path of a config.json or of the model's directory, a dict, or a config object of Transformers.
        weights: the model's directory, or one weight file; by default the directory that the config came from.
        dtype: element type that the model computes in, a name or a torch type; by default the config's.
        kv_dtype: element type of the stored KV where it is another one, e.g. "fp8_e4m3".
        block_tokens: tokens in one block.
        tp_rank, tp_size, pp_rank, pp_size: which shard.
        adapter: name and version of the adapter in use; `adapter_identity` makes one from a directory.
        fields: more fields of NamespaceSpec; they win over what is derived here, but `extra` is added to.

    Raises:
        ConfigError: no such config, no known dtype, nothing that tells the weights, an encoder-decoder, or a shard
            that cannot be.
        WeightsError: the weights are incomplete.
        ValueError: an unknown field.
    """
    content, source = hf_config.read(config)
    if content.get("is_encoder_decoder"):
        raise ConfigError("the model is an encoder-decoder: its KV depends on more than the prefix")
    _check_shard(block_tokens, tp_rank, tp_size, pp_rank, pp_size)
    if "model_version" not in fields:
        fields["model_version"] = weights_fingerprint(_weights(weights, source))
    computed = hf_config.dtype_name(dtype) or hf_config.dtype_of(content)
    stored = hf_config.dtype_name(kv_dtype) or computed
    if not computed:
        raise ConfigError('the config names no dtype, and KV of another one would match: give dtype=, e.g. "bfloat16"')
    text = hf_config.text_part(content)
    theta, scaling = hf_config.rope_of(text)
    layers, kv_heads, head_dim = hf_config.shape_of(text)
    window, kinds = hf_config.window_of(text)
    computation = f"dtype={computed}" if computed != stored else ""
    about = (f"config={hf_config.config_fingerprint(content)}", kinds, computation, str(fields.pop("extra", "")))
    derived = {
        "model": hf_config.model_name(source) or str(content.get("model_type") or ""),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "dtype": stored,
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "quantization": hf_config.quantization_of(content),
        "kv_group_kind": "window" if window else "",
        "window_tokens": window,
        "extra": ";".join(filter(None, about)),
    }
    shard = {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": pp_rank, "pp_size": pp_size}
    return NamespaceSpec(**{**derived, **shard, "block_tokens": block_tokens, "adapter": adapter, **fields})


def adapter_identity(directory: str | os.PathLike[str], name: str = "") -> str:
    """Text for `adapter` from the directory of a LoRA: its name (by default the directory's), and a hash over its
    `adapter_config.json` (rank, scaling, target modules) and weights.

    Raises ConfigError or WeightsError where either is missing.
    """
    where = Path(os.path.abspath(directory))
    config, _ = hf_config.read(where / "adapter_config.json")
    relevant = {key: value for key, value in config.items() if key != "base_model_name_or_path"}
    about = f"{hf_config.canonical_json(relevant)}|{weights_fingerprint(where)}"
    return f"{name or where.name}:{hashlib.sha256(about.encode()).hexdigest()[:32]}"


def _check_shard(block_tokens: int, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int) -> None:
    if block_tokens < 1:
        raise ConfigError(f"block_tokens is {block_tokens}: at least 1")
    for name, rank, size in (("tp", tp_rank, tp_size), ("pp", pp_rank, pp_size)):
        if not 0 <= rank < size:
            raise ConfigError(f"{name}_rank is {rank} of {name}_size {size}: ranks count from 0")


def _weights(weights: str | os.PathLike[str] | None, source: str) -> str | os.PathLike[str]:
    """Where the weights are. Raises ConfigError where nothing says it: two fine-tunes of one name would match."""
    if weights is not None:
        return weights
    if source and has_weights(Path(source)):
        return source
    raise ConfigError(
        "nothing tells these weights from others of the same name: give weights=, the model's directory, "
        "or model_version=, a text of your own (the commit of its repository, say)"
    )
