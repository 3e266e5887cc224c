"""What a scrape of the Prometheus endpoint shows: `Metrics` and the daemon's `StatusReply` as families.

Names are `kvstored_<tier or part>_<what>_{bytes,total,seconds}`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final

from kvstored_proto.v1.kvstored_pb2 import (
    LoadCosts,
    PathStatus,
    SessionStatus,
    StatusReply,
    TenantStatus,
    TierStatus,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstored.reporting.logs import Throttle, get_logger
from kvstored.reporting.metrics import LATENCY_BOUNDS_S, Latency, Metrics
from kvstored.tiers.base import Health

_throttle = Throttle(get_logger(__name__))

_TIER_FIELDS: Final = {
    "capacity_bytes": "Size of the tier.",
    "used_bytes": "Bytes in slots or records that hold a block.",
    "dead_bytes": "Bytes that nothing can use until their segment or extent is recycled.",
    "retired_bytes": "Memory handed to one tenant that may not serve another.",
    "free_bytes": "Bytes free for new blocks.",
    "blocks": "Blocks stored.",
}
_TENANT_GAUGES: Final = {
    "dram_bytes": "DRAM that the tenant's blocks fill.",
    "dram_blocks": "The tenant's blocks in DRAM.",
    "nvme_bytes": "NVMe that the tenant's blocks fill.",
    "nvme_blocks": "The tenant's blocks on NVMe.",
    "dram_guaranteed_bytes": "DRAM that nobody else takes from the tenant.",
    "nvme_guaranteed_bytes": "NVMe that nobody else takes from the tenant.",
}
_TENANT_COUNTERS: Final = {
    "lookups": "Lookups of the tenant.",
    "blocks_looked_up": "Blocks that they asked for.",
    "blocks_found": "Blocks of these that were there, or on their way.",
    "blocks_asked": "Blocks that gets of the tenant asked for.",
    "blocks_hit": "Blocks of these that were there.",
    "blocks_put": "Blocks the tenant stored.",
    "puts_throttled": "Puts of the tenant that found no room at present.",
    "puts_over_rate": "Puts of the tenant that came faster than it may put.",
    "gets_throttled": "Gets of the tenant that were over what it may hold.",
}
# Counters of a status that go down again.
_GAUGE_STARTS: Final = "held_"
_GAUGE_ENDINGS: Final = ("_queued", "_inflight", "_idle", "_left_bytes", "_overdrawn_bytes")


class DaemonCollector(Collector):
    """Turns the daemon's state into metric families, once per scrape.

    `status` is called from the endpoint's thread: wrap it with `metrics.on_loop`. Where it fails,
    the scrape still shows counters and latencies, and `kvstored_up` 0.
    """

    def __init__(self, metrics: Metrics, status: Callable[[], StatusReply]) -> None:
        self._metrics = metrics
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """All families."""
        status = self._read_status()
        yield GaugeMetricFamily("kvstored_up", "Whether the daemon's loop answers and serves.", _serving(status))
        yield _latencies("operation", "Time to answer, by operation.", self._metrics.latencies)
        yield _latencies("release", "Time to give back all that somebody held, by cause.", self._metrics.releases)
        yield from _counters({**self._metrics.snapshot(), **(status.counters if status else {})})
        if status is not None:
            yield from _daemon(status)
            yield from _load_costs(status.load_costs)
            yield from _tiers(status.tiers)
            yield from _tenants(status.tenants)
            yield _misses(status.tenants)
            yield from _sessions(status.sessions)

    def _read_status(self) -> StatusReply | None:
        try:
            return self._status()
        except Exception as error:  # a scrape must not fail because a part of the daemon does
            _throttle.warning("metrics: no status from the daemon", error=repr(error))
            return None


def _serving(status: StatusReply | None) -> int:
    return int(status is not None and status.state == "serving")


def _latencies(what: str, text: str, latencies: dict[str, Latency]) -> Metric:
    label = {"release": "cause"}.get(what, what)
    family = HistogramMetricFamily(f"kvstored_{what}_seconds", text, labels=[label])
    for name, latency in list(latencies.items()):
        below = list(accumulate(latency.counts))
        bounds = [*map(repr, LATENCY_BOUNDS_S), "+Inf"]
        family.add_metric([name], list(zip(bounds, below, strict=True)), latency.sum_s)
    return family


def _counters(counters: dict[str, int]) -> Iterator[Metric]:
    for name, value in sorted(counters.items()):
        if name.startswith(_GAUGE_STARTS) or name.endswith(_GAUGE_ENDINGS):
            yield GaugeMetricFamily(f"kvstored_{name}", f"Now {name.replace('_', ' ')}.", value)
        else:
            yield CounterMetricFamily(f"kvstored_{name}", f"Count of {name.replace('_', ' ')}.", value)


def _daemon(status: StatusReply) -> Iterator[Metric]:
    info = GaugeMetricFamily("kvstored_build_info", "Always 1; the version is a label.", labels=["version"])
    info.add_metric([status.version], 1)
    yield info
    yield GaugeMetricFamily("kvstored_uptime_seconds", "Seconds since the daemon started.", status.uptime_s)
    yield GaugeMetricFamily("kvstored_warnings", "What the daemon runs without; see its status.", len(status.warnings))


def _load_costs(costs: LoadCosts) -> Iterator[Metric]:
    yield GaugeMetricFamily("kvstored_dram_copy_bytes_per_second", "Speed of copies, of late.", costs.copy_bytes_per_s)
    if costs.read_bytes_per_s:
        yield GaugeMetricFamily(
            "kvstored_nvme_read_bytes_per_second", "Speed of reads, checked, of late.", costs.read_bytes_per_s
        )
        text = "Time of a read beside its bytes, of late."
        yield GaugeMetricFamily("kvstored_nvme_read_latency_seconds", text, costs.read_latency_s)


def _tiers(tiers: Iterable[TierStatus]) -> Iterator[Metric]:
    for tier in tiers:
        prefix = f"kvstored_{tier.name}"
        yield from (
            GaugeMetricFamily(f"{prefix}_{field}", text, getattr(tier, field)) for field, text in _TIER_FIELDS.items()
        )
        health = GaugeMetricFamily(f"{prefix}_health", "1 for the state that the tier is in.", labels=["state"])
        for state in Health:
            health.add_metric([state], int(tier.health == state))
        yield health
        if tier.paths:
            yield from _paths(prefix, tier.paths)


def _paths(prefix: str, paths: Sequence[PathStatus]) -> Iterator[Metric]:
    health = GaugeMetricFamily(
        f"{prefix}_path_health", "1 for the state that the path is in.", labels=["path", "state"]
    )
    passed = GaugeMetricFamily(
        f"{prefix}_path_scrub_passed_seconds",
        "When the last full scrub ended, since 1970; 0: never.",
        labels=["path"],
    )
    for path in paths:
        for state in Health:
            health.add_metric([path.path, state], int(path.health == state))
        passed.add_metric([path.path], path.scrub_passed_s)
    yield from (health, passed)


def _tenants(tenants: Iterable[TenantStatus]) -> Iterator[Metric]:
    for field, text in _TENANT_GAUGES.items():
        gauge = GaugeMetricFamily(f"kvstored_tenant_{field}", text, labels=["tenant"])
        for tenant in tenants:
            gauge.add_metric([tenant.name], getattr(tenant, field))
        yield gauge
    for field, text in _TENANT_COUNTERS.items():
        counter = CounterMetricFamily(f"kvstored_tenant_{field}", text, labels=["tenant"])
        for tenant in tenants:
            counter.add_metric([tenant.name], getattr(tenant, field))
        yield counter


def _misses(tenants: Iterable[TenantStatus]) -> Metric:
    text = "Lookups and gets that ended in a miss, by the reason of the first missing block."
    family = CounterMetricFamily("kvstored_misses", text, labels=["tenant", "reason"])
    for tenant in tenants:
        for reason, count in sorted(tenant.miss_reasons.items()):
            family.add_metric([tenant.name, reason], count)
    return family


def _sessions(sessions: Iterable[SessionStatus]) -> Iterator[Metric]:
    by_transport: defaultdict[str, int] = defaultdict(int)
    for session in sessions:
        by_transport[session.transport] += 1
    family = GaugeMetricFamily("kvstored_sessions", "Client processes connected.", labels=["transport"])
    for transport in ("session", "grpc"):
        family.add_metric([transport], by_transport[transport])
    yield family
