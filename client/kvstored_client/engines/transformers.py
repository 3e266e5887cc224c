"""Prefix reuse for Hugging Face Transformers: `generate()` on a `DynamicCache`.

    store = PrefixStore(Client(), model, tokenizer)
    output = store.generate(input_ids, max_new_tokens=100)

is `model.generate(input_ids, max_new_tokens=100)` that skips the part of the prompt that any
process on this node has read before, and leaves its own prompt for the next one. Restored bytes
are the stored bytes, so that logits equal those of a forward pass split at the same token.

A store that is absent, slow or full costs a bounded wait and is then a miss: generation goes on
without it. What cannot be stored correctly (batches, beam search, sliding windows, quantised or
offloaded caches, adapters) is refused by `load` and `save` with UnsupportedCacheError; `generate`
runs the model without the store and says why in `stats.bypassed`.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import DynamicCache, PreTrainedModel

from kvstored_client.engines.transformers_blocks import (
    UnsupportedCacheError,
    check_cache,
    check_tensors,
    fill_cache,
    join_layers,
    single_sequence,
    write_block,
)
from kvstored_client.engines.transformers_bypass import reason_to_bypass
from kvstored_client.engines.transformers_spec import check_adapters, geometry_of, namespace_spec
from kvstored_client.errors import FAILURES

if TYPE_CHECKING:
    from kvstored_client import Client

__all__ = ["PrefixStats", "PrefixStore", "UnsupportedCacheError"]

_LOG = logging.getLogger(__name__)
_BLOCKS_PER_CALL: Final = 8192
# Blocks go to the daemon in pieces, so that a long prompt needs no staging memory of its own size.
_STAGE_BYTES: Final = 16 << 20
_FAILURES: Final = (*FAILURES, torch.OutOfMemoryError)  # on a device: of what is loaded or gathered there


@dataclass
class PrefixStats:
    """What the store did for this process."""

    loads: int = 0
    asked_tokens: int = 0
    reused_tokens: int = 0
    saved_blocks: int = 0
    failures: int = 0
    bypassed: Counter[str] = field(default_factory=Counter)


class PrefixStore:
    """Loads and saves the KV of token prefixes of one model.

    The weights are fingerprinted once, here: make a new PrefixStore after changing them. Not for
    use by several threads at once, as the model is not either.
    """

    def __init__(
        self,
        client: Client,
        model: PreTrainedModel,
        /,
        tokenizer: object | None = None,
        *,
        block_tokens: int = 64,
        wait_s: float = 1.0,
        save_reply: bool = False,
        weights: str | os.PathLike[str] | None = None,
        **spec_fields: Any,
    ) -> None:
        """Derive block layout and namespace from `model`.

        Args:
            client: connection to the daemon; may be unconnected.
            model: a decoder-only model whose cache is a plain DynamicCache.
            tokenizer: becomes part of the namespace where given.
            block_tokens: granularity of reuse, tokens in one block.
            wait_s: how long a load may wait for blocks on NVMe or being written, a save for room.
            save_reply: store generated tokens too, for the next turn of a chat. Off, because KV of
                single decode steps may differ from that of a prefill in the last bit.
            weights: the directory that the model was loaded from, unchanged since: its files are sampled (and the
                result cached) in place of the tensors in memory. Processes share blocks only where all give it or none.
            spec_fields: fields of NamespaceSpec that override the derived ones, e.g. `model` (its
                name), `template_version`, `permission_version`.

        Raises:
            UnsupportedCacheError: the model's KV cannot be stored by prefix; the message says why.
            WeightsError: `weights` are not there, or incomplete.
        """
        self.stats = PrefixStats()
        self._client = client
        self._model = model
        self._model_generate: Any = model.generate
        self._wait_s = wait_s
        self._save_reply = save_reply
        self._geometry = geometry_of(model, block_tokens)
        self._namespace = client.namespace(namespace_spec(model, self._geometry, tokenizer, spec_fields, weights))
        parameters = inspect.signature(type(model).forward).parameters
        # Transformers 5.24 renamed the argument; older releases know only the long name.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def load(self, input_ids: torch.Tensor) -> tuple[DynamicCache, int]:
        """A cache with the longest stored prefix of `input_ids`, and its length in tokens.

        At most all tokens but one, since the model needs one to go on from. The cache is empty
        where nothing is stored or the store does not answer. Raises UnsupportedCacheError.
        """
        check_adapters(self._model)
        tokens = single_sequence(input_ids)
        cache = DynamicCache(config=self._model.config)
        self.stats.loads += 1
        self.stats.asked_tokens += len(tokens)
        try:
            layers = self._fetch(tokens[:-1])
        except _FAILURES as error:
            self._failed("load", error)
            return cache, 0
        if layers:
            fill_cache(cache, layers)
        reused = cache.get_seq_length()
        self.stats.reused_tokens += reused
        return cache, reused

    def save(self, input_ids: torch.Tensor, cache: DynamicCache) -> int:
        """Store the full blocks of `cache` that are not stored yet; answers how many were.

        `input_ids` are the tokens that `cache` was computed from; more of them than it holds
        (the last generated one) or fewer are fine. Raises UnsupportedCacheError.
        """
        check_adapters(self._model)
        check_cache(cache)
        tokens = single_sequence(input_ids)[: cache.get_seq_length()]
        if len(tokens) < self._geometry.block_tokens:
            return 0
        check_tensors(cache, self._geometry)
        try:
            saved = self._store(tokens, cache)
        except _FAILURES as error:
            self._failed("save", error)
            return 0
        self.stats.saved_blocks += saved
        return saved

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """`model.generate(input_ids, **kwargs)` that loads the stored prefix before and saves after.

        Answers what the model's own `generate` answers and raises what it raises.
        """
        reason = reason_to_bypass(self._model, input_ids, kwargs)
        if reason:
            self.stats.bypassed[reason] += 1
            return self._model_generate(input_ids, **kwargs)
        cache, _ = self.load(input_ids)
        output = self._model_generate(input_ids, **kwargs, **{self._cache_argument: cache})
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        self.save(sequences if self._save_reply else input_ids, cache)
        return output

    # --- talking to the store ---

    def _hashes(self, tokens: list[int]) -> list[bytes]:
        """Chain hashes of the full blocks, none while the daemon has never been reached."""
        if len(tokens) < self._geometry.block_tokens or not self._namespace.chain_seed:
            return []
        hashes: list[bytes] = self._namespace.chain(tokens, self._geometry.block_tokens)
        return hashes[:_BLOCKS_PER_CALL]

    def _fetch(self, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Layers of the longest stored prefix of `tokens`; none is a miss."""
        hashes = self._hashes(tokens)
        if not hashes:
            return []
        shape, dtype = self._geometry.block_shape, self._geometry.dtype
        with self._client.get(self._namespace, hashes, wait_s=self._wait_s) as blocks:
            if not len(blocks):
                return []
            if set(blocks.sizes_bytes) == {self._geometry.block_bytes}:
                # Only held within join_layers: views must be gone before the lease is.
                layers = join_layers([blocks.torch(i, dtype, shape) for i in range(len(blocks))], self._model.device)
                if blocks.valid():
                    return layers
        self.stats.failures += 1
        return []

    def _store(self, tokens: list[int], cache: DynamicCache) -> int:
        """Stage and commit what is missing, in pieces, until the store has no room for more."""
        hashes = self._hashes(tokens)
        if not hashes:
            return 0
        first = self._client.lookup(self._namespace, hashes).prefix_blocks
        piece = max(1, _STAGE_BYTES // self._geometry.block_bytes)
        saved = 0
        for start in range(first, len(hashes), piece):
            stored, complete = self._store_piece(hashes, start, start + piece, cache)
            saved += stored
            if not complete:
                break
        return saved

    def _store_piece(self, hashes: list[bytes], start: int, end: int, cache: DynamicCache) -> tuple[int, bool]:
        """Store blocks `start` to `end`; answers how many were new, and whether all are there now."""
        wanted = hashes[start:end]
        parent = hashes[start - 1] if start else b""
        block_bytes = self._geometry.block_bytes
        with self._client.stage(self._namespace, wanted, block_bytes, parent=parent, wait_s=self._wait_s) as staged:
            for offset, view in enumerate(staged.views):
                if view is not None:
                    write_block(cache, self._geometry, start + offset, view)
            result = staged.commit()
        # A block without its parent is of no use to anyone, so a gap ends the save.
        return result.stored, result.stored + result.existing + result.pending == len(wanted)

    def _failed(self, verb: str, error: Exception) -> None:
        self.stats.failures += 1
        _LOG.warning("prefix %s failed, going on without the store: %s", verb, error)
