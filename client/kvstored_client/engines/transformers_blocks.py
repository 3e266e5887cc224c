"""Block layout of a Transformers `DynamicCache`: which caches are understood, and how bytes move.

A block is the KV of `block_tokens` tokens, one contiguous array

    [layers, 2 (K then V), kv_heads, block_tokens, head_dim]

so that one block restores every layer. Moving a block costs one copy of its bytes in each
direction: `torch.stack(..., out=)` writes a block straight into staging memory, `torch.cat`
over the mapped blocks builds the tensors of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

LAYOUT: Final = "layers,kv,heads,tokens,dim"
# By exact class name: a subclass (sliding window, indexed, quantised) keeps other state than its parent.
_KNOWN_LAYERS: Final = frozenset({"DynamicLayer"})
_KNOWN_CACHES: Final = frozenset({"DynamicCache"})


class UnsupportedCacheError(ValueError):
    """The model or its cache cannot be stored block by block; the message says which part and why."""


@dataclass(frozen=True)
class CacheGeometry:
    """Shape and element type of the blocks of one model."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Layers, K and V, heads, tokens, dimensions of a head."""
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Size of one block."""
        return self.layers * 2 * self.kv_heads * self.block_tokens * self.head_dim * self.dtype.itemsize


def single_sequence(input_ids: torch.Tensor) -> list[int]:
    """The token ids of a batch of one. Raises UnsupportedCacheError for any other shape."""
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        raise UnsupportedCacheError(f"input_ids are {tuple(input_ids.shape)}: one sequence, [1, tokens], is needed")
    tokens: list[int] = input_ids[0].tolist()
    return tokens


def check_cache(cache: object) -> None:
    """Raise UnsupportedCacheError unless every part of `cache` is one whose state is known here."""
    kind = type(cache).__name__
    if kind not in _KNOWN_CACHES:
        raise UnsupportedCacheError(f"cache is a {kind}: only {_names(_KNOWN_CACHES)} is understood")
    assert isinstance(cache, DynamicCache)
    if cache.offloading:
        raise UnsupportedCacheError("cache is offloaded: its layers move between devices by themselves")
    for index, layer in enumerate(cache.layers):
        if type(layer).__name__ not in _KNOWN_LAYERS:
            raise UnsupportedCacheError(
                f"cache layer {index} is a {type(layer).__name__}: only {_names(_KNOWN_LAYERS)} is understood"
            )


def check_tensors(cache: DynamicCache, geometry: CacheGeometry) -> None:
    """Raise UnsupportedCacheError unless the tensors in `cache` are what `geometry` says, batch 1."""
    if len(cache.layers) != geometry.layers:
        raise UnsupportedCacheError(f"cache has {len(cache.layers)} layers, the model's config {geometry.layers}")
    expected = (1, geometry.kv_heads, cache.get_seq_length(), geometry.head_dim)
    for index, layer in enumerate(_layers(cache)):
        for name, tensor in (("keys", layer.keys), ("values", layer.values)):
            if tensor is None or tuple(tensor.shape) != expected or tensor.dtype != geometry.dtype:
                found = "empty" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise UnsupportedCacheError(
                    f"{name} of cache layer {index} are {found}, expected {expected} {geometry.dtype}"
                )


def write_block(cache: DynamicCache, geometry: CacheGeometry, index: int, into: memoryview) -> None:
    """Write block `index` of `cache` into `into`, a writable buffer of `block_bytes`."""
    start = index * geometry.block_tokens
    tokens = slice(start, start + geometry.block_tokens)
    halves = [half for layer in _layers(cache) for half in (layer.keys, layer.values) if half is not None]
    parts = [half.detach()[0, :, tokens] for half in halves]
    target = torch.frombuffer(into, dtype=geometry.dtype).view(-1, *geometry.block_shape[2:])
    if parts[0].device.type == "cpu":
        torch.stack(parts, out=target)
    else:
        # Gathered on the device, so that one transfer carries the block.
        target.copy_(torch.stack(parts))


def join_layers(blocks: Sequence[torch.Tensor], device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values per layer, [1, heads, tokens, dim] each, copied out of consecutive `blocks`."""
    layers = []
    for layer in range(blocks[0].shape[0]):
        # One allocation a layer, not one for all: the first forward pass frees each as it goes.
        keys, values = torch.cat([block[layer] for block in blocks], dim=2).to(device).unsqueeze(1)
        layers.append((keys, values))
    return layers


def fill_cache(cache: DynamicCache, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Make `layers` the content of an empty `cache`, without another copy."""
    for layer, (keys, values) in zip(_layers(cache), layers, strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values


def _layers(cache: DynamicCache) -> list[DynamicLayer]:
    """The layers of a cache that passed `check_cache`."""
    return cast("list[DynamicLayer]", cache.layers)


def _names(known: frozenset[str]) -> str:
    return " or ".join(sorted(known))
