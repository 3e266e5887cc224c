"""KV events: which blocks this engine has stored, and which of them it has found gone, as vLLM publishes them.

Routers send a request to where its prefix lies. A block is announced when all workers have stored it, and taken back
when a load did not bring it. What the store evicts meanwhile it does not tell: who computes it again announces it anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

from kvstored_client.engines.vllm.orders import Load, Save

_LIMIT: Final = 10_000  # events that wait to be taken: more than an engine makes in a step


class KVEvents:
    """The events of one engine, by its scheduler's half."""

    def __init__(self, block_tokens: Sequence[int]) -> None:
        """`block_tokens`: of each group of layers."""
        self._block_tokens = block_tokens
        self._begun: dict[int, BlockStored] = {}
        self._events: list[BlockStored | BlockRemoved] = []

    def begun(self, save: Save, request: Any, end_tokens: int) -> None:
        """A save has begun whose last block ends after so many tokens of its request."""
        run, length = save.run, self._block_tokens[save.run.group]
        last = end_tokens // length
        starts = [number * length for number in range(last - len(run.hashes), last)]
        lora = request.lora_request
        self._begun[save.job_id] = BlockStored(
            block_hashes=_external(run.hashes),
            parent_block_hash=_external([save.parent])[0] if save.parent else None,
            token_ids=list(request.all_token_ids[starts[0] : last * length]),
            block_size=length,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=_extra_keys(request, starts, length),
            group_idx=run.group,
        )

    def ended(self, save: Save, stored: int) -> None:
        """A save is over; bit i of `stored` says whether its block i is in the store."""
        whole = self._begun.pop(save.job_id, None)
        if whole is None:
            return
        first = 0
        count = len(whole.block_hashes)
        while first < count:
            end = first
            while end < count and stored >> end & 1:
                end += 1
            if end > first:
                self._add(_part(whole, first, end))
            first = end + 1

    def gone(self, load: Load, missing: set[int]) -> None:
        """A load did not bring these of its blocks."""
        for run in load.runs:
            hashes = [each for each, block in zip(run.hashes, run.block_ids, strict=True) if block in missing]
            if hashes:
                self._add(BlockRemoved(block_hashes=_external(hashes), medium=MEDIUM_CPU, group_idx=run.group))

    def take(self) -> list[BlockStored | BlockRemoved]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    def _add(self, event: BlockStored | BlockRemoved) -> None:
        if len(self._events) < _LIMIT:
            self._events.append(event)


def _part(whole: BlockStored, first: int, end: int) -> BlockStored:
    """The event of blocks `first` to `end` of those of a save."""
    length = whole.block_size
    return BlockStored(
        block_hashes=whole.block_hashes[first:end],
        parent_block_hash=whole.block_hashes[first - 1] if first else whole.parent_block_hash,
        token_ids=whole.token_ids[first * length : end * length],
        block_size=length,
        lora_id=whole.lora_id,
        medium=whole.medium,
        lora_name=whole.lora_name,
        extra_keys=whole.extra_keys[first:end] if whole.extra_keys else None,
        group_idx=whole.group_idx,
    )


def _external(hashes: Iterable[bytes]) -> list[Any]:
    """Block hashes as vLLM publishes them: by default their last 64 bits."""
    return [kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.BlockHash(each)) for each in hashes]


def _extra_keys(request: Any, starts: Iterable[int], length: int) -> list[Any] | None:
    """What beside the tokens went into the hash of each block, as vLLM publishes it; None: nothing."""
    keys = [kv_cache_utils.generate_block_hash_extra_keys(request, at, at + length, 0)[0] for at in starts]
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)  # before 0.31 nothing was tagged
    return list(untagged(keys) or ()) or None if untagged else keys
