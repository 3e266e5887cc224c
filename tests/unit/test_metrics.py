from __future__ import annotations

import asyncio
import threading
import urllib.request

import pytest
from kvstored_proto.v1.kvstored_pb2 import LoadCosts, PathStatus, SessionStatus, StatusReply, TenantStatus, TierStatus
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvstored.reporting.metrics import LATENCY_BOUNDS_S, Metrics, on_loop, serve
from kvstored.reporting.metrics_export import DaemonCollector

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def status() -> StatusReply:
    return StatusReply(
        version="1.2.3",
        state="serving",
        tiers=[
            TierStatus(name="dram", health="ok", capacity_bytes=100, used_bytes=40, free_bytes=60, blocks=4),
            TierStatus(
                name="nvme",
                health="read_only",
                capacity_bytes=1000,
                paths=[PathStatus(path="/a", health="read_only"), PathStatus(path="/b", health="off")],
            ),
        ],
        tenants=[
            TenantStatus(
                name="a",
                dram_bytes=40,
                blocks_asked=9,
                blocks_hit=5,
                miss_reasons={"evicted": 3},
                blocks_looked_up=20,
                blocks_found=6,
            )
        ],
        sessions=[SessionStatus(transport="session"), SessionStatus(transport="session")],
        load_costs=LoadCosts(copy_bytes_per_s=5e9, read_bytes_per_s=2e9, read_latency_s=0.001),
        counters={"evicted_blocks": 3, "mover_queued": 2, "held_leases": 1},
    )


def scrape(collector: DaemonCollector) -> Samples:
    registry = CollectorRegistry()
    registry.register(collector)
    return parse(generate_latest(registry).decode())


def parse(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_shows_tiers_tenants_and_sessions():
    samples = scrape(DaemonCollector(Metrics(), status))
    assert samples["kvstored_up", ()] == 1
    assert samples["kvstored_dram_used_bytes", ()] == 40
    assert samples["kvstored_dram_copy_bytes_per_second", ()] == 5e9
    assert samples["kvstored_nvme_read_bytes_per_second", ()] == 2e9
    assert samples["kvstored_nvme_read_latency_seconds", ()] == 0.001
    assert samples["kvstored_nvme_capacity_bytes", ()] == 1000
    assert samples["kvstored_nvme_health", (("state", "read_only"),)] == 1
    assert samples["kvstored_nvme_health", (("state", "ok"),)] == 0
    assert samples["kvstored_nvme_path_health", (("path", "/b"), ("state", "off"))] == 1
    assert samples["kvstored_nvme_path_health", (("path", "/a"), ("state", "off"))] == 0
    assert samples["kvstored_nvme_path_scrub_passed_seconds", (("path", "/a"),)] == 0
    assert samples["kvstored_tenant_dram_bytes", (("tenant", "a"),)] == 40
    assert samples["kvstored_tenant_blocks_hit_total", (("tenant", "a"),)] == 5
    assert samples["kvstored_tenant_blocks_looked_up_total", (("tenant", "a"),)] == 20
    assert samples["kvstored_tenant_blocks_found_total", (("tenant", "a"),)] == 6
    assert samples["kvstored_misses_total", (("reason", "evicted"), ("tenant", "a"))] == 3
    assert samples["kvstored_sessions", (("transport", "session"),)] == 2
    assert samples["kvstored_sessions", (("transport", "grpc"),)] == 0
    assert samples["kvstored_build_info", (("version", "1.2.3"),)] == 1


def test_what_goes_down_again_is_a_gauge_and_the_rest_are_counters():
    samples = scrape(DaemonCollector(Metrics(), status))
    assert samples["kvstored_evicted_blocks_total", ()] == 3
    assert samples["kvstored_mover_queued", ()] == 2
    assert samples["kvstored_held_leases", ()] == 1


def test_counters_of_the_loop_are_exported_with_those_of_the_status():
    metrics = Metrics()
    metrics.count("nvme_written_bytes", 4096)
    metrics.count("nvme_written_bytes", 4096)
    samples = scrape(DaemonCollector(metrics, status))
    assert samples["kvstored_nvme_written_bytes_total", ()] == 8192
    assert samples["kvstored_evicted_blocks_total", ()] == 3


def test_a_snapshot_does_not_change_afterwards():
    metrics = Metrics()
    metrics.count("a")
    before = metrics.snapshot()
    metrics.count("a")
    assert before == {"a": 1}


def test_latencies_are_cumulative_buckets_by_operation():
    metrics = Metrics()
    for seconds in (LATENCY_BOUNDS_S[0], LATENCY_BOUNDS_S[0] * 1.01, 0.0005, 3600.0):
        metrics.observe("lookup", seconds)
    metrics.observe("get", 0.1)
    samples = scrape(DaemonCollector(metrics, status))

    def bucket(bound: str) -> float:
        return samples["kvstored_operation_seconds_bucket", (("le", bound), ("operation", "lookup"))]

    assert bucket("2e-05") == 1
    assert bucket("5e-05") == 2
    assert bucket("0.0005") == 3
    assert bucket("10.0") == 3
    assert bucket("+Inf") == 4
    assert samples["kvstored_operation_seconds_count", (("operation", "lookup"),)] == 4
    assert samples["kvstored_operation_seconds_sum", (("operation", "get"),)] == pytest.approx(0.1)


def test_a_scrape_survives_a_daemon_that_cannot_say_its_status():
    metrics = Metrics()
    metrics.count("puts")

    def broken() -> StatusReply:
        raise TimeoutError

    samples = scrape(DaemonCollector(metrics, broken))
    assert samples["kvstored_up", ()] == 0
    assert samples["kvstored_puts_total", ()] == 1
    assert not any(name.startswith("kvstored_dram") for name, _ in samples)


def test_a_daemon_that_drains_is_not_up():
    draining = status()
    draining.state = "draining"
    assert scrape(DaemonCollector(Metrics(), lambda: draining))["kvstored_up", ()] == 0


async def test_the_status_is_read_on_the_loops_own_thread():
    threads: list[threading.Thread] = []

    def read() -> StatusReply:
        threads.append(threading.current_thread())
        return status()

    reply = await asyncio.to_thread(on_loop(asyncio.get_running_loop(), read))
    assert reply.version == "1.2.3"
    assert threads == [threading.current_thread()]


async def test_a_loop_that_does_not_answer_costs_the_scrape_a_bounded_wait():
    call = on_loop(asyncio.get_running_loop(), status, timeout_s=0.01)
    with pytest.raises(TimeoutError):
        call()  # on the loop's own thread: it cannot answer while it waits


def test_the_endpoint_serves_over_http_until_it_is_closed():
    endpoint = serve("127.0.0.1:0", [DaemonCollector(Metrics(), status)])
    assert endpoint is not None
    url = f"http://127.0.0.1:{endpoint.port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert parse(answer.read().decode())["kvstored_dram_used_bytes", ()] == 40
    endpoint.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=60)


def test_a_busy_port_costs_the_metrics_and_not_the_daemon():
    first = serve("127.0.0.1:0", [])
    assert first is not None
    try:
        assert serve(f"127.0.0.1:{first.port}", []) is None
    finally:
        first.close()
