"""What it costs to purge a tenant among others: plants a pattern, purges, looks for it everywhere.

One tenant has 1 GiB in DRAM and on NVMe (`--size`), another as much again. Afterwards no byte of the first may be
found in any memory or file of the daemon, and every block of the other must read as it was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kvstored_client import Client, NamespaceSpec, Outcome
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1.kvstored_pb2 import OPERATION_FLUSH, OPERATION_PURGE, OPERATION_PURGE_STATUS

from bench.common import Figure, Values, emit, parser
from kvstored.config.types import parse_bytes
from kvstored.testing.daemon_process import DaemonProcess

BLOCK_BYTES: Final = 512 << 10
BATCH: Final = 16
SAMPLES: Final = 200
READ_BYTES: Final = 16 << 20
GONE, KEPT = "gone", "kept"
SPEC: Final = NamespaceSpec(model="m")
FIGURES: Final = (
    Figure("planted_bytes", "what the purged tenant has, in each tier"),
    Figure("complete", "1: the receipt says that nothing remains", "== 1"),
    Figure("memory_before", "occurrences of the pattern in the daemon's memory before"),
    Figure("files_before", "and in its files"),
    Figure("memory_after", "occurrences of the pattern in the daemon's memory after", "== 0"),
    Figure("files_after", "and in its files", "== 0"),
    Figure("other_blocks_share", "blocks of the other tenant that read as they were written", "== 1"),
    Figure("purge_s", "how long it took, by its receipt"),
    Figure("purge_s_per_gib", "the same by what was planted in each tier"),
    Figure("daemon_cpu_s", "CPU seconds of the daemon meanwhile, its answers to gets and status included"),
    Figure("zeroed_dram_bytes", "zeros written to memory, free memory that held old bytes included"),
    Figure("zeroed_nvme_bytes", "zeros written to files, free and dead parts included"),
    Figure("ceiling_s", "so many zeros written to a file in the same directory, and synced, by one plain loop"),
    Figure("purge_ratio", "purge_s by ceiling_s"),
    Figure("other_get_ms_before", "median get of a block of the other tenant, nothing else going on"),
    Figure("other_get_ms_meanwhile", "and while the purge ran"),
    Figure("other_get_p99_ms_meanwhile", "and the slowest of a hundred"),
)


def block(tenant: str, number: int) -> bytes:
    """A block that is full of its tenant's name."""
    return (_pattern(tenant) + f"{number:08}>".encode()).ljust(64, b".") * (BLOCK_BYTES // 64)


def _link(descriptor: Path) -> str:
    """What a descriptor of the daemon is; empty where it is closed by now."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


def _pattern(tenant: str) -> bytes:
    return f"<planted, tenant {tenant}, ".encode()


def _hashes(count: int) -> list[bytes]:
    return [f"block-{number:08}".encode().ljust(16, b".") for number in range(count)]


def _put(client: Client, tenant: str, count: int) -> None:
    hashes, namespace = _hashes(count), client.namespace(SPEC)
    for start in range(0, count, BATCH):
        part = hashes[start : start + BATCH]
        data = [block(tenant, start + i) for i in range(len(part))]
        outcomes = client.put(namespace, part, data, wait_s=60).outcomes
        assert set(outcomes) == {Outcome.HIT}, outcomes


def _get_times(client: Client, tenant: str, count: int, go_on: Iterator[bool]) -> list[float]:
    """Seconds of gets of one block, round and round; those that are right."""
    times, hashes, namespace = [], _hashes(count), client.namespace(SPEC)
    for number, _ in enumerate(iter(lambda: next(go_on, False), False)):
        started = time.perf_counter()
        with client.get(namespace, [hashes[number % count]], wait_s=30) as blocks:
            took = time.perf_counter() - started
            if [bytes(view) for view in blocks] == [block(tenant, number % count)]:
                times.append(took)
    return times


def _memory_of(pid: int) -> list[Path]:
    """The daemon's segments and staging rings, as files to read."""
    named = ("kvstored-dram", "kvstored-staging")
    return [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if any(name in _link(fd) for name in named)]


def occurrences(paths: Sequence[Path], wanted: bytes) -> int:
    """How often the pattern stands in these files, also across the pieces that are read."""
    found = 0
    for path in paths:
        with suppress(FileNotFoundError), path.open("rb") as file:  # since it was listed it may have gone
            tail = b""
            while data := file.read(READ_BYTES):
                found += (tail + data).count(wanted)
                tail = data[-(len(wanted) - 1) :]
    return found


def _look(daemon: DaemonProcess) -> tuple[int, int]:
    """Occurrences of what is purged in memory, and in files."""
    files = [Path(folder) / name for folder, _, names in os.walk(daemon.nvme_path) for name in names]
    return occurrences(_memory_of(daemon.pid), _pattern(GONE)), occurrences(files, _pattern(GONE))


def _while_running(client: Client, receipt: admin.PurgeReceipt) -> Iterator[bool]:
    """True as long as the purge runs; the receipt is kept up to date."""
    while receipt.state in ("waiting", "running"):
        yield True
        request = admin.PurgeStatusRequest(purge_id=receipt.purge_id)
        receipt.CopyFrom(client.call(OPERATION_PURGE_STATUS, request, admin.PurgeStatusReply).receipts[0])


def _ceiling_s(directory: Path, size_bytes: int) -> float:
    zeros = bytes(1 << 20)
    with tempfile.TemporaryFile(dir=directory) as file:
        started = time.perf_counter()
        for _ in range(0, size_bytes, len(zeros)):
            file.write(zeros)
        file.flush()
        os.fdatasync(file.fileno())
        return time.perf_counter() - started


def _settings(planted_bytes: int) -> dict[str, str]:
    tenants = [{"name": name, "tokens_sha256": [hashlib.sha256(name.encode()).hexdigest()]} for name in (GONE, KEPT)]
    root = {"name": "root", "role": "admin", "uids": [os.getuid()]}
    return {
        "tenants": json.dumps([*tenants, root]),
        "dram.capacity_bytes": str(3 * planted_bytes + (64 << 20)),
        "nvme.capacity_bytes": str(4 * planted_bytes + (512 << 20)),
        "limits.staging_bytes_per_session": str(64 << 20),
    }


def measure(size_bytes: int, directory: Path | None) -> Values:
    """Plant, purge, search; the figures."""
    count = max(BATCH, size_bytes // BLOCK_BYTES)
    planted_bytes = count * BLOCK_BYTES
    settings: dict[str, Any] = {"timeout_s": 300, "connect_timeout_s": 300}
    with (
        DaemonProcess(_settings(planted_bytes), nvme=True, parent_directory=directory, ready_timeout_s=300.0) as daemon,
        Client(daemon.address, token=GONE, **settings) as gone,
        Client(daemon.address, token=KEPT, **settings) as kept,
        Client(daemon.address, **settings) as root,
    ):
        _put(gone, GONE, count)
        _put(kept, KEPT, count)
        root.call(OPERATION_FLUSH, admin.FlushRequest(wait_ms=300_000), admin.FlushReply)
        before, quiet = _look(daemon), _get_times(kept, KEPT, count, iter([True] * SAMPLES))
        cpu_s = daemon.cpu_s()
        receipt = root.call(OPERATION_PURGE, admin.PurgeRequest(tenant=GONE), admin.PurgeReply).receipt
        busy = _get_times(kept, KEPT, count, _while_running(root, receipt))
        cpu_s = daemon.cpu_s() - cpu_s
        after, right = _look(daemon), _get_times(kept, KEPT, count, iter([True] * count))
        ceiling_s = _ceiling_s(daemon.directory, receipt.nvme_zeroed_bytes)
    return {
        "planted_bytes": planted_bytes,
        "complete": int(receipt.state == "complete"),
        "memory_before": before[0],
        "files_before": before[1],
        "memory_after": after[0],
        "files_after": after[1],
        "other_blocks_share": len(right) / count,
        "purge_s": receipt.duration_s,
        "purge_s_per_gib": receipt.duration_s / planted_bytes * (1 << 30),
        "daemon_cpu_s": cpu_s,
        "zeroed_dram_bytes": receipt.dram_zeroed_bytes,
        "zeroed_nvme_bytes": receipt.nvme_zeroed_bytes,
        "ceiling_s": ceiling_s,
        "purge_ratio": receipt.duration_s / ceiling_s,
        "other_get_ms_before": 1e3 * statistics.median(quiet),
        "other_get_ms_meanwhile": 1e3 * statistics.median(busy) if busy else None,
        "other_get_p99_ms_meanwhile": 1e3 * sorted(busy)[len(busy) * 99 // 100] if busy else None,
    }


def main() -> None:
    """Run it and give out the figures."""
    line = parser("bench.purge", __doc__ or "", FIGURES)
    line.add_argument("--size", type=parse_bytes, default=1 << 30, help="what is planted of each tenant (1GiB)")
    line.add_argument("--directory", type=Path, help="where files go: a disk, not memory")
    arguments = line.parse_args()
    emit(measure(arguments.size, arguments.directory), FIGURES, arguments.json)


if __name__ == "__main__":
    main()
