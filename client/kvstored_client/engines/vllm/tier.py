"""kvstored behind vLLM's own pool in CPU memory: a secondary tier for `TieringOffloadingSpec`.

    kv_connector="OffloadingConnector", kv_connector_extra_config={
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8 << 30,
        "secondary_tiers": [{"type": "KVStoredTier", "module_path": "kvstored_client.engines.vllm.tier",
                             "model_version": "..."}]}

For those who keep that pool: what it holds is stored, and comes back from any engine of the node and after restarts.
The connector (`KVStoredConnector`) needs no pool in the engine and copies once less.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterable
from typing import Any, ClassVar, Final

import numpy as np
import torch
import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult as Found
from vllm.v1.kv_offload.base import Medium, OffloadingEvent, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstored_client import Client
from kvstored_client.engines.vllm.settings import UnsupportedError
from kvstored_client.engines.vllm.shape import BLOCK_BYTES_MAX, BLOCK_BYTES_MIN
from kvstored_client.engines.vllm.tier_jobs import Ended, Jobs, chunk_spec, is_safe
from kvstored_client.paged import PagedKV

_LOG = init_logger("vllm.kvstored")
_LOAD_WAIT_S: Final = 10.0


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's own bookkeeping of questions; the daemon answers them in its thread."""

    def __init__(self, tier_type: str, jobs: Jobs) -> None:
        self._jobs = jobs
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Which of these are stored."""
        return self._jobs.stored(keys)


class KVStoredTier(SecondaryTierManager):  # type: ignore[misc]
    """Runs in the scheduler's process; no step waits for it."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        *,
        address: str = "",
        token_file: str = "",
        weights: str = "",
        model_version: str = "",
        timeout_s: float = 1.0,
        staging_mib: int = 64,
        **others: Any,
    ) -> None:
        """The keywords are keys of the tier's configuration; `Settings` says what they mean.

        Raises UnsupportedError, at the engine's start, for what could not be served correctly.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, **_known(others))
        chunks = PagedKV([np.asarray(primary_kv_view)])
        if not BLOCK_BYTES_MIN <= chunks.block_bytes <= BLOCK_BYTES_MAX:
            raise UnsupportedError(
                f"a chunk has {chunks.block_bytes} bytes, and blocks have {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX}: "
                "give another block_size"
            )
        spec = chunk_spec(
            offloading_spec.config,
            chunks.block_bytes,
            version=str(vllm.__version__),
            platform=_platform(),
            weights=weights,
            model_version=model_version,
        )
        self._client = Client(
            address or None,
            token_file=token_file or None,
            name="vllm tier",
            staging_bytes=staging_mib << 20,
            timeout_s=timeout_s,
        )
        namespace = self._client.namespace(spec)
        self._jobs = Jobs(self._client, namespace, chunks, _LOAD_WAIT_S)
        self._lookups = _Lookups(tier_type, self._jobs)
        self._tells_events = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._events: list[OffloadingEvent] = []
        state = self._client.connect_error or f"connected, namespace {namespace.digest.hex()}"
        _LOG.info("kvstored tier: %s, chunks of %d bytes", state, chunks.block_bytes)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> Found:
        """Whether a chunk is stored; the first time the answer is to ask again."""
        if not self._safe(key):
            return Found.MISS
        found = self._lookups.lookup(key, req_context)
        return Found.RETRY if found is None else Found.HIT if found else Found.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Ask what this step wanted to know."""
        self._lookups.flush()

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store chunks; those that are there already are not written again."""
        keys = list(job_metadata.keys)
        if all(map(self._safe, keys)):
            self._jobs.store(job_metadata.job_id, keys, job_metadata.chunk_ids)
        else:
            self._jobs.refuse(job_metadata.job_id, keys)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to load chunks."""
        self._jobs.load(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended. What did not come is a miss from now on: vLLM would ask for it for ever."""
        return [self._result(ended) for ended in self._jobs.take_ended()]

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks that were stored since the last call. What the store evicts later it does not tell."""
        events, self._events = self._events, []
        return events

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """No wishes."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what it asked."""
        self._lookups.cleanup(req_context.req_id)

    def drain_jobs(self) -> None:
        """Wait until nothing reads or writes the pool any more."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """End what is under way, and the session."""
        self._lookups.shutdown()
        self._jobs.close()
        self._client.close()

    def _safe(self, key: OffloadKey) -> bool:
        safe = is_safe(key)
        if not safe:
            _LOG.warning_once(
                "kvstored tier: nothing is stored or found, because block hashes of another kind than sha256 can be "
                "crafted: set prefix_caching_hash_algo to sha256"
            )
        return safe

    def _result(self, ended: Ended) -> JobResult:
        done = [OffloadKey(key) for key in ended.keys[: ended.done]]
        if ended.is_load:
            self._lookups.mark_miss([OffloadKey(key) for key in ended.keys[ended.done :]])
        elif self._tells_events and ended.complete:
            self._events.append(OffloadingEvent(keys=done, medium=self.medium, removed=False))
        return JobResult(
            job_id=ended.job_id,
            success=ended.complete,
            successful_keys=done if ended.is_load and not ended.complete and done else None,
            transfer_time=ended.seconds,
        )


def _known(others: dict[str, Any]) -> dict[str, Any]:
    """What vLLM itself hands to its tier, as far as this version has it. Raises UnsupportedError for other keys."""
    own: Collection[str] = ("backpressure_detector",)
    for key in others:
        if key not in own:
            raise UnsupportedError(f"the secondary tier has no key {key!r}")
    return others


def _platform() -> str:
    """What decides about the bytes within a chunk, beside the layout."""
    kind = str(current_platform.device_type)
    detail = torch.backends.cpu.get_cpu_capability() if kind == "cpu" else str(current_platform.get_device_name())
    return f"{kind},{platform.machine()},{detail}"
