"""What stands in the way of sharing an engine's KV, whatever its shape: refused by name when the engine starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvstored_client.engines.vllm.settings import Settings, UnsupportedError

KV_DTYPES: Final = {
    "auto": "",
    **{name: name for name in ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2")},
    "fp8": "fp8_e4m3",
}
_HASHES: Final = ("sha256", "sha256_cbor")


@dataclass(frozen=True, slots=True)
class Engine:
    """What the connector learns from vLLM itself, beside its configuration."""

    version: str
    platform: str  # device and instruction set: they decide about the bytes within a block
    hash_seed: str | None  # what the block hashes start from; None: random in each process
    fails_whole_loads: bool = True  # a load can be reported as failed without naming its blocks: since 0.30


def check_engine(config: Any, engine: Engine) -> None:
    """Raises UnsupportedError naming what of an engine is not supported."""
    _check_parallel(config.parallel_config)
    _check_hashes(config.cache_config, engine)
    _check_computation(config)


def check_loads(settings: Settings, config: Any, engine: Engine, *, whole_loads: bool) -> None:
    """Raises UnsupportedError where a load that failed could not be told, or not in time.

    `whole_loads`: a load is of use as a whole only.
    """
    if whole_loads and not engine.fails_whole_loads:
        raise UnsupportedError(
            f"vLLM {engine.version} cannot be told that a load failed where there are sliding windows: "
            "disable_hybrid_kv_cache_manager, or vLLM 0.30"
        )
    if settings.load_async:
        return
    if whole_loads:
        raise UnsupportedError("load_async=false with several KV cache groups or a sliding window: not supported")
    if config.parallel_config.tensor_parallel_size > 1:
        raise UnsupportedError("load_async=false with tensor_parallel_size > 1: not supported")
    if config.scheduler_config.async_scheduling:
        raise UnsupportedError("load_async=false needs async_scheduling=false")


def _check_parallel(parallel: Any) -> None:
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedError(f"{name} is {getattr(parallel, name)}: 1 is supported")


def _check_hashes(cache: Any, engine: Engine) -> None:
    algorithm = cache.prefix_caching_hash_algo
    if algorithm not in _HASHES:
        raise UnsupportedError(
            f"prefix_caching_hash_algo is {algorithm}: with crafted collisions one user's context could be served to "
            f"another; supported are {', '.join(_HASHES)}"
        )
    if engine.hash_seed is None:
        raise UnsupportedError(
            f"vLLM {engine.version} starts its block hashes from a random NONE_HASH in each process, so that nothing "
            "stored would ever be found: set PYTHONHASHSEED to one number for all engines (PYTHONHASHSEED=0)"
        )


def _check_computation(config: Any) -> None:
    cache = config.cache_config
    if cache.cache_dtype not in KV_DTYPES:
        raise UnsupportedError(f"KV cache dtype {cache.cache_dtype}: supported are {', '.join(KV_DTYPES)}")
    if getattr(cache, "calculate_kv_scales", False):
        raise UnsupportedError(
            "calculate_kv_scales: scales that are computed from the first requests differ per engine"
        )
    speculative = config.speculative_config
    method = getattr(speculative, "method", None) if speculative is not None else "ngram"
    if method != "ngram":
        raise UnsupportedError(f"speculative decoding by {method}: its draft layers are not supported, only ngram is")
    if config.device_config.device_type != "cpu":
        raise UnsupportedError(f"device {config.device_config.device_type}: this version moves KV in CPU memory only")
