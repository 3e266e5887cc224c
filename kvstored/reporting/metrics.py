"""Metrics: counters and latencies that cost an integer on the hot path, and the Prometheus endpoint.

Hot paths only bump integers. Gauges are read at scrape time from the daemon's own `StatusReply`,
so there is one account of the truth. Labels are operations, tenant names and tier health; never
a key, a hash or a client's text.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final
from wsgiref.simple_server import WSGIServer

from kvstored_proto.v1.kvstored_pb2 import StatusReply
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from kvstored.config.types import split_address
from kvstored.reporting.logs import get_logger

log = get_logger(__name__)

# 20 us to 10 s: a lookup takes tens of microseconds, a cold read of a long prefix seconds.
LATENCY_BOUNDS_S: Final = (
    *(20e-6, 50e-6, 100e-6, 200e-6, 500e-6),
    *(1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
OPERATIONS_MAX: Final = 64
SCRAPE_TIMEOUT_S: Final = 5.0


class Latency:
    """A histogram of one operation: `counts[i]` took at most `LATENCY_BOUNDS_S[i]`, the last one longer."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Note one."""
        self.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class Metrics:
    """What the event loop counts. Bumped from the loop's thread only."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.latencies: dict[str, Latency] = {}
        self.releases: dict[str, Latency] = {}  # by cause

    def count(self, name: str, n: int = 1) -> None:
        """Add `n` to a counter: `<tier or part>_<what>`, with `_bytes` at the end where it counts bytes."""
        self.counters[name] += n

    def observe(self, operation: str, seconds: float) -> None:
        """Note how long one call of `operation` took."""
        latency = self.latencies.get(operation)
        if latency is None:
            assert len(self.latencies) < OPERATIONS_MAX, "operations are names in the schema, not data"
            latency = self.latencies[operation] = Latency()
        latency.add(seconds)

    def observe_release(self, cause: str, seconds: float) -> None:
        """Note how long it took from a cause until all that somebody held was back."""
        self.releases.setdefault(cause, Latency()).add(seconds)

    def snapshot(self) -> dict[str, int]:
        """A copy of the counters."""
        return dict(self.counters)


def on_loop(
    loop: asyncio.AbstractEventLoop, status: Callable[[], StatusReply], timeout_s: float = SCRAPE_TIMEOUT_S
) -> Callable[[], StatusReply]:
    """`status`, called on the loop that owns the state however the scrape's thread runs.

    The returned function raises TimeoutError where the loop does not answer in time.
    """

    async def read() -> StatusReply:
        return status()

    def call() -> StatusReply:
        future = asyncio.run_coroutine_threadsafe(read(), loop)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    return call


class MetricsServer:
    """The HTTP endpoint, in a thread of its own. Answers `/metrics` until closed."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.server_port

    def close(self) -> None:
        """Stop listening. Waits up to half a second for the thread, so not for the loop to call itself."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(address: str, collectors: Iterable[Collector]) -> MetricsServer | None:
    """Start the endpoint on `address` (`host:port`).

    A busy port costs the metrics, not the daemon: it is logged, and None returned.
    """
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    host, port = split_address(address)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        log.warning("metrics are off: cannot listen", address=address, error=str(error))
        return None
    return MetricsServer(server, thread)
