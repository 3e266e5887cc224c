"""Jobs of the secondary tier: chunks between vLLM's own pool and the store, in threads. No vLLM here.

A load that fails is a miss and a store that fails is nothing lost: vLLM is told so and goes on. Every job ends exactly
once, and not before nothing of its chunks is read or written any more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

from kvstored_client import Namespace, Outcome, Unavailable, threads
from kvstored_client.engines.vllm.settings import UnsupportedError
from kvstored_client.identity import ConfigError, WeightsError, spec_from_hf_config
from kvstored_client.paged import PagedKV

_LOG = logging.getLogger(__name__)
_FORMAT: Final = 1  # of what is stored of a chunk
_KEY_BYTES_MIN: Final = 36  # a SHA-256 and the number of the group


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that is over."""

    job_id: int
    keys: Sequence[bytes]
    done: int  # leading keys whose chunks are there now
    is_load: bool
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether all of them are."""
        return self.done == len(self.keys)


class Jobs:
    """Loads and stores of chunks. Its methods are called by the scheduling thread, and return at once but `drain`."""

    def __init__(self, client: Any, namespace: Namespace, chunks: PagedKV, load_wait_s: float) -> None:
        """`chunks`: vLLM's pool; `load_wait_s`: how long a load waits for what lies on NVMe."""
        self._client = client
        self._namespace = namespace
        self._chunks = chunks
        self._load_wait_s = load_wait_s
        # One thread each: a load, which a request waits for, is never behind stores.
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="kvstored-tier-load")
        self._storing = ThreadPoolExecutor(1, thread_name_prefix="kvstored-tier-store")
        self._under_way: set[Future[None]] = set()
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    def stored(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these can be loaded. Asks the daemon: not for the scheduling thread."""
        return [each is Outcome.HIT for each in self._client.contains(self._namespace, [bytes(key) for key in keys])]

    def store(self, job_id: int, keys: Sequence[bytes], chunk_ids: Any) -> None:
        """Begin to store these chunks; vLLM keeps them until the job has ended."""
        self._begin(self._storing, self._store, job_id, keys, chunk_ids, is_load=False)

    def load(self, job_id: int, keys: Sequence[bytes], chunk_ids: Any) -> None:
        """Begin to load these chunks."""
        self._begin(self._loading, self._load, job_id, keys, chunk_ids, is_load=True)

    def refuse(self, job_id: int, keys: Sequence[bytes]) -> None:
        """Count a store as ended without a start."""
        self._ended.put(Ended(job_id, keys, 0, False, 0.0))

    def take_ended(self) -> list[Ended]:
        """What has ended since the last call."""
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def drain(self) -> None:
        """Wait until every job has ended."""
        wait(self._under_way)

    def close(self) -> None:
        """The same, then end the threads."""
        self._loading.shutdown(wait=True)
        self._storing.shutdown(wait=True)

    def _begin(
        self,
        pool: ThreadPoolExecutor,
        move: Callable[[list[bytes], Any], int],
        job_id: int,
        keys: Sequence[bytes],
        chunk_ids: Any,
        *,
        is_load: bool,
    ) -> None:
        hashes = [bytes(key) for key in keys]
        run = partial(self._run, move, job_id, hashes, chunk_ids, is_load=is_load)
        try:
            future = threads.submit(pool.submit, run)
        except Unavailable:
            _LOG.exception("a %s could not begin", "load" if is_load else "store")
            self._ended.put(Ended(job_id, keys, 0, is_load, 0.0))
            return
        self._under_way = {each for each in self._under_way if not each.done()} | {future}

    # ---- in threads ----

    def _run(
        self, move: Callable[[list[bytes], Any], int], job_id: int, keys: list[bytes], chunk_ids: Any, *, is_load: bool
    ) -> None:
        started_s, done = time.monotonic(), 0
        try:
            done = move(keys, chunk_ids)
        except Exception:  # nothing that fails here may reach the engine
            _LOG.exception("a %s failed", "load" if is_load else "store")
        self._ended.put(Ended(job_id, keys, done, is_load, time.monotonic() - started_s))

    def _store(self, keys: list[bytes], chunk_ids: Any) -> int:
        result = self._client.put(self._namespace, keys, self._chunks.at(chunk_ids))
        return int(result.stored + result.existing + result.pending)

    def _load(self, keys: list[bytes], chunk_ids: Any) -> int:
        return int(self._client.get_into(self._namespace, keys, self._chunks.at(chunk_ids), self._load_wait_s))


def is_safe(key: bytes) -> bool:
    """Whether its hash cannot be crafted: with a collision one user's context could be served to another."""
    return len(key) >= _KEY_BYTES_MIN


def chunk_spec(
    config: Any, chunk_bytes: int, *, version: str, platform: str, weights: str, model_version: str
) -> NamespaceSpec:
    """The namespace of an engine's chunks, from vLLM's `OffloadingConfig`. Raises UnsupportedError.

    A chunk holds the parts of all workers, so how many there are and how they share the work is in it.
    """
    parallel, cache = config.parallel, config.cache
    groups = [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups]
    about = {
        "groups": hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:16],
        "tokens_per_hash": cache.tokens_per_hash,
        "blocks_per_chunk": cache.blocks_per_chunk,
        "chunk_bytes": chunk_bytes,
        "workers": parallel.world_size,
        **{name: getattr(parallel, f"{name}_size") for name in ("tp", "pp", "pcp", "dcp")},
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
    }
    if not model_version:  # vLLM tells a secondary tier neither, and what differs in them would be taken for alike
        raise UnsupportedError(
            "the secondary tier needs `model_version`: text that tells these weights, adapters and overrides from "
            "others, such as a revision; KVStoredConnector finds that out by itself"
        )
    try:
        return spec_from_hf_config(
            weights or config.model.name,
            weights=None,
            kv_dtype=config.model.dtype,
            block_tokens=max(group.tokens_per_block for group in config.groups) * cache.blocks_per_chunk,
            layout=f"vllm-chunk/{config.kv_cache_layout or 'default'},{platform}",
            engine_format=f"vllm/{version}/chunk/{_FORMAT}",
            extra=",".join(f"{key}={value}" for key, value in about.items()),
            model_version=model_version,
        )
    except (ConfigError, WeightsError, OSError) as error:
        raise UnsupportedError(f"{error} (as `weights` or `model_version` of the secondary tier)") from error
