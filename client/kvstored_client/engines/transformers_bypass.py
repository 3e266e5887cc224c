"""Which calls of `generate` must run without the store, and why.

The KV of a prompt is a function of its token ids only where nothing else enters the forward
pass, and one restored cache serves one sequence that only grows.
"""

from __future__ import annotations

import copy
from typing import Any, Final, cast

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvstored_client.engines.transformers_blocks import UnsupportedCacheError
from kvstored_client.engines.transformers_spec import check_adapters

_SETTINGS: Final[Any] = GenerationConfig
# Arguments that leave the KV of the prompt alone: settings of the generation, and what only looks
# at logits or tokens. Anything else (embeddings, images, positions, an assistant) may not.
_PLAIN_ARGUMENTS: Final = frozenset(_SETTINGS().to_dict()) - {"token_healing"} | {
    "attention_mask",
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "streamer",
    "synced_gpus",
    "tokenizer",
}
# The others roll the cache back, reorder it or fork it.
_PLAIN_MODES: Final = frozenset({GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE})


def reason_to_bypass(model: PreTrainedModel, input_ids: torch.Tensor, arguments: dict[str, Any]) -> str:
    """Why `model.generate(input_ids, **arguments)` must run without the store; empty where it need not."""
    if model.training:
        return "the model is in training mode"
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        return "input_ids are not one sequence"
    unknown = sorted(arguments.keys() - _PLAIN_ARGUMENTS)
    if unknown:
        return f"argument {unknown[0]} may change the cache"
    mask = arguments.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        return "attention_mask hides tokens"
    try:
        check_adapters(model)
    except UnsupportedCacheError as error:
        return str(error)
    return _mode_reason(_effective_config(model, arguments))


def _effective_config(model: PreTrainedModel, arguments: dict[str, Any]) -> GenerationConfig:
    """The settings that `generate` will use: arguments over the given config over the model's own."""
    config: Any = copy.deepcopy(model.generation_config)
    given: Any = arguments.get("generation_config")
    if given is not None:
        config.update(**{key: value for key, value in given.to_dict().items() if value is not None})
    config.update(**{key: value for key, value in arguments.items() if hasattr(config, key)})
    return cast("GenerationConfig", config)


def _mode_reason(config: GenerationConfig) -> str:
    """Why a generation with these settings cannot go on from one restored DynamicCache."""
    mode = config.get_generation_mode()
    if mode not in _PLAIN_MODES:
        return f"generation mode is {mode.value}"
    if (config.num_return_sequences or 1) > 1:
        return "several sequences are returned"
    if config.token_healing:
        return "token healing changes the prompt"
    if config.use_cache is False or config.cache_implementation is not None:
        return "the generation chooses its own cache"
    return ""
