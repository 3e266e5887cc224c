"""The daemon is killed with full tiers: how long until it serves again, and what it still has.

DRAM holds blocks that were acknowledged in memory only, NVMe others that are durable. A second
daemon has a million small records on NVMe. Where the time went comes from the daemon's own log.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvstored_client import Client

from bench.common import GB, MIB, Figure, Values, emit, median, parser, progress, run
from bench.load import ForeignLoad
from bench.replay import wait_mover_idle
from bench.stored import Stored
from kvstored.testing.daemon_process import DaemonProcess

_GIB: Final = 1 << 30
_BLOCK_BYTES: Final = 512 << 10
_SMALL_BYTES: Final = 4 << 10
_SMALL_READ: Final = 32_768  # of the small records, so many are read and compared at the end
_TIMEOUT_S: Final = 300.0
_STEPS: Final = {  # as the daemon names them
    "process": "exec, imports, configuration",
    "dram": "memory taken over, or made",
    "nvme": "index checked and opened",
    "listen": "sockets",
}

FIGURES: Final = (
    Figure("ready_s", "seconds from the kill until it serves again, median", "<= 2"),
    Figure("first_hit_s", "until a client that comes then has a block from DRAM, median"),
    Figure("reconnect_hit_s", "until a client that was there before has one, median"),
    Figure("nvme_hit_s", "until a client has a block from NVMe, median"),
    Figure("dram_survived", "share of the blocks in DRAM that were there and right after every kill", "== 1"),
    Figure(
        "nvme_survived", "share of the blocks on NVMe that were there after every kill, and right at the end", "== 1"
    ),
    Figure("ready_1m_s", "seconds from the kill until it serves again with the small records on NVMe, median", "<= 5"),
    Figure("small_survived", "share of the small records that were there after the last kill", "== 1"),
    Figure("wrong_bytes", "delivered bytes that differ from what was put", "== 0"),
    *(Figure(f"ready_{step}_s", f"of ready_s: {what}") for step, what in _STEPS.items()),
    *(Figure(f"ready_1m_{step}_s", f"of ready_1m_s: {what}") for step, what in _STEPS.items()),
    Figure("fill_gbps", "put of the blocks, those for NVMe until they are durable, GB/s"),
    Figure("small_puts_per_s", "small records put until they are durable, per second"),
    Figure("dram_bytes", "bytes in DRAM"),
    Figure("nvme_bytes", "bytes on NVMe only"),
    Figure("small_blocks", "small records"),
    Figure("repeats", "kills of each daemon"),
    Figure("foreign_cpu_share", "share of all CPUs that other processes of the machine used meanwhile"),
)


class Killed:
    """A daemon that is killed: how long each return took, and where that time went."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self.ready_s: list[float] = []
        self._steps_s: dict[str, list[float]] = {step: [] for step in _STEPS}

    def kill(self) -> float:
        """Kill it and wait until it serves; returns when it was killed (time.perf_counter)."""
        killed = time.perf_counter()
        self._daemon.crash()
        self._daemon.wait_serving()
        self.ready_s.append(time.perf_counter() - killed)
        steps = start_times(self._daemon.log_path.read_text())
        for step, seconds in self._steps_s.items():
            seconds.append(steps.get(step, 0.0))
        return killed

    def figures(self, prefix: str) -> dict[str, float]:
        """Medians."""
        steps = {f"{prefix}_{step}_s": median(seconds) for step, seconds in self._steps_s.items()}
        return {f"{prefix}_s": median(self.ready_s), **steps}


def start_times(log: str) -> Mapping[str, float]:
    """What the daemon said last about its start."""
    lines = [json.loads(line) for line in log.splitlines() if '"serving"' in line and "start_s" in line]
    return dict(lines[-1]["start_s"]) if lines else {}


class LargeBench:
    """DRAM and NVMe full of blocks of 512 KiB."""

    def __init__(self, daemon: DaemonProcess, arguments: argparse.Namespace) -> None:
        self._daemon = daemon
        self._killed = Killed(daemon)
        self._repeats: int = arguments.repeats
        self._resident = Stored("dram", _BLOCK_BYTES, arguments.dram_bytes // _BLOCK_BYTES)
        self._below = Stored("nvme", _BLOCK_BYTES, arguments.nvme_bytes // _BLOCK_BYTES)
        self._hits: dict[str, list[float]] = {"first_hit_s": [], "reconnect_hit_s": [], "nvme_hit_s": []}
        self._in_dram: list[int] = []
        self._on_nvme: list[int] = []
        self._wrong_bytes = 0

    def run(self) -> dict[str, float]:
        """Everything; returns all figures of it."""
        with _client(self._daemon) as client:
            fill_gbps = self._fill(client)
            for repeat in range(self._repeats):
                progress(f"kill {repeat + 1} of {self._repeats}")
                self._await_hits(client, self._killed.kill())
                self._look(client)
            progress("read NVMe")
            blocks, wrong = self._below.delivered(client)
            self._on_nvme.append(blocks)
            self._wrong_bytes += wrong
        return {
            **self._killed.figures("ready"),
            **{name: median(seconds) for name, seconds in self._hits.items() if seconds},
            "dram_survived": min(self._in_dram) / len(self._resident.hashes),
            "nvme_survived": min(self._on_nvme) / len(self._below.hashes),
            "wrong_bytes": self._wrong_bytes,
            "fill_gbps": fill_gbps,
        }

    def _fill(self, client: Client) -> float:
        size_bytes = _BLOCK_BYTES * (len(self._below.hashes) + len(self._resident.hashes))
        progress(f"put {size_bytes / GB:.2f} GB")
        seconds = self._below.put(client, durable=True) + self._resident.put(client, durable=False)
        wait_mover_idle(client, _TIMEOUT_S)
        found = self._resident.found(client)
        assert found == (len(self._resident.hashes), 0), f"in DRAM and on NVMe only: {found}"
        return size_bytes / seconds / GB

    def _await_hits(self, old: Client, killed_s: float) -> None:
        with _client(self._daemon) as fresh:
            waits = {"first_hit_s": (fresh, self._resident), "reconnect_hit_s": (old, self._resident)}
            waits["nvme_hit_s"] = (fresh, self._below)
            for name, (client, stored) in waits.items():
                if stored.await_hit(client):
                    self._hits[name].append(time.perf_counter() - killed_s)

    def _look(self, client: Client) -> None:
        """What is in DRAM is read, what is on NVMe looked up: to read it would bring it up, and push the rest down."""
        in_dram, _ = self._resident.found(client)
        delivered, wrong = self._resident.delivered(client)
        self._in_dram.append(min(in_dram, delivered))
        self._on_nvme.append(sum(self._below.found(client)))
        self._wrong_bytes += wrong


def small_bench(daemon: DaemonProcess, arguments: argparse.Namespace) -> dict[str, float]:
    """Many small records on NVMe; returns all figures of it."""
    stored, killed = Stored("small", _SMALL_BYTES, arguments.small_blocks), Killed(daemon)
    with _client(daemon) as client:
        progress(f"put {arguments.small_blocks} small records")
        seconds = stored.put(client, durable=True)
        for repeat in range(arguments.repeats):
            progress(f"kill {repeat + 1} of {arguments.repeats}")
            killed.kill()
        found = sum(stored.found(client))
        asked = min(_SMALL_READ, len(stored.hashes))
        delivered, wrong = stored.delivered(client, last_blocks=asked)
        assert delivered == asked, f"{delivered} of {asked} small records are delivered"
    return {
        **killed.figures("ready_1m"),
        "small_survived": found / len(stored.hashes),
        "small_puts_per_s": len(stored.hashes) / seconds,
        "wrong_bytes": wrong,
    }


def _client(daemon: DaemonProcess) -> Client:
    return Client(daemon.address, name="bench.restart", timeout_s=60.0, connect_timeout_s=60.0)


def large_settings(arguments: argparse.Namespace) -> dict[str, str]:
    """A DRAM tier that holds its blocks below the low watermark, and an NVMe tier for everything."""
    size_bytes = arguments.dram_bytes + arguments.nvme_bytes
    return {
        "dram.capacity_bytes": str(_whole(arguments.dram_bytes * 3 // 2, 64 * MIB)),
        "nvme.capacity_bytes": str(_whole(size_bytes * 3 // 2, 256 * MIB) + 256 * MIB),
    }


def small_settings(arguments: argparse.Namespace) -> dict[str, str]:
    """A DRAM tier for a small part of the records."""
    size_bytes = arguments.small_blocks * _SMALL_BYTES
    return {
        "dram.capacity_bytes": str(256 * MIB),
        "nvme.capacity_bytes": str(_whole(size_bytes * 3 // 2, 256 * MIB) + 256 * MIB),
    }


def _whole(size_bytes: int, unit_bytes: int) -> int:
    return max(1, -(-size_bytes // unit_bytes)) * unit_bytes


def restart(arguments: argparse.Namespace) -> Values:
    """Both daemons, one after the other; returns all figures."""
    directory, load = arguments.directory, ForeignLoad()
    with DaemonProcess(large_settings(arguments), nvme=True, supervised=True, parent_directory=directory) as daemon:
        values = LargeBench(daemon, arguments).run()
    with DaemonProcess(small_settings(arguments), nvme=True, supervised=True, parent_directory=directory) as daemon:
        small = small_bench(daemon, arguments)
    return {
        **values,
        **small,
        "wrong_bytes": values["wrong_bytes"] + small["wrong_bytes"],
        "dram_bytes": arguments.dram_bytes,
        "nvme_bytes": arguments.nvme_bytes,
        "small_blocks": arguments.small_blocks,
        "repeats": arguments.repeats,
        "foreign_cpu_share": load.share(),
    }


def main() -> int:
    """Entry point; exit status 1 where a byte was wrong."""
    built = parser("bench.restart", "A daemon that is killed with full tiers, and how it comes back.", FIGURES)
    built.add_argument("--dram-bytes", type=int, default=2 * _GIB, help="bytes in DRAM, in blocks of 512 KiB")
    built.add_argument("--nvme-bytes", type=int, default=4 * _GIB, help="bytes on NVMe, in blocks of 512 KiB")
    built.add_argument("--small-blocks", type=int, default=1_000_000, help="records of 4 KiB on NVMe")
    built.add_argument("--repeats", type=int, default=3, help="kills of each daemon")
    built.add_argument("--directory", type=Path, help="where the files go: the file system to measure")
    arguments = built.parse_args()
    values = restart(arguments)
    emit(values, FIGURES, arguments.json)
    return int(bool(values["wrong_bytes"]))


if __name__ == "__main__":
    run(main)
