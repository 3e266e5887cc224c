"""The namespace of a Transformers model: all that must be equal for its KV to be interchangeable.

Refused, because the KV of a prefix would not be a function of the prefix alone: encoder-decoder
models, position embeddings that change with the length of the whole sequence, active adapters,
layers spread over several devices.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Final

import torch
from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from kvstored_client import hf_config
from kvstored_client.engines.transformers_blocks import LAYOUT, CacheGeometry, UnsupportedCacheError, check_cache
from kvstored_client.weights import weights_fingerprint as file_fingerprint

_FORMAT_VERSION: Final = 1
_SAMPLES_PER_TENSOR: Final = 4096
# Rotary embeddings whose frequencies depend on the length of the sequence, not on the position alone.
_LENGTH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})


def geometry_of(model: PreTrainedModel, block_tokens: int) -> CacheGeometry:
    """Block shape of `model`. Raises UnsupportedCacheError where its cache cannot be stored."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}: at least 1")
    check_model(model)
    config = _text_config(model)
    heads = config.num_attention_heads
    return CacheGeometry(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        block_tokens=block_tokens,
        dtype=model.dtype,
    )


def check_model(model: PreTrainedModel) -> None:
    """Raise UnsupportedCacheError where the KV of a prefix depends on more than prefix and weights."""
    if model.config.is_encoder_decoder:
        raise UnsupportedCacheError("the model is an encoder-decoder: its decoder's KV depends on the encoder's input")
    check_cache(DynamicCache(config=model.config))
    check_adapters(model)
    for rope in _rope_settings(model):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedCacheError(f"rope_type is {rope['rope_type']}: keys change with the sequence's length")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or torch.device("meta") in devices:
        raise UnsupportedCacheError(f"parameters are on {sorted(map(str, devices))}: one device is supported")


def check_adapters(model: PreTrainedModel) -> None:
    """Raise UnsupportedCacheError where adapters are loaded: they can be switched at any time."""
    adapters = getattr(model, "peft_config", None)
    if adapters:
        raise UnsupportedCacheError(
            f"adapters are loaded ({', '.join(sorted(map(str, adapters)))}): merge them into the weights first"
        )


def namespace_spec(
    model: PreTrainedModel,
    geometry: CacheGeometry,
    tokenizer: object | None,
    overrides: dict[str, Any],
    weights: str | os.PathLike[str] | None = None,
) -> NamespaceSpec:
    """Spec of the namespace that holds the blocks of `model`.

    `overrides` are fields of NamespaceSpec and win over what is derived here. Takes a fraction of
    a second, nearly all of it for the samples of every weight and the tokenizer's vocabulary.
    `weights` are the files that the model was loaded from: they are sampled in place of its tensors.
    """
    config = _text_config(model).to_dict()
    rope_theta, rope_scaling = hf_config.rope_of(config)
    if weights is not None:
        overrides = {"model_version": file_fingerprint(weights), **overrides}
    spec = NamespaceSpec(
        model=hf_config.model_name(str(model.config.name_or_path or model.config.model_type)),
        model_version=overrides.get("model_version") or weights_fingerprint(model),
        tokenizer_version="" if tokenizer is None else tokenizer_fingerprint(tokenizer),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        dtype=str(geometry.dtype).removeprefix("torch."),
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        block_tokens=geometry.block_tokens,
        layout=LAYOUT,
        quantization=hf_config.quantization_of(model.config.to_dict()),
        engine_format=f"transformers-dynamic-cache/{_FORMAT_VERSION},attention={model.config._attn_implementation}",
        extra=f"config={hf_config.config_fingerprint(config)}",
    )
    spec.MergeFrom(NamespaceSpec(**overrides))
    return spec


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Hash over name, shape, type and up to 4096 evenly spread elements of every weight, as it is in memory.

    Any fine-tuning or merge changes nearly all elements of the tensors that it touches, so that
    a sample tells them apart; an edit of single elements may stay unseen.
    """
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, -(-flat.numel() // _SAMPLES_PER_TENSOR))
        digest.update(flat[::step].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash over the whole fast tokenizer, or over the vocabulary of a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = hf_config.canonical_json(tokenizer.get_vocab()) if backend is None else backend.to_str()
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the decoder, also where the model has encoders for other inputs beside it."""
    return model.config.get_text_config(decoder=True)


def _rope_settings(model: PreTrainedModel) -> list[dict[str, Any]]:
    """The rotary settings: one dict, or one for each kind of layer."""
    rope = getattr(_text_config(model), "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return [*nested, dict(rope)]
