"""The connector's counters in vLLM's /metrics: `vllm:kvstored_<name>`."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstored_client.engines.vllm.counts import COUNTERS, merged


class KVStoredStats(KVConnectorStats):  # type: ignore[misc]
    """What was counted in an interval, by name."""

    def reset(self) -> None:
        """Forget it."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVStoredStats:
        """This and another worker's."""
        return KVStoredStats(data=merged(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For the engine's log."""
        return {name: round(value, 3) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class KVStoredMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same, exported."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, says in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:kvstored_{name}", documentation=says, labelnames=labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
