"""Look-ups and gets of what is resident, while another client puts as fast as it can into a full DRAM tier.

DRAM is filled past its high watermark first, so that every further put has the mover write
colder blocks to NVMe. A second process asks for a chain that a lease keeps in DRAM; its calls
are timed before the puts begin and while they run.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvstored_client import Client, NamespaceSpec

from bench.cell import chain_hashes
from bench.common import GB, MIB, Figure, Value, Values, emit, p50_us, p99_us, parser, progress, run
from bench.load import ForeignLoad
from bench.payload import Payloads
from bench.prober import Call, Prober
from bench.replay import wait_mover_idle
from kvstored.testing.daemon_process import DaemonProcess

_PUT_BLOCKS: Final = 64  # in one put, or fewer where they are large
_PUT_BYTES: Final = 32 * MIB
_PROBE_BLOCKS: Final = 64
_PROBE_BLOCK_BYTES: Final = 16 << 10
_PUT_WAIT_S: Final = 5.0
_SETTLE_S: Final = 1.0
_SPEC: Final = NamespaceSpec(model="bench.pressure")
_PROBE_SPEC: Final = NamespaceSpec(model="bench.pressure probe")
_CALLS: Final[tuple[Call, Call]] = ("lookup", "get")

FIGURES: Final = (
    Figure("lookup_p99_ratio", "99th percentile of a look-up of a resident chain, under puts / idle", "<= 3"),
    Figure("get_p99_ratio", "that of a get and release of it", "<= 3"),
    Figure("lookup_p50_ratio", "median of the look-up, under puts / idle"),
    Figure("get_p50_ratio", "that of the get"),
    Figure("lookup_idle_p50_us", "median of the look-up, idle, us"),
    Figure("get_idle_p50_us", "that of the get, us"),
    Figure("lookup_idle_p99_us", "99th percentile of the look-up, idle, us"),
    Figure("lookup_busy_p99_us", "that under puts, us"),
    Figure("get_idle_p99_us", "99th percentile of the get, idle, us"),
    Figure("get_busy_p99_us", "that under puts, us"),
    Figure("refused_blocks", "blocks whose put found no room within 5 s", "== 0"),
    Figure("put_blocks", "blocks put during the windows"),
    Figure("put_gbps", "rate of the puts, GB/s"),
    Figure("demoted_gbps", "rate at which the mover wrote to NVMe meanwhile, GB/s"),
    Figure("block_bytes", "size of each block that is put"),
    Figure("window_s", "length of each window, seconds"),
    Figure("foreign_cpu_share", "share of all CPUs that other processes of the machine used meanwhile"),
)


class Putter:
    """A client that puts fresh chains without a pause, from a thread of this process."""

    def __init__(self, address: str, block_bytes: int, staging_bytes: int) -> None:
        self._client = Client(
            address, name="bench.pressure", staging_bytes=staging_bytes, timeout_s=60.0, connect_timeout_s=60.0
        )
        self.blocks = max(1, min(_PUT_BLOCKS, _PUT_BYTES // block_bytes))
        self._rows = list(Payloads(block_bytes).make(range(self.blocks)))
        self._names = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.counts: Counter[str] = Counter()

    def put(self) -> None:
        """One chain."""
        namespace = self._client.namespace(_SPEC)
        hashes = chain_hashes(f"pressure {next(self._names)}", self.blocks)
        result = self._client.put(namespace, hashes, self._rows, wait_s=_PUT_WAIT_S)
        self.counts["stored"] += result.stored
        self.counts["refused"] += self.blocks - result.stored

    def start(self) -> None:
        """Put until `stop`."""
        self.counts.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def await_one(self) -> None:
        """Until a put has ended since the counts were set to zero."""
        while self._thread.is_alive() and not (self.counts["stored"] or self.counts["refused"]):
            time.sleep(0.001)

    def stop(self) -> None:
        """Let the last put end."""
        self._stop.set()
        self._thread.join()
        self._stop.clear()

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.put()


class PressureBench:
    """One daemon whose DRAM is full."""

    def __init__(self, daemon: DaemonProcess, arguments: argparse.Namespace, *, staging_bytes: int = 64 * MIB) -> None:
        self._daemon = daemon
        self._staging_bytes = staging_bytes  # of the client that puts
        self._window_s: float = arguments.seconds
        self._windows: int = arguments.windows
        self._block_bytes: int = arguments.block_bytes
        self._dram_blocks: int = arguments.dram_mib * MIB // arguments.block_bytes
        self._probe_hashes = chain_hashes("probe", _PROBE_BLOCKS)
        self._totals: Counter[str] = Counter()
        self._busy_s = 0.0

    def run(self) -> Values:
        """Everything; returns all figures."""
        idle: dict[Call, list[float]] = {call: [] for call in _CALLS}
        busy: dict[Call, list[float]] = {call: [] for call in _CALLS}
        with Client(
            self._daemon.address,
            name="bench.pressure probe",
            timeout_s=60.0,
            connect_timeout_s=60.0,
            staging_bytes=_PROBE_BLOCKS * _PROBE_BLOCK_BYTES,
        ) as client:
            namespace = client.namespace(_PROBE_SPEC)
            rows = Payloads(_PROBE_BLOCK_BYTES).make(range(_PROBE_BLOCKS))
            client.put(namespace, self._probe_hashes, list(rows), wait_s=30.0)
            with client.get(namespace, self._probe_hashes) as held:
                assert len(held) == _PROBE_BLOCKS, f"{len(held)} probe blocks are held"
                putter = Putter(self._daemon.address, self._block_bytes, self._staging_bytes)
                try:
                    progress("filling DRAM")
                    for _ in range(2 * self._dram_blocks // putter.blocks):
                        putter.put()
                    for _ in range(self._windows):
                        for call in _CALLS:
                            self._pair(client, putter, call, idle[call], busy[call])
                finally:
                    putter.close()
        return self._figures(idle, busy)

    def _pair(self, client: Client, putter: Putter, call: Call, idle: list[float], busy: list[float]) -> None:
        """A window without puts and one with them."""
        progress(f"{call}s, idle and under puts")
        with Prober(self._daemon.address, _PROBE_SPEC, self._probe_hashes, call) as prober:
            wait_mover_idle(client)
            idle += prober.window(self._window_s)
            putter.start()
            time.sleep(min(_SETTLE_S, self._window_s))
            before = _demoted(client)
            started, putter.counts["stored"] = time.perf_counter(), 0
            prober.start()
            time.sleep(self._window_s)
            putter.await_one()
            busy += prober.stop()
            self._busy_s += time.perf_counter() - started
            self._totals["demoted"] += _demoted(client) - before
            self._totals["stored"] += putter.counts["stored"]
            putter.stop()
            self._totals["refused"] += putter.counts["refused"]

    def _figures(self, idle: dict[Call, list[float]], busy: dict[Call, list[float]]) -> Values:
        values: dict[str, Value] = {
            "refused_blocks": self._totals["refused"],
            "put_blocks": self._totals["stored"],
            "put_gbps": self._totals["stored"] * self._block_bytes / self._busy_s / GB,
            "demoted_gbps": self._totals["demoted"] * self._block_bytes / self._busy_s / GB,
            "block_bytes": self._block_bytes,
            "window_s": self._window_s,
        }
        for call in _CALLS:
            values[f"{call}_p99_ratio"] = p99_us(busy[call]) / p99_us(idle[call])
            values[f"{call}_p50_ratio"] = p50_us(busy[call]) / p50_us(idle[call])
            values[f"{call}_idle_p50_us"] = p50_us(idle[call])
            values[f"{call}_idle_p99_us"] = p99_us(idle[call])
            values[f"{call}_busy_p99_us"] = p99_us(busy[call])
        return values


def _demoted(client: Client) -> int:
    """Blocks demoted since the daemon started. Raises RuntimeError where it does not answer."""
    status = client.status()
    if status is None:
        raise RuntimeError("the daemon does not answer")
    return status.counters["demoted_blocks"]


def _arguments(names: Sequence[str] | None = None) -> argparse.Namespace:
    built = parser("bench.pressure", "Look-ups and gets beside puts at full speed into a full DRAM tier.", FIGURES)
    built.add_argument("--dram-mib", type=int, default=1024, help="MiB of DRAM")
    built.add_argument("--nvme-mib", type=int, default=4096, help="MiB of NVMe")
    built.add_argument("--block-bytes", type=int, default=512 << 10)
    built.add_argument("--seconds", type=float, default=5.0, help="length of each window")
    built.add_argument("--windows", type=int, default=2, help="pairs of windows for each kind of call")
    built.add_argument("--directory", help="where the NVMe tier's files go")
    return built.parse_args(names)


def main() -> int:
    """Entry point; exit status 1 where a put was refused."""
    arguments = _arguments()
    options = {
        "dram.capacity_bytes": str(arguments.dram_mib * MIB),
        "nvme.capacity_bytes": str(arguments.nvme_mib * MIB),
    }
    load = ForeignLoad()
    with DaemonProcess(options, nvme=True, parent_directory=arguments.directory) as daemon:
        values = PressureBench(daemon, arguments).run()
    emit({**values, "foreign_cpu_share": load.share()}, FIGURES, arguments.json)
    return int(bool(values["refused_blocks"]))


if __name__ == "__main__":
    run(main)
