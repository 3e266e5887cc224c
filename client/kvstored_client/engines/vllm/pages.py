"""The engine's KV tensors as paged memory: a block is one page of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstored_client.engines.vllm.settings import UnsupportedError
from kvstored_client.paged import PagedKV


def pages_of(kv_caches: Mapping[str, Any], num_blocks: int) -> PagedKV:
    """The memory behind the engine's KV tensors, one per layer, whose first axis are blocks.

    Raises UnsupportedError for memory that is not the CPU's, or not made of blocks.
    """
    layers: list[Any] = []
    for name, tensor in kv_caches.items():
        if isinstance(tensor, list | tuple):
            raise UnsupportedError(f"layer {name} has several state tensors (Mamba): not supported")
        if tensor.device.type != "cpu":
            raise UnsupportedError(f"KV memory on {tensor.device}: this version moves KV in CPU memory only")
        if tensor.shape[0] % num_blocks:
            raise UnsupportedError(f"layer {name} has {tensor.shape[0]} blocks, which are not {num_blocks} times some")
        # A block of the scheduler may be several of the kernel.
        layers.append(tensor if tensor.shape[0] == num_blocks else tensor.unflatten(0, (num_blocks, -1)))
    return PagedKV(layers)
