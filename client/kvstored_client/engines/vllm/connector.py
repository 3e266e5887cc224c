"""vLLM's connector API, and nothing else: each call goes to the scheduler's or the worker's half."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Iterable
from typing import Any, Final

import torch
import vllm
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.core import kv_cache_utils

from kvstored_client import Client
from kvstored_client.engines.vllm.adapters import Adapters
from kvstored_client.engines.vllm.checks import Engine, check_loads
from kvstored_client.engines.vllm.counts import Counts
from kvstored_client.engines.vllm.identity import specs_of
from kvstored_client.engines.vllm.kv_events import KVEvents
from kvstored_client.engines.vllm.lookups import Lookups
from kvstored_client.engines.vllm.metrics import KVStoredMetrics, KVStoredStats
from kvstored_client.engines.vllm.namespaces import Namespaces
from kvstored_client.engines.vllm.orders import Report, Step
from kvstored_client.engines.vllm.pages import pages_of
from kvstored_client.engines.vllm.pins import BlockPins
from kvstored_client.engines.vllm.requests import Saves
from kvstored_client.engines.vllm.scheduler import SchedulerSide
from kvstored_client.engines.vllm.settings import UnsupportedError, settings_from
from kvstored_client.engines.vllm.shape import shape_of
from kvstored_client.engines.vllm.worker import WorkerSide

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:  # before 0.30
    KVConnectorTransferResults = None
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.31
    CacheHitSource = None

_LOG = init_logger("vllm.kvstored")
_SAVING_SHARE: Final = 4  # at most one in so many of the engine's blocks waits for its save


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's orders, as vLLM carries them to its workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A worker's report, as vLLM carries it to the scheduler."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """This worker's and another's."""
        return WorkerReport(self.report.merge(other.report))


class KVStoredConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefixes from kvstored and to it. Two are made: one in the scheduler's process, one in each worker's."""

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.HOST  # what came from NVMe too is in DRAM before it is promised

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises UnsupportedError, at the engine's start, for what could not be served correctly."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = settings_from(transfer.kv_connector_extra_config)
        engine = _engine(vllm_config)
        self._shape = shape_of(vllm_config, kv_cache_config, engine)
        check_loads(self._settings, vllm_config, engine, whole_loads=self._shape.whole_loads)
        self._specs = specs_of(vllm_config, kv_cache_config, self._shape, self._settings, engine)
        # vLLM's default fails a request whose blocks do not come. A cache must never do that.
        transfer.kv_load_failure_policy = "recompute"
        told = vllm_config.kv_events_config
        self._events: KVEvents | None = None
        if told is not None and told.enable_kv_cache_events and role == KVConnectorRole.SCHEDULER:
            self._events = KVEvents([group.block_tokens for group in self._shape.groups])
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._client: Client | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._scheduler_side()

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not happen is a later miss, no more."""
        return False

    # ---- the scheduler's half ----

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Blocks that a window leaves behind are held until they are saved."""
        self._scheduling.use_pins(BlockPins(gpu_block_pool))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerSide.matched`."""
        return self._scheduling.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `SchedulerSide.allocated`."""
        self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `SchedulerSide.step`."""
        return StepMetadata(self._scheduling.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """See `SchedulerSide.reported`."""
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, WorkerReport) else None
        failed = getattr(connector_output, "failed_recving", None)
        self._scheduling.reported(report, connector_output.invalid_block_ids or (), failed or ())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerSide.finished`."""
        return self._scheduling.finished(request.request_id), None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerSide.finished`."""
        return self._scheduling.finished(request.request_id), None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """See `KVEvents`."""
        return self._events.take() if self._events is not None else ()

    def has_pending_push_work(self) -> bool:
        """Whether the engine is to go on with steps, so that saves are reported and their blocks freed."""
        return self._scheduler is not None and self._scheduler.saving

    def reset_cache(self) -> bool:
        """Nothing stored so far is used any more, and nothing of it is touched: other engines may need it."""
        self._scheduling.reset(secrets.token_hex(8))
        return True

    # ---- a worker's half ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the engine's pages lie. Raises UnsupportedError."""
        pages = []
        for group in self._shape.groups:
            pages.append(pages_of({name: kv_caches[name] for name in group.layers}, self._kv_cache_config.num_blocks))
            if pages[-1].block_bytes != group.block_bytes:
                raise UnsupportedError(
                    f"a block of group {group.number} has {pages[-1].block_bytes} bytes, "
                    f"{group.block_bytes} were announced"
                )
        rank = get_tensor_model_parallel_rank()
        shard, saves = self._shape.shard_of(rank)
        client = self._connect(f"vllm worker {rank}", self._settings.staging_mib << 20)
        namespaces = Namespaces(client, self._shape, self._specs)
        self._worker = WorkerSide(
            self._settings,
            client,
            pages,
            lambda generation, adapter: namespaces.of_shard(shard, generation, adapter),
            saves=saves,
        )

    def has_connector_metadata(self) -> bool:
        """False: asked before and after each layer's attention only, and there is nothing to do there."""
        return False

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before the step writes anything."""
        self._working.before(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Before the forward pass where it waits for loads, else beside it."""
        self._working.load(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads end before a step uses them."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """The step has been computed. Saves begin here; nothing waits for them."""
        self._working.save(self._step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose saves, and requests whose loads have ended."""
        self._working.end(self._step)
        saved, loaded = self._working.take_finished()
        return saved or None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same, and the loads that failed as a whole."""
        self._working.end(self._step)
        saved, loaded = self._working.take_finished()
        failed = self._working.take_failed() if self._shape.whole_loads else set()
        return KVConnectorTransferResults(saved, loaded, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not come, where a load is of use without them."""
        bad = self._working.take_bad_blocks()
        return set() if self._shape.whole_loads else bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What has ended since the last step."""
        report = self._working.take_report()
        return WorkerReport(report) if report else None

    # ---- both ----

    def get_kv_connector_stats(self) -> KVStoredStats | None:
        """What was counted since the last call."""
        side = self._worker if self._worker is not None else self._scheduler
        taken = side.take_counts() if side is not None else {}
        return KVStoredStats(data=dict(taken)) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoredStats:
        """Counts from their serialised form."""
        return KVStoredStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVStoredMetrics:
        """The counters in /metrics."""
        return KVStoredMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End what is under way and the session, with all that it holds."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
        if self._client is not None:
            self._client.close()

    # ---- inside ----

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a worker's connector was asked what the scheduler's knows"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "register_kv_caches comes first"
        return self._worker

    @property
    def _step(self) -> Step:
        step: Step = self._get_connector_metadata().step
        return step

    def _scheduler_side(self) -> SchedulerSide:
        shape, settings = self._shape, self._settings
        client = self._connect("vllm scheduler", 0)
        under_way_max = max(64, self._kv_cache_config.num_blocks // _SAVING_SHARE)
        side = SchedulerSide(
            settings,
            Lookups(client, shape, Counts(), settings.lookup_wait_s, settings.prefill_tokens_per_s),
            Saves(shape, under_way_max),
            Namespaces(client, shape, self._specs).tracks,
            Adapters(settings.lookup_wait_s),
            self._events,
        )
        blocks = ", ".join(f"{group.block_tokens} tokens and {group.block_bytes} bytes" for group in shape.groups)
        _LOG.info(
            "kvstored: %s, blocks of %s, %s, namespace %s",
            *(client.connect_error or "connected", blocks, settings.mode),
            side.digest or "(known when the daemon answers)",
        )
        return side

    def _connect(self, name: str, staging_bytes: int) -> Client:
        settings = self._settings
        self._client = Client(
            settings.address or None,
            token_file=settings.token_file or None,
            name=name,
            staging_bytes=staging_bytes,
            timeout_s=settings.timeout_s,
        )
        known = self._client.tenant  # empty: no daemon yet, who will not find another tenant's blocks in any case
        if settings.tenant and known and known != settings.tenant:
            self._client.close()
            raise UnsupportedError(f"the daemon takes this engine for tenant {known!r}, not {settings.tenant!r}")
        return self._client


def _engine(config: Any) -> Engine:
    # A vLLM without a default starts its block hashes at random where the variable is not set.
    seed = os.environ.get("PYTHONHASHSEED") or getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    isa = torch.backends.cpu.get_cpu_capability()
    where = f"{config.device_config.device_type},{platform.machine()},{isa}"
    return Engine(str(vllm.__version__), where, seed, KVConnectorTransferResults is not None)
