"""Prefetch from NVMe into DRAM, beside fio on the same file system, in one run.

Blocks are put, flushed and, by an orderly restart, left on NVMe alone. Then fio and prefetch
take turns, every prefetch after a fresh restart and with the files out of the page cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Final

from kvstored_client import Client, NamespaceSpec
from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

from bench.ceiling import FioRead, fio_available
from bench.cell import chain_hashes
from bench.cold import cold_restart
from bench.common import GB, MIB, Figure, Value, Values, emit, median, median_ratio, p50_us, parser, progress, run
from bench.load import ForeignLoad
from bench.payload import Payloads
from bench.prober import Prober
from bench.replay import wait_mover_idle
from kvstored.testing.daemon_process import DaemonProcess

_PUT_BLOCKS: Final = 64
_DEPTH: Final = 16
_PROBE_BLOCKS: Final = 512
_PROBE_BLOCK_BYTES: Final = 16 << 10
_IDLE_WINDOW_S: Final = 1.0
_TIMEOUT_S: Final = 300.0
_SPEC: Final = NamespaceSpec(model="bench.io")
_PROBE_SPEC: Final = NamespaceSpec(model="bench.io probe")

FIGURES: Final = (
    Figure("prefetch_ratio", "prefetch rate / fio rate, median over pairs of one run", ">= 0.9"),
    Figure("prefetch_gbps", "NVMe to DRAM by one prefetch, content hashes checked, GB/s"),
    Figure("fio_gbps", "fio: io_uring, registered buffers, O_DIRECT, sequential, same block size and depth 16, GB/s"),
    Figure("prefetch_cpu_s_per_gb", "CPU seconds of the daemon per GB prefetched"),
    Figure("lookup_p50_ratio", "median look-up of a resident chain of 512 while a prefetch runs / idle", "<= 1.5"),
    Figure("lookup_idle_p50_us", "that look-up, from a second process, idle, us"),
    Figure("lookup_busy_p50_us", "that look-up while a prefetch runs, us"),
    Figure("write_amplification", "bytes written to storage by put and flush / bytes of blocks stored", "<= 1.05"),
    Figure("put_to_nvme_gbps", "put until every block is on NVMe, GB/s"),
    Figure("wrong_bytes", "prefetched bytes that differ from what was put", "== 0"),
    Figure("block_bytes", "size of each block"),
    Figure("blocks", "blocks in each prefetch"),
    Figure("repeats", "pairs of fio and prefetch behind the ratio"),
    Figure("foreign_cpu_share", "share of all CPUs that other processes of the machine used meanwhile"),
)


class IoBench:
    """One daemon with an NVMe path, restarted before every prefetch."""

    def __init__(self, daemon: DaemonProcess, arguments: argparse.Namespace) -> None:
        self._daemon = daemon
        self._repeats: int = arguments.repeats
        self._block_bytes: int = arguments.block_bytes
        self._hashes = chain_hashes("io", arguments.mib * MIB // arguments.block_bytes)
        self._probe_hashes = chain_hashes("probe", _PROBE_BLOCKS)
        self._payloads = Payloads(arguments.block_bytes)
        self._size_bytes = len(self._hashes) * arguments.block_bytes
        self._fio = FioRead(daemon.directory / "fio.data", self._size_bytes, arguments.block_bytes, _DEPTH)
        self._prefetch_s: list[float] = []
        self._cpu_s: list[float] = []
        self._fio_s: list[float] = []
        self._wrong_bytes = 0

    def run(self) -> Values:
        """Everything; returns all figures."""
        with_fio = fio_available()
        values = self._fill()
        if with_fio:
            progress("fio: laying out")
            self._fio.lay_out()
        for repeat in range(self._repeats):
            progress(f"prefetch {repeat + 1} of {self._repeats}")
            if with_fio:
                self._fio_s.append(self._size_bytes / self._fio.bytes_per_s())
            cold_restart(self._daemon)
            self._prefetch(check=repeat == 0)
        progress("look-ups beside a prefetch")
        return {**values, **self._rates(), **self._lookups()}

    # --- filling -------------------------------------------------------------------

    def _fill(self) -> Values:
        progress(f"put {self._size_bytes / GB:.2f} GB and flush")
        with self._client() as client:
            self._put_probe(client)
            self._flush(client)
            before, started = self._daemon.written_bytes(), time.perf_counter()
            self._put_all(client)
            self._flush(client)
            seconds = time.perf_counter() - started
            written = self._daemon.written_bytes() - before
        return {
            "put_to_nvme_gbps": self._size_bytes / seconds / GB,
            "write_amplification": written / self._size_bytes,
        }

    def _put_all(self, client: Client) -> None:
        namespace = client.namespace(_SPEC)
        for start in range(0, len(self._hashes), _PUT_BLOCKS):
            piece = self._hashes[start : start + _PUT_BLOCKS]
            rows = self._payloads.make(range(start, start + len(piece)))
            parent = self._hashes[start - 1] if start else b""
            result = client.put(namespace, piece, list(rows), parent=parent, wait_s=30.0)
            assert result.stored == len(piece), f"put: {result}"

    def _put_probe(self, client: Client) -> None:
        rows = Payloads(_PROBE_BLOCK_BYTES).make(range(_PROBE_BLOCKS))
        client.put(client.namespace(_PROBE_SPEC), self._probe_hashes, list(rows), wait_s=30.0)

    def _flush(self, client: Client) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        left = 1
        while left:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{left} blocks are not on NVMe after {_TIMEOUT_S:g} s")
            request = admin_pb2.FlushRequest(wait_ms=2000)
            left = client.call(pb.OPERATION_FLUSH, request, admin_pb2.FlushReply).left_blocks
        wait_mover_idle(client)

    # --- prefetching ---------------------------------------------------------------

    def _prefetch(self, *, check: bool) -> None:
        with self._client() as client:
            namespace = client.namespace(_SPEC)
            found = client.lookup(namespace, self._hashes)
            assert (found.nvme_blocks, found.dram_blocks) == (len(self._hashes), 0), f"not cold: {found}"
            cpu_s, started = self._daemon.cpu_s(), time.perf_counter()
            self._prefetch_all(client)
            self._prefetch_s.append(time.perf_counter() - started)
            self._cpu_s.append(self._daemon.cpu_s() - cpu_s)
            if check:
                self._check(client)

    def _prefetch_all(self, client: Client) -> None:
        namespace = client.namespace(_SPEC)
        prefetch = client.prefetch(namespace, self._hashes)
        prefetch.wait(_TIMEOUT_S)
        resident = client.lookup(namespace, self._hashes).dram_blocks
        assert resident == len(self._hashes), f"{resident} of {len(self._hashes)} blocks are resident after a prefetch"

    def _check(self, client: Client) -> None:
        namespace = client.namespace(_SPEC)
        for start in range(0, len(self._hashes), _PUT_BLOCKS):
            piece = self._hashes[start : start + _PUT_BLOCKS]
            with client.get(namespace, piece) as blocks:
                assert len(blocks) == len(piece), "a prefetched block is not resident"
                for index in range(len(blocks)):
                    self._wrong_bytes += self._payloads.wrong_bytes(start + index, blocks[index])

    def _lookups(self) -> Values:
        idle: list[float] = []
        busy: list[float] = []
        for _ in range(2):
            cold_restart(self._daemon)
            with self._client() as client:
                client.prefetch(client.namespace(_PROBE_SPEC), self._probe_hashes).wait(_TIMEOUT_S)
                with Prober(self._daemon.address, _PROBE_SPEC, self._probe_hashes) as prober:
                    idle += prober.window(_IDLE_WINDOW_S)
                    prober.start()
                    self._prefetch_all(client)
                    busy += prober.stop()
        return {
            "lookup_p50_ratio": p50_us(busy) / p50_us(idle),
            "lookup_idle_p50_us": p50_us(idle),
            "lookup_busy_p50_us": p50_us(busy),
        }

    def _client(self) -> Client:
        return Client(self._daemon.address, name="bench.io", timeout_s=60.0, connect_timeout_s=60.0)

    def _rates(self) -> Values:
        values: dict[str, Value] = {
            "prefetch_gbps": self._size_bytes / median(self._prefetch_s) / GB,
            "prefetch_cpu_s_per_gb": median(self._cpu_s) / (self._size_bytes / GB),
            "wrong_bytes": self._wrong_bytes,
            "block_bytes": self._block_bytes,
            "blocks": len(self._hashes),
            "repeats": self._repeats,
        }
        if self._fio_s:
            values["fio_gbps"] = self._size_bytes / median(self._fio_s) / GB
            values["prefetch_ratio"] = median_ratio(self._fio_s, self._prefetch_s)
        return values


def settings(size_bytes: int) -> dict[str, str]:
    """A DRAM tier that a whole prefetch leaves under its watermarks, and an NVMe tier twice its size."""
    return {
        "dram.capacity_bytes": str(size_bytes * 3 // 2 + 256 * MIB),
        "nvme.capacity_bytes": str(max(2 * size_bytes, 1 << 30) // (256 * MIB) * (256 * MIB)),
    }


def _arguments(names: Sequence[str] | None = None) -> argparse.Namespace:
    built = parser("bench.io", "Prefetch from NVMe into DRAM, beside fio on the same file system.", FIGURES)
    built.add_argument("--mib", type=int, default=2048, help="MiB in each prefetch")
    built.add_argument("--block-bytes", type=int, default=512 << 10)
    built.add_argument("--repeats", type=int, default=5, help="pairs of fio and prefetch")
    built.add_argument("--directory", help="where the files go: the file system to measure")
    return built.parse_args(names)


def main() -> int:
    """Entry point; exit status 1 where a byte was wrong."""
    arguments = _arguments()
    options = settings(arguments.mib * MIB)
    load = ForeignLoad()
    with DaemonProcess(options, nvme=True, parent_directory=arguments.directory) as daemon:
        values = IoBench(daemon, arguments).run()
    values = {**values, "foreign_cpu_share": load.share()}
    emit(values, FIGURES, arguments.json)
    return int(bool(values["wrong_bytes"]))


if __name__ == "__main__":
    run(main)
