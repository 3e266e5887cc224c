"""How many bytes of KV the layers of a model keep, and how GPUs share them. Pure arithmetic.

The formulas, and where they come from:

* A layer of attention keeps, for each token and KV head, one key and one value: `2 x kv_heads x head_dim` elements
  (Shazeer, "Fast Transformer Decoding", 2019; Ainslie et al., "GQA", 2023). Latent attention keeps one vector for all
  heads: `kv_lora_rank + qk_rope_head_dim` elements (DeepSeek-V2, 2024, on latent attention). A sliding or chunked
  layer keeps its last `window` tokens (Jiang et al., "Mistral 7B", 2023, on the rolling buffer).
* Tensor parallelism deals out whole KV heads; where there are more ranks than heads, a head lies on several GPUs, and
  a latent on all of them (as vLLM and SGLang do it). Pipeline parallelism deals out consecutive layers.
"""

from __future__ import annotations

from dataclasses import dataclass


class SizingError(ValueError):
    """A model cannot be cut, or asked, in this way; the message says what to change."""


@dataclass(frozen=True)
class Layer:
    """What one layer keeps of a token: `heads` that can be dealt out to GPUs, `head_elements` each.

    No elements: a layer without attention, or one that uses another layer's KV.
    """

    heads: int
    head_elements: int
    window_tokens: int | None = None
    """How many of the last tokens are kept; None: all."""


@dataclass(frozen=True)
class Model:
    """The layers of a model, as its engine cuts them."""

    layers: tuple[Layer, ...]
    element_bytes: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def __post_init__(self) -> None:
        tensor, pipeline = self.tensor_parallel, self.pipeline_parallel
        for heads in sorted({layer.heads for layer in self.layers}):
            if heads % tensor and tensor % heads:
                raise SizingError(f"tensor parallelism {tensor} cannot deal out {heads} KV heads evenly")
        if pipeline > len(self.layers):
            raise SizingError(f"pipeline parallelism {pipeline} needs as many layers, the model has {len(self.layers)}")
        if not self.bytes_per_token:
            raise SizingError("the model has no layer that keeps KV")

    @property
    def bytes_per_token(self) -> int:
        """KV of one token in all layers, one copy."""
        return sum(self.layer_bytes(layer) for layer in self.layers)

    @property
    def gpus(self) -> int:
        """How many GPUs the model lies on."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def kv_layers(self) -> int:
        """Layers that keep KV."""
        return sum(layer.head_elements > 0 for layer in self.layers)

    def layer_bytes(self, layer: Layer) -> int:
        """KV of one token in one layer, one copy."""
        return layer.heads * layer.head_elements * self.element_bytes

    def gpu_layer_bytes(self, layer: Layer) -> int:
        """The part of it that one GPU holds."""
        return max(1, layer.heads // self.tensor_parallel) * layer.head_elements * self.element_bytes

    def stages(self) -> list[tuple[Layer, ...]]:
        """The layers of each pipeline stage; where they cannot be even, the first ones have one more."""
        each, more = divmod(len(self.layers), self.pipeline_parallel)
        ends = [(stage + 1) * each + min(stage + 1, more) for stage in range(self.pipeline_parallel)]
        return [self.layers[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def request_bytes(self, tokens: int) -> int:
        """KV of a sequence, one copy."""
        return sum(self.layer_bytes(layer) * kept_tokens(layer, tokens) for layer in self.layers)

    def gpu_request_bytes(self, tokens: int) -> int:
        """The part of it on the GPU that holds most."""
        return max(
            sum(self.gpu_layer_bytes(layer) * kept_tokens(layer, tokens) for layer in stage) for stage in self.stages()
        )


def kept_tokens(layer: Layer, tokens: int) -> int:
    """How many tokens of a sequence a layer keeps."""
    return tokens if layer.window_tokens is None else min(tokens, layer.window_tokens)
