"""An engine's namespaces as a client holds them: by group, shard, generation and adapter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

from kvstored_client import Client, Namespace
from kvstored_client.engines.vllm.cuts import Track, tracks_of
from kvstored_client.engines.vllm.shape import Shape

_KEPT_MAX: Final = 256  # adapters and generations of which handles are kept


class Namespaces:
    """Handles on the namespaces of one engine, made when first needed."""

    def __init__(self, client: Client, shape: Shape, specs: Sequence[Sequence[NamespaceSpec]]) -> None:
        """`specs`: for each group those of its shards."""
        self._client = client
        self._shape = shape
        self._specs = specs
        self.tracks = lru_cache(_KEPT_MAX)(self._tracks)
        self.of_shard = lru_cache(_KEPT_MAX)(self._of_shard)

    def _tracks(self, generation: str, adapter: str) -> tuple[Track, ...]:
        """All of a generation and an adapter, as look-ups need them."""
        made = [[self._open(spec, generation, adapter) for spec in shards] for shards in self._specs]
        return tracks_of(self._shape, made)

    def _of_shard(self, shard: int, generation: str, adapter: str) -> list[Namespace]:
        """Those of one shard, by group."""
        return [self._open(shards[shard], generation, adapter) for shards in self._specs]

    def _open(self, spec: NamespaceSpec, generation: str, adapter: str) -> Namespace:
        copy = NamespaceSpec()
        copy.CopyFrom(spec)
        copy.adapter = adapter
        if generation:  # apart from what was stored before the engine's cache was reset
            copy.extra = f"{spec.extra};reset={generation}"
        return self._client.namespace(copy)
