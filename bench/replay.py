"""Replays a recorded workload through a real daemon and compares its hits with a plain simulation.

For each request the leading blocks are got and every byte of them is checked in place; the
missing rest of the chain is put; each get finds the leases of the one before it ended. The
simulation is `kvstored.policy.simulator`, of the same capacity in blocks and with the same eviction order.
With `--nvme-blocks` a second tier joins in: the simulation is `kvstored.policy.two_tiers` then, with the same
admission, and the replay waits for the mover after every step. Where the simulation says nothing (a request needs
more room than the high watermark leaves, or NVMe has to recycle) hits are reported without a comparison.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstored_client import Client, NamespaceSpec
from kvstored_proto.v1.kvstored_pb2 import OPERATION_KEEP_ALIVE, KeepAliveReply, KeepAliveRequest, StatusReply

from bench.common import Figure, count, emit, parser, progress, run
from bench.payload import Payloads
from bench.traces import block_hash, find_trace, read_trace
from kvstored.policy.admission import ADMISSIONS, make_admission
from kvstored.policy.orders import ORDERS, make_order
from kvstored.policy.simulator import simulate
from kvstored.policy.trace import Request
from kvstored.policy.two_tiers import TwoTiers
from kvstored.testing.daemon_process import DaemonProcess

_PROGRESS_REQUESTS: Final = 1000
_EXTENT_BYTES_MIN: Final = 32 << 20
_EXTENT_BYTES_MAX: Final = 256 << 20
_IDLE_TIMEOUT_S: Final = 120.0

FIGURES: Final = (
    Figure("eviction", "order of eviction"),
    Figure("admission", "what is admitted to NVMe (null without it)"),
    Figure("requests", "requests replayed"),
    Figure("blocks", "blocks asked for"),
    Figure("hits", "leading blocks found and delivered"),
    Figure("hit_rate", "hits / blocks"),
    Figure("simulated_hits", "hits of the simulator at the same capacity (null where it says nothing)"),
    Figure("hits_minus_simulated", "hits - simulated_hits: the daemon does exactly that at 0", "== 0"),
    Figure("written_blocks", "blocks written to NVMe"),
    Figure("written_minus_simulated", "written_blocks - those of the simulator", "== 0"),
    Figure("wrong_bytes", "delivered bytes that differ from what was put", "== 0"),
    Figure("refused_blocks", "blocks that a put could not store", "== 0"),
    Figure("first_difference", "first request whose hits differ from the simulation's (-1: none)"),
    Figure("seconds", "wall time of the replay"),
)


@dataclass
class Tally:
    """What the replay has seen so far."""

    hits: int = 0
    blocks: int = 0
    wrong_bytes: int = 0
    refused_blocks: int = 0
    hits_by_request: list[int] = field(default_factory=list)


class Replay:
    """Sends requests to the daemon as an engine would."""

    def __init__(self, client: Client, block_bytes: int, *, wait_idle: bool) -> None:
        self._client = client
        self._namespace = client.namespace(NamespaceSpec(model="replay", extra=f"{block_bytes}"))
        self._payloads = Payloads(block_bytes)
        self._wait_idle = wait_idle
        self.tally = Tally()

    def request(self, ids: Sequence[int]) -> None:
        """One request: get and check what is there, put the rest."""
        hashes = [block_hash(block) for block in ids]
        hits = self._get(ids, hashes) if ids else 0
        if hits < len(ids):
            self._put(ids[hits:], hashes[hits:], parent=hashes[hits - 1] if hits else b"")
        self.tally.hits += hits
        self.tally.blocks += len(ids)
        self.tally.hits_by_request.append(hits)
        if self._wait_idle:
            wait_mover_idle(self._client)

    def _get(self, ids: Sequence[int], hashes: list[bytes]) -> int:
        wait_s = 5.0 if self._wait_idle else 0.0
        with self._client.get(self._namespace, hashes, wait_s=wait_s) as blocks:
            for index in range(len(blocks)):
                self.tally.wrong_bytes += self._payloads.wrong_bytes(ids[index], blocks[index])
            hits = len(blocks)
            if self._wait_idle:  # what came up may have started a demotion, which must not meet the release
                wait_mover_idle(self._client)
        if self._wait_idle:
            wait_mover_idle(self._client)
        elif hits == len(ids):  # no put follows; the next get may be served before the release, one use the less
            self._client.call(OPERATION_KEEP_ALIVE, KeepAliveRequest(), KeepAliveReply)
        return hits

    def _put(self, ids: Sequence[int], hashes: list[bytes], parent: bytes) -> None:
        rows = list(self._payloads.make(ids))
        result = self._client.put(self._namespace, hashes, rows, parent=parent, wait_s=30.0)
        self.tally.refused_blocks += len(ids) - result.stored - result.existing


def wait_mover_idle(client: Client, timeout_s: float = _IDLE_TIMEOUT_S) -> None:
    """Wait until the mover has nothing queued and nothing in flight; raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = client.status()
        if status is not None and status.counters["mover_idle"] and not _under_way(status):
            return
        time.sleep(0.0005)
    raise TimeoutError(f"the mover is not idle after {timeout_s:g} s")


def _under_way(status: StatusReply) -> int:
    names = ("mover_queued", "mover_inflight", "nvme_reinserting")
    return sum(status.counters[name] for name in names if name in status.counters)


def _settings(arguments: argparse.Namespace) -> dict[str, str]:
    settings = {
        "dram.capacity_bytes": str(arguments.dram_blocks * arguments.block_bytes),
        "policy.eviction": arguments.eviction,
        "policy.admission": arguments.admission,
        "mover.forecast_half_life_s": "0",  # it goes by time, which a simulation has none of
        "limits.leased_share": "1.0",  # a simulated client may hold a chain as long as the tier
    }
    if arguments.nvme_blocks:
        wanted = arguments.nvme_blocks * arguments.block_bytes
        extent = max(_EXTENT_BYTES_MIN, min(_EXTENT_BYTES_MAX, wanted // 8 >> 20 << 20))
        extents = -(-wanted // (extent - (1 << 20)))  # each keeps some room for its footer
        settings |= {"nvme.capacity_bytes": str(extents * extent), "nvme.extent_bytes": str(extent)}
    return settings


def _replay(arguments: argparse.Namespace, requests: Sequence[Sequence[int]]) -> tuple[Tally, float, int]:
    two_tiers = bool(arguments.nvme_blocks)
    process = DaemonProcess(_settings(arguments), nvme=two_tiers, parent_directory=arguments.directory)
    with process as daemon, Client(daemon.address, name="replay", timeout_s=60.0, connect_timeout_s=60.0) as client:
        replay = Replay(client, arguments.block_bytes, wait_idle=two_tiers)
        started = time.perf_counter()
        for index, ids in enumerate(requests):
            replay.request(ids)
            if index % _PROGRESS_REQUESTS == _PROGRESS_REQUESTS - 1:
                progress(f"{index + 1} of {len(requests)} requests, {replay.tally.hits} hits")
        seconds, status = time.perf_counter() - started, client.status()
        return replay.tally, seconds, 0 if status is None else status.counters["nvme_stored_blocks"]


def main() -> int:
    """Entry point; exit status 1 where a byte was wrong or hits differ from the simulation's."""
    arguments = _arguments()
    requests = numbered(read_trace(find_trace(arguments.trace), arguments.limit))
    tally, seconds, written = _replay(arguments, requests)
    values = {
        "eviction": arguments.eviction,
        "admission": arguments.admission if arguments.nvme_blocks else None,
        "requests": len(requests),
        "blocks": tally.blocks,
        "hits": tally.hits,
        "hit_rate": tally.hits / max(1, tally.blocks),
        "wrong_bytes": tally.wrong_bytes,
        "refused_blocks": tally.refused_blocks,
        "seconds": seconds,
    }
    difference = 0
    compared = _simulate(arguments, requests)
    if compared is not None:
        simulated, simulated_written = compared
        difference = tally.hits - sum(simulated)
        values |= {
            "simulated_hits": sum(simulated),
            "hits_minus_simulated": difference,
            "first_difference": first_difference(tally.hits_by_request, simulated),
        }
        if arguments.nvme_blocks:
            values |= {"written_blocks": written, "written_minus_simulated": written - simulated_written}
    emit(values, FIGURES, arguments.json)
    return int(bool(tally.wrong_bytes or difference))


def _simulate(arguments: argparse.Namespace, requests: Sequence[Sequence[int]]) -> tuple[list[int], int] | None:
    """Hits of each request and blocks written to NVMe; None where the simulation does not stand for the daemon."""
    order = make_order(arguments.eviction)
    if not arguments.nvme_blocks:
        return list(simulate(requests, order, arguments.dram_blocks)), 0
    admission = make_admission(arguments.admission)
    tiers = TwoTiers(order, arguments.dram_blocks, admission, block_bytes=arguments.block_bytes)
    hits = list(map(tiers.request, requests))
    return None if tiers.short_blocks or len(tiers.below) > arguments.nvme_blocks else (hits, tiers.written_blocks)


def numbered(requests: Iterable[Request]) -> list[list[int]]:
    """The same requests with a number for each block, which its bytes are made from."""
    numbers: dict[int | str, int] = {}
    return [[numbers.setdefault(block_id, len(numbers)) for block_id in ids] for ids in requests]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first element that differs, or -1."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), -1)


def _arguments() -> argparse.Namespace:
    built = parser("bench.replay", "Replay a trace through a real daemon, every byte checked.", FIGURES)
    built.add_argument("trace", help="a trace file, or the name of one in $KVSTORED_TRACES")
    built.add_argument("--block-bytes", type=count, default=16384)
    built.add_argument("--dram-blocks", type=count, default=10000, help="capacity of the DRAM tier")
    built.add_argument(
        "--eviction", choices=sorted(ORDERS), default="shelf_life", help="order of eviction (default: %(default)s)"
    )
    built.add_argument("--nvme-blocks", type=int, default=0, help="capacity of an NVMe tier; 0 = none")
    built.add_argument(
        "--admission", choices=sorted(ADMISSIONS), default="admit_all", help="what goes to NVMe (default: %(default)s)"
    )
    built.add_argument("--limit", type=count, help="replay only the first so many requests")
    built.add_argument("--directory", help="where the daemon's files go (default: the system's temporary directory)")
    return built.parse_args()


if __name__ == "__main__":
    run(main)
