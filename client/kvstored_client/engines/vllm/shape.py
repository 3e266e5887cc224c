"""The shape of an engine's KV: its groups of layers, their blocks, and which workers hold the same. Pure.

Layers that share a block table are a group. Full attention needs all blocks before the token that is computed next, a
sliding window the last few. Blocks of different groups may be of different length; they are found by the block hashes
of the engine, of which the last one within a block is its key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstored_client.engines.vllm.checks import Engine, check_engine
from kvstored_client.engines.vllm.settings import UnsupportedError

BLOCK_BYTES_MIN: Final = 16 << 10
BLOCK_BYTES_MAX: Final = 16 << 20
_FULL: Final = ("FullAttentionSpec", "MLAAttentionSpec")
_WINDOW: Final = ("SlidingWindowSpec",)
_LATENT: Final = "MLAAttentionSpec"
_BLOCKS_FIRST: Final = "B"  # names of layouts list the axes from the outermost on


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table."""

    number: int
    kind: str  # name of vLLM's class for it
    layers: tuple[str, ...]
    block_tokens: int
    block_bytes: int  # of one worker
    window_tokens: int = 0  # 0: every block is needed, else those that the last so many tokens lie in
    seen_tokens: int = 0  # how far attention looks back, whatever is kept; 0: to the beginning

    def first_needed(self, tokens: int) -> int:
        """The first block that is needed to go on after so many tokens."""
        return max(0, tokens - self.window_tokens + 1) // self.block_tokens if self.window_tokens else 0


@dataclass(frozen=True, slots=True)
class Shape:
    """What of an engine's KV cache decides about blocks."""

    groups: tuple[Group, ...]
    hash_tokens: int  # tokens of one block hash
    shards: int = 1  # parts of a block's KV that differ
    replicas: int = 1  # consecutive workers that hold the same part
    workers: int = 1
    shares_loads: bool = True  # what one request loads, others find in the engine's own cache

    @property
    def unit_tokens(self) -> int:
        """Hits end at multiples of this: at the end of a block of every group."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def whole_loads(self) -> bool:
        """A load comes whole or not at all: where blocks may be missing before others, no part of it is of use."""
        return len(self.groups) > 1 or bool(self.groups[0].window_tokens)

    def shard_of(self, rank: int) -> tuple[int, bool]:
        """Which part a worker holds, and whether it is the one that stores it."""
        return rank // self.replicas, rank % self.replicas == 0

    def keys(self, block_tokens: int, block_hashes: Sequence[bytes], first: int, end: int) -> list[bytes]:
        """Keys of the blocks `first` to `end` of a request, of groups with blocks of this length."""
        step = block_tokens // self.hash_tokens
        return [bytes(each) for each in block_hashes[first * step + step - 1 : end * step : step]]


def shape_of(config: Any, kv_cache_config: Any, engine: Engine) -> Shape:
    """The shape of an engine's blocks. Raises UnsupportedError naming what is not supported."""
    check_engine(config, engine)
    layout = str(getattr(kv_cache_config, "kv_cache_layout", None) or "")
    if layout.startswith(_BLOCKS_FIRST):
        raise UnsupportedError(
            f"KV cache layout {layout} keeps all layers of a block together, which vLLM's attention on CPUs cannot "
            "read: unset VLLM_KV_CACHE_LAYOUT"
        )
    groups = tuple(_group(number, each) for number, each in enumerate(kv_cache_config.kv_cache_groups))
    if not groups:
        raise UnsupportedError("the model has no KV cache")
    lengths = [group.block_tokens for group in groups]
    # Not there before 0.31, where it follows from the groups.
    hashed = getattr(kv_cache_config, "hash_block_size", None) or math.gcd(*lengths)
    if any(length % hashed for length in lengths):
        raise UnsupportedError(f"one hash for {hashed} tokens and blocks of {lengths}: they must be multiples")
    if len(groups) == 1 and hashed != lengths[0]:
        raise UnsupportedError(f"one hash for {hashed} tokens and blocks of {lengths[0]}: they must be equal")
    workers = config.parallel_config.tensor_parallel_size
    replicas = _replicas(config, kv_cache_config, groups)
    sharing = bool(config.cache_config.enable_prefix_caching)
    return Shape(groups, hashed, workers // replicas, replicas, workers, sharing)


def _group(number: int, given: Any) -> Group:
    spec = given.kv_cache_spec
    kind = type(spec).__name__
    if kind not in (*_FULL, *_WINDOW):
        raise UnsupportedError(
            f"KV cache of type {kind}: supported are {', '.join((*_FULL, *_WINDOW))}; where it is a kind of window, "
            "disable_hybrid_kv_cache_manager makes vLLM keep its blocks whole"
        )
    if getattr(given, "host_resident", False) or not getattr(given, "enable_kv_transfer", True):
        raise UnsupportedError(f"KV cache group {number} is not the engine's own memory: not supported")
    if (states := getattr(spec, "tokens_per_state", 1)) != 1:
        raise UnsupportedError(f"KV cache group {number} keeps one state for {states} tokens: 1 is supported")
    page_bytes = getattr(spec, "real_page_size_bytes", spec.page_size_bytes)
    block_bytes = page_bytes * len(given.layer_names)
    if not BLOCK_BYTES_MIN <= block_bytes <= BLOCK_BYTES_MAX:
        fix = "larger" if block_bytes < BLOCK_BYTES_MIN else "smaller"
        raise UnsupportedError(
            f"a block of {spec.block_size} tokens has {block_bytes} bytes, and blocks have "
            f"{BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX}: give a {fix} block_size"
        )
    seen = getattr(spec, "sliding_window", None) or 0
    window = seen if kind in _WINDOW else 0
    return Group(number, kind, tuple(given.layer_names), spec.block_size, block_bytes, window, seen)


def _replicas(config: Any, kv_cache_config: Any, groups: tuple[Group, ...]) -> int:
    """How many consecutive workers hold the same KV."""
    workers = int(config.parallel_config.tensor_parallel_size)
    told = getattr(kv_cache_config, "kv_tp_replicas", None)  # since 0.31
    if told is not None:
        return max(1, int(told))
    if all(group.kind == _LATENT for group in groups):
        return workers  # a latent vector belongs to all heads
    if any(group.kind == _LATENT for group in groups):
        return 1
    heads = getattr(config.model_config, "get_total_num_kv_heads", lambda: workers)()
    return max(1, workers // max(1, int(heads)))
