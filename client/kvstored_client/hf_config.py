"""What a model's `config.json` says about its KV, for its identity: read, never refused for being unknown.

What a config says in a form that is not known here stays out of the fields, and is in the fingerprint of the whole
config all the same. Names are those of Transformers' configuration classes and of older configs (GPT-2, GPT-NeoX,
Falcon, MPT, ChatGLM). `kvstored_client.ctl.model_config` reads the same names more strictly, to size a cache.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Final

TEXT_PARTS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
HEAD_DIM: Final = ("head_dim", "kv_channels")
# All layers have the window in these.
ALL_WINDOWED: Final = ("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2")

_CONFIG_BYTES_MAX: Final = 8 << 20
_UINT32_MAX: Final = (1 << 32) - 1
_THETAS: Final = ("rope_theta", "rotary_emb_base", "rotary_base", "rope_base")
# Settings of positions that stand beside the rotary ones.
_POSITIONS: Final = (
    *("rope_local_base_freq", "global_rope_theta", "local_rope_theta", "partial_rotary_factor", "rotary_pct"),
    *("rotary_dim", "rope_interleave", "no_rope_layers", "no_rope_layer_interval", "alibi", "position_embedding_type"),
)
# Parts of a config that name, describe or steer, and do not change a single bit of KV.
_IRRELEVANT: Final = frozenset(
    {
        *("_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id"),
        *("output_attentions", "output_hidden_states", "pad_token_id", "return_dict", "torch_dtype"),
        *("transformers_version", "use_cache"),
    }
)
_DTYPES: Final = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "half", "float16"), "float16"),
    **dict.fromkeys(("fp32", "float", "float32"), "float32"),
    "auto": "",
}
_HUB_CACHE: Final = re.compile(r"models--(.+)/snapshots/[0-9a-f]+")


class ConfigError(ValueError):
    """There is no config, or it lacks what identity cannot do without; the message says what to give."""


def read(config: object) -> tuple[dict[str, Any], str]:
    """A config as a dict, and the name or path that it came from ("": unknown).

    `config` is a dict, a config object of Transformers (anything with `to_dict`), or the path of a config.json or of
    its directory. Raises ConfigError.
    """
    if isinstance(config, str | os.PathLike):
        return _read_file(Path(os.path.abspath(config)))
    if isinstance(config, Mapping):
        content = dict(config)
    elif callable(to_dict := getattr(config, "to_dict", None)):
        content = dict(to_dict())
    else:
        raise ConfigError(f"a {type(config).__name__} is no config: give a dict, a config object, or a path")
    name = getattr(config, "name_or_path", None) or content.get("_name_or_path") or ""
    return content, str(name)


def _read_file(path: Path) -> tuple[dict[str, Any], str]:
    file = path / "config.json" if path.is_dir() else path
    try:
        with open(file, "rb") as opened:
            content = json.loads(opened.read(_CONFIG_BYTES_MAX))
    except FileNotFoundError as error:
        raise ConfigError(f"{file} is not there: give the path of a config.json, or of its directory") from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON of at most {_CONFIG_BYTES_MAX >> 20} MiB: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is no config.json: it holds no object")
    return content, str(file.parent)


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's part, where the model has encoders for other inputs beside it."""
    part = dict(config)
    while inner := next((part[name] for name in TEXT_PARTS if isinstance(part.get(name), Mapping)), None):
        part = dict(inner)
    return part


def model_name(name: str) -> str:
    """Name of a model that survives a move: a local directory's last part, or the repository of a hub's cache."""
    name = name.encode(errors="backslashreplace").decode()  # a path may have bytes that are no UTF-8
    if hub := _HUB_CACHE.search(name):
        return hub[1].replace("--", "/")
    return PurePath(name).name if PurePath(name).is_absolute() else name


def dtype_name(dtype: object) -> str:
    """One name for each element type, from a name, an alias or a torch type; "" for none and "auto"."""
    name = "" if dtype is None else str(dtype).lower().removeprefix("torch.")
    return _DTYPES.get(name, name)


def dtype_of(config: Mapping[str, Any]) -> str:
    """Element type of the model's computation, "" where the config names none."""
    for part in (text_part(config), config):
        if name := dtype_name(part.get("dtype") or part.get("torch_dtype")):
            return name
    return ""


def shape_of(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Layers, KV heads and elements of a head; of latent attention one head: latent and rotary key. 0 is unknown."""
    layers = _count(text, LAYERS)
    if rank := _count(text, ("kv_lora_rank",)):
        return layers, 1, rank + _count(text, ("qk_rope_head_dim",))
    heads, hidden = _count(text, HEADS), _count(text, HIDDEN)
    one_head = text.get("multi_query") and not text.get("new_decoder_architecture")  # Falcon 7B, StarCoder
    kv_heads = _count(text, KV_HEADS[:1]) or (1 if one_head else _count(text, KV_HEADS) or heads)
    return layers, kv_heads, _count(text, HEAD_DIM) or (hidden // heads if heads else 0)


def rope_of(text: Mapping[str, Any]) -> tuple[float, str]:
    """Theta (0.0: none, or one for each kind of layer), and canonical JSON of all else about positions.

    `rope_scaling` beside `rope_theta` and `rope_parameters` come out alike, `type` is `rope_type`, and the type
    "default" is as none.
    """
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = text.get(name)
        settings |= _one_form(value) if isinstance(value, Mapping) else {name: value} if value else {}
    theta = _number(settings.pop("rope_theta", None)) or next(
        filter(None, (_number(text.get(n)) for n in _THETAS)), 0.0
    )
    if settings.get("rope_type") == "default":
        del settings["rope_type"]
    settings |= {name: text[name] for name in _POSITIONS if text.get(name) is not None}
    return theta, canonical_json(settings) if settings else ""


def _one_form(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in today's words, of one kind of layer or of several."""
    out = {str(key): _one_form(value) if isinstance(value, Mapping) else value for key, value in settings.items()}
    old = out.pop("type", None)
    return {"rope_type": old, **out} if old is not None else out


def window_of(text: Mapping[str, Any]) -> tuple[int, str]:
    """The window in tokens where all layers have the same one, else 0; and words about layers that differ."""
    window = _count(text, ("sliding_window",))
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds:
        counted = Counter(map(str, kinds))
        if set(counted) == {"full_attention"}:
            return 0, ""
        if set(counted) == {"sliding_attention"} and window:
            return window, ""
        words = ",".join(f"{kind}:{number}" for kind, number in sorted(counted.items()))
        return 0, f"layer_types={words}" + (f";sliding_window={window}" if window else "")
    if not window or text.get("use_sliding_window") is False:
        return 0, ""
    if text.get("model_type") in ALL_WINDOWED and not text.get("max_window_layers"):
        return window, ""
    return 0, f"sliding_window={window}"


def quantization_of(config: Mapping[str, Any]) -> str:
    """Canonical JSON of how the weights are quantised, "" where they are not."""
    setting = config.get("quantization_config") or text_part(config).get("quantization_config")
    if setting is None:
        return ""
    to_dict = getattr(setting, "to_dict", None)
    return canonical_json(to_dict() if callable(to_dict) else setting)


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """Hash over all that a config says about the computation, known here or not (norms, activations, scaling)."""
    return hashlib.sha256(canonical_json(_relevant(config)).encode()).hexdigest()[:32]


def _relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    return {k: _relevant(v) if k in TEXT_PARTS and isinstance(v, Mapping) else v for k, v in kept.items()}


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces, the same in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_as_text)


def _as_text(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _number(value: object) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if known and math.isfinite(value) else 0.0  # type: ignore[arg-type]


def _count(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """The first of these fields that is a count, else 0."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _UINT32_MAX:
            return value
    return 0
