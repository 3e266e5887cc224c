"""One cell of the sensitivity bench: a fresh daemon with one setting, and every metric of it.

Puts and gets of a chain in DRAM, calls of another process while DRAM is full and puts go on, then, after a restart
that leaves everything on NVMe, gets and prefetches of chains that were put durably. Each beside its ceiling.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstored_client import Client

from bench.buffers import Pool
from bench.ceiling import DirectFile
from bench.cell import Cell
from bench.cold import cold_restart
from bench.common import GB, MIB, median
from bench.pressure import PressureBench
from bench.sensitivity_settings import BLOCK_BYTES, STAGING_BYTES, Scale, Setting
from bench.sensitivity_table import Metric, Sample
from bench.stored import Stored
from kvstored.testing.daemon_process import DaemonProcess

METRICS: Final = (
    Metric("put", "puts into room in DRAM", "GB/s", "memmove between buffers", True),
    Metric("put_full", "puts into a full tier, the mover writing to NVMe", "GB/s", "direct writes of one file", True),
    Metric("get_dram", "gets of resident blocks into buffers", "GB/s", "memmove of the same blocks", True),
    Metric("get_nvme", "gets of blocks on NVMe into buffers", "GB/s", "direct reads of one file", True),
    Metric("prefetch", "prefetch of blocks on NVMe", "GB/s", "direct reads of one file", True),
    Metric("lookup_p99", "look-up of 64 resident blocks beside those puts", "us", "its median when idle", False),
    Metric("get_p99", "get of them, and release, beside those puts", "us", "its median when idle", False),
    Metric("cold_get_p50", "get of one block from NVMe beside a prefetch", "us", "one direct read of a block", False),
    Metric("refused", "blocks that found no room within 5 s, of those put into the full tier", "share", "", False),
    Metric("private", "daemon's memory beside tier and staging, peak", "MiB", "", False),
    Metric("staging", "staging and session pages, resident, peak", "MiB", "", False),
)
_SMALL_CHAIN_BLOCKS: Final = 16  # for gets of one block from NVMe
_EXTENT_BYTES: Final = 64 * MIB
_WATCH_S: Final = 0.05
_WAIT_S: Final = 30.0
_PREFETCH_WAIT_S: Final = 60.0

Samples = dict[str, Sample]


def measure(setting: Setting, scale: Scale, directory: Path | None) -> Samples:
    """All metrics of one setting, once. Raises AssertionError where a byte is wrong or a block is lost."""
    options = {
        "dram.capacity_bytes": str(scale.dram_bytes),
        "nvme.capacity_bytes": str(scale.nvme_bytes),
        "nvme.extent_bytes": str(_EXTENT_BYTES),
        "server.stop_flush_s": "0",  # what a cell looks for after its restart was put durably
        **setting.options(),
    }
    with DaemonProcess(options, nvme=True, parent_directory=directory) as daemon:
        return _Run(daemon, setting, scale).run()


class _Run:
    """The steps, in order, with one daemon."""

    def __init__(self, daemon: DaemonProcess, setting: Setting, scale: Scale) -> None:
        self._daemon, self._scale = daemon, scale
        self._block_bytes = round(setting.of(BLOCK_BYTES))
        self._staging_bytes = round(setting.of(STAGING_BYTES))
        self._chain_blocks = scale.chain_bytes // self._block_bytes
        self._file = DirectFile(daemon.directory / "ceiling", scale.chain_bytes)
        self._samples: Samples = {}

    def run(self) -> Samples:
        """Everything."""
        self._resident()
        within = range(self._scale.repeats_within)
        write_gbps = median(self._file.write_bytes_per_s() for _ in within) / GB
        self._full(write_gbps)
        self._cold()
        return self._samples

    def _client(self, staging_bytes: int) -> Client:
        return Client(
            self._daemon.address,
            name="bench.sensitivity",
            staging_bytes=staging_bytes,
            timeout_s=60.0,
            connect_timeout_s=60.0,
        )

    def _resident(self) -> None:
        """Puts and gets in DRAM, by the cell of `bench.transfer`."""
        total_bytes = self._chain_blocks * self._block_bytes
        with self._client(self._staging_bytes) as client, self._client(total_bytes + 32 * MIB) as stager:
            cell = Cell(self._daemon, client, stager, self._block_bytes, total_bytes)
            cell.prepare()
            for _ in range(self._scale.repeats_within):
                cell.repeat()
            cell.close()
        assert not cell.wrong_blocks, f"{cell.wrong_blocks} blocks have wrong bytes"
        figures = {key: float(value) for key, value in cell.figures("").items() if isinstance(value, float)}
        # Medians of ratios, pair by pair: what they are to the ceiling, turned around.
        put, get = figures["put_gbps"], figures["get_gbps"]
        self._samples["put"] = Sample(put, put * figures["put_ratio"])
        self._samples["get_dram"] = Sample(get, get * figures["get_ratio"])

    def _full(self, write_gbps: float) -> None:
        """Another process's calls and the puts themselves, by `bench.pressure`."""
        arguments = argparse.Namespace(
            seconds=self._scale.window_s,
            windows=1,
            block_bytes=self._block_bytes,
            dram_mib=self._scale.dram_bytes // MIB,
        )
        with _peak_memory(self._daemon, self._scale.dram_bytes) as memory:
            values = PressureBench(self._daemon, arguments, staging_bytes=self._staging_bytes).run()
        figures = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
        self._samples["put_full"] = Sample(figures["put_gbps"], write_gbps)
        for call in ("lookup", "get"):
            self._samples[f"{call}_p99"] = Sample(figures[f"{call}_busy_p99_us"], figures[f"{call}_idle_p50_us"])
        put_blocks = figures["put_blocks"] + figures["refused_blocks"]
        self._samples["refused"] = Sample(figures["refused_blocks"] / max(1.0, put_blocks))
        self._samples["private"] = Sample(memory[0] / MIB)
        self._samples["staging"] = Sample(memory[1] / MIB)

    def _cold(self) -> None:
        """Gets and prefetches of what is on NVMe alone."""
        chains = {
            name: Stored(f"sensitivity {name}", self._block_bytes, blocks)
            for name, blocks in (
                ("get", self._chain_blocks),
                ("prefetch", self._chain_blocks),
                ("beside", self._chain_blocks),
                ("single", _SMALL_CHAIN_BLOCKS),
            )
        }
        with self._client(self._staging_bytes) as client:
            for stored in chains.values():
                stored.put(client, durable=True)
        cold_restart(self._daemon)
        with self._client(self._staging_bytes) as client:
            for name, stored in chains.items():
                found = stored.found(client)
                assert found == (0, len(stored.hashes)), f"{name}: blocks in DRAM and on NVMe alone: {found}"
            read_gbps = median(self._file.read_bytes_per_s() for _ in range(self._scale.repeats_within)) / GB
            self._samples["get_nvme"] = Sample(self._get_all(client, chains["get"]), read_gbps)
            self._samples["prefetch"] = Sample(self._prefetch(client, chains["prefetch"]), read_gbps)
            cold_us = self._get_singly(client, chains["beside"], chains["single"])
            self._samples["cold_get_p50"] = Sample(cold_us, self._file.read_block_s(self._block_bytes) * 1e6)
            for name, stored in chains.items():
                delivered = stored.delivered(client)
                assert delivered == (len(stored.hashes), 0), f"{name}: delivered, wrong bytes: {delivered}"

    def _get_all(self, client: Client, stored: Stored) -> float:
        pool = Pool(len(stored.hashes), self._block_bytes)
        started = time.perf_counter()
        blocks = client.get_into(client.namespace(stored.spec), stored.hashes, pool.spans(), wait_s=_WAIT_S)
        seconds = time.perf_counter() - started
        assert blocks == len(stored.hashes), f"{blocks} of {len(stored.hashes)} blocks from NVMe"
        return pool.size_bytes / seconds / GB

    def _prefetch(self, client: Client, stored: Stored) -> float:
        namespace = client.namespace(stored.spec)
        started = time.perf_counter()
        status = client.prefetch(namespace, stored.hashes).wait(_PREFETCH_WAIT_S)
        seconds = time.perf_counter() - started
        assert status.done, f"a prefetch ended so: {status}"
        return len(stored.hashes) * self._block_bytes / seconds / GB

    def _get_singly(self, client: Client, beside: Stored, single: Stored) -> float:
        """Median time, us, of gets one after the other that each wait for one block, while a prefetch runs."""
        prefetch = client.prefetch(client.namespace(beside.spec), beside.hashes)
        namespace, seconds = client.namespace(single.spec), []
        for block in single.hashes:
            started = time.perf_counter()
            with client.get(namespace, [block], wait_s=_WAIT_S) as held:
                assert len(held) == 1, "a block on NVMe is not delivered"
            seconds.append(time.perf_counter() - started)
            if prefetch.wait(0.0).done:
                break
        else:
            prefetch.wait(_PREFETCH_WAIT_S)
        return median(seconds) * 1e6


@contextmanager
def _peak_memory(daemon: DaemonProcess, tier_bytes: int) -> Iterator[list[int]]:
    """Yields [private bytes, shared bytes beside the tier] of the daemon, the peaks so far."""
    peaks, stop = [0, 0], threading.Event()

    def watch() -> None:
        while not stop.wait(_WATCH_S):
            peaks[0] = max(peaks[0], daemon.private_bytes())
            peaks[1] = max(peaks[1], daemon.shared_bytes() - tier_bytes)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()
