"""A model's layers out of its `config.json`, as Hugging Face models publish it; refused where they would be guessed.

Names of fields and what absent ones mean: the configuration classes of Transformers and the older configs of GPT-2,
Falcon, MPT and ChatGLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvstored_client.hf_config import ALL_WINDOWED, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, TEXT_PARTS
from kvstored_client.kv_shape import Layer, SizingError

CONFIG_BYTES_MAX: Final = 8 << 20
COUNT_MAX: Final = 1 << 30
LAYERS_MAX: Final = 1 << 14
ELEMENT_BYTES: Final = {
    **dict.fromkeys(("float32", "fp32", "float"), 4),
    **dict.fromkeys(("float16", "fp16", "half", "bfloat16", "bf16"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8"), 1),
}
DEFAULT_DTYPE: Final = "float16"

# Layers of several shapes, and kinds of layers without `layer_types`, in forms that only the model's own code reads.
_SHAPES: Final = (
    *("block_configs", "swa_num_key_value_heads", "swa_head_dim", "num_global_key_value_heads", "global_head_dim"),
    "per_layer_config",
)
_KINDS: Final = (
    *("hybrid_override_pattern", "layers_block_type", "attn_layer_period", "attn_type_list", "linear_attn_config"),
    "layer_group_size",
)
_FULL: Final = ("full_attention", "attention", "indexed_attention", "deepseek_sparse_attention")
_WINDOWED: Final = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_STATE: Final = ("linear_attention", "mamba", "conv", "recurrent")
_NOTHING: Final = ("mlp", "moe")
# All layers have the window in these, and in one that does not say what it is.
_ALL_WINDOWED: Final = (None, *ALL_WINDOWED)
# Every n-th layer is a full one where the config of such a model names no pattern.
_PATTERNS: Final = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "gemma3n_text": 5, "gemma3_text": 6}


def read_config(path: Path) -> dict[str, Any]:
    """The decoder's part of a config file, or of the one in a directory. Raises SizingError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > CONFIG_BYTES_MAX:
            raise SizingError(f"{file} is no config.json: it has more than {CONFIG_BYTES_MAX >> 20} MiB")
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SizingError(f"{file} is not there: give the path of a config.json, or of its directory") from error
    except OSError as error:
        raise SizingError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, SizingError) else SizingError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise SizingError(f"{file} is no config.json: it holds no object")
    if config.get("is_encoder_decoder"):
        raise SizingError(f"{file} is of an encoder-decoder: its KV depends on more than the prefix")
    while part := next((config[name] for name in TEXT_PARTS if isinstance(config.get(name), dict)), None):
        config = part if dtype_of(part) else {**part, "dtype": dtype_of(config)}
    return dict(config)


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """The type that the weights are stored in, where the config names one."""
    name = config.get("dtype") or config.get("torch_dtype")
    return name.removeprefix("torch.") if isinstance(name, str) and name != "auto" else None


def layers_of(config: Mapping[str, Any]) -> tuple[tuple[Layer, ...], list[str]]:
    """All layers, and what one should know about them. Raises SizingError where they cannot be known."""
    for name in _SHAPES if config.get("layer_types") else (*_SHAPES, *_KINDS):
        if config.get(name):
            raise SizingError(
                f"the config has layers of several kinds in a form that is not known ({name}): "
                "leave it away, and describe those with attention by --layers, --kv-heads, --head-dim"
            )
    count = layer_count(config)
    heads, elements = _head_shape(config)
    types = layer_types(config, count)
    shared = _optional(config, ("num_kv_shared_layers",)) or 0
    if shared >= count:
        raise SizingError(f"num_kv_shared_layers is {shared}, of {count} layers")
    layers = [
        Layer(1, 0) if number >= count - shared else _layer(config, kind, heads, elements)
        for number, kind in enumerate(types)
    ]
    return tuple(layers), _notes(config, types, shared)


def layer_count(config: Mapping[str, Any]) -> int:
    """How many layers there are. Raises SizingError where nothing says it."""
    count = _need(config, LAYERS, "--layers")
    if count > LAYERS_MAX:
        raise SizingError(f"the config has {count} layers: at most {LAYERS_MAX} are planned for")
    return count


def layer_types(config: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer, in the words of Transformers' `layer_types`."""
    types = config.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            raise SizingError(f"layer_types must list the kinds of all {layers} layers")
        return types
    if every := _optional(config, ("full_attention_interval",)):
        return _every(layers, _all_but_each(every), "linear_attention")
    if config.get("attention_chunk_size"):
        interval = _optional(config, ("no_rope_layer_interval",)) or 4
        uses_rope = config.get("no_rope_layers") or [number % interval != 0 for number in range(1, layers + 1)]
        if not isinstance(uses_rope, list) or len(uses_rope) != layers:
            raise SizingError(f"no_rope_layers must have an entry for each of the {layers} layers")
        return _every(layers, lambda number: bool(uses_rope[number - 1]), "chunked_attention")
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    return _every(layers, _slides(config), "sliding_attention")


def _slides(config: Mapping[str, Any]) -> Callable[[int], bool]:
    """Whether the n-th layer (from 1) of a model with a sliding window has one."""
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if isinstance(pattern, str) and set(pattern) <= {"L", "G"}:  # local, global
        letters = pattern
        return lambda number: letters[(number - 1) % len(letters)] == "L"
    if pattern is not None and (isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1):
        raise SizingError(f"sliding_window_pattern is {pattern!r}: a whole number, or letters L and G, is known")
    interval = pattern or _PATTERNS.get(str(config.get("model_type")))
    if interval:
        return _all_but_each(interval)
    full = config.get("max_window_layers") if config.get("use_sliding_window") else None
    if full is None and config.get("model_type") not in _ALL_WINDOWED:
        raise SizingError("the config has a sliding_window and does not say in which layers: give --window-layers")
    first = full if isinstance(full, int) else 0
    return lambda number: number > first


def _all_but_each(interval: int) -> Callable[[int], bool]:
    return lambda number: number % interval != 0


def _every(layers: int, special: Callable[[int], bool], kind: str) -> list[str]:
    return [kind if special(number) else "full_attention" for number in range(1, layers + 1)]


def _head_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """KV heads, and elements that each keeps of a token; a latent counts as one head."""
    if rank := _optional(config, ("kv_lora_rank",)):
        return 1, rank + _need(config, ("qk_rope_head_dim",), "--qk-rope-head-dim")
    one_head = config.get("multi_query") and not config.get("new_decoder_architecture")  # Falcon 7B, StarCoder
    if one_head and not config.get("num_key_value_heads"):
        kv_heads = 1
    else:
        kv_heads = _optional(config, KV_HEADS) or _need(config, HEADS, "--kv-heads")
    key = _optional(config, HEAD_DIM)
    if key is None:
        hidden, heads = _need(config, HIDDEN, "--head-dim"), _need(config, HEADS, "--head-dim")
        if hidden % heads:
            raise SizingError(f"the config has no head_dim, and {heads} heads do not share a width of {hidden} evenly")
        key = hidden // heads
    return kv_heads, key + (_optional(config, ("v_head_dim",)) or key)


def _layer(config: Mapping[str, Any], kind: object, heads: int, elements: int) -> Layer:
    if kind in _FULL:
        return Layer(heads, elements)
    if kind in _STATE or kind in _NOTHING:
        return Layer(1, 0)
    if isinstance(kind, str) and (window := _WINDOWED.get(kind)):
        return Layer(heads, elements, _need(config, (window,), "--window"))
    raise SizingError(f"layer_types has {kind!r}: not known; describe the layers by --layers, --kv-heads, --head-dim")


def _notes(config: Mapping[str, Any], types: list[str], shared: int) -> list[str]:
    notes = []
    for kind, window in _WINDOWED.items():
        if number := types.count(kind):
            notes.append(
                f"{number} of {len(types)} layers keep only the last {config[window]} tokens of a request; "
                "to resume any prefix, all their blocks have to be kept"
            )
    if number := sum(kind in _STATE for kind in types):
        notes.append(f"{number} of {len(types)} layers keep a state of fixed size, which is not counted")
    if shared:
        notes.append(f"the last {shared} layers use the KV of others")
    if config.get("kv_lora_rank"):
        notes.append("latent attention: counted as engines keep it, one latent and one rotary key for all heads")
    if config.get("index_head_dim"):
        notes.append("the keys of the sparse indexer (index_head_dim) are not counted: engines differ in their form")
    return notes


def _need(config: Mapping[str, Any], names: tuple[str, ...], option: str) -> int:
    value = _optional(config, names)
    if value is None:
        raise SizingError(f"nothing says the model's {' or '.join(names)}: give {option}")
    return value


def _optional(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these fields that is there; null and 0 mean that it is not."""
    for name in names:
        if value := config.get(name):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= COUNT_MAX:
                raise SizingError(f"{name} is {value!r}: must be a whole number, 1 to {COUNT_MAX}")
            return value
    return None
