"""Moving blocks between the DRAM tier and a client, beside plain memmove of the same bytes.

All in one run, repeats interleaved, every payload compared with its source outside the timed
part. The main block size is 512 KiB (keys without a suffix), 512 blocks; 128 KiB and 2 MiB move
as many bytes. Buffers are page-aligned, faulted in, their slots shuffled.
"""

from __future__ import annotations

import argparse
from typing import Final

from kvstored_client import Client, NamespaceSpec

from bench.buffers import Pool
from bench.cell import Cell, call_latencies, chain_hashes
from bench.clients import Task, aggregate
from bench.common import GB, MIB, Figure, Value, Values, emit, median, median_ratio, p50_us, parser, progress, run
from bench.inline import InlineClient
from bench.load import ForeignLoad
from bench.redis_peer import RedisPeer, server_path
from kvstored.testing.daemon_process import DaemonProcess

_KIB: Final = 1 << 10
_MAIN_BYTES: Final = 512 * _KIB
_SIZES: Final = ((_MAIN_BYTES, ""), (128 * _KIB, "_128k"), (2 * MIB, "_2m"))
_CLIENTS: Final = (1, 2, 4)
_LOOKUP_BLOCKS: Final = 512
_LOOKUP_BLOCK_BYTES: Final = 16 * _KIB
_CELL_FIGURES: Final = (
    Figure("memmove_gbps", "one memmove per block, from where the blocks are mapped to the caller's buffers, GB/s"),
    Figure("memmove_private_gbps", "one memmove per block, between buffers of the caller, GB/s"),
    Figure("get_gbps", "get of resident blocks into the caller's buffers, GB/s"),
    Figure("get_ratio", "time of that get / time to memmove the same blocks to the same buffers", "<= 1.10"),
    Figure("get_control_ms", "a get and release of the chain without copies, ms"),
    Figure("get_control_share", "that / time of the get: everything but its memmoves", "<= 0.05"),
    Figure("put_gbps", "put from the caller's buffers until readable, GB/s"),
    Figure("put_ratio", "time of that put / time to memmove between the caller's buffers", "<= 1.7"),
    Figure("put_staged_gbps", "commit of data that lies in staging until readable, GB/s"),
    Figure("put_staged_ratio", "time of that commit / time to memmove between the caller's buffers", "<= 1.35"),
    Figure("memmove_cpu_s_per_gb", "CPU seconds of the memmoves per GB"),
    Figure("get_client_cpu_s_per_gb", "CPU seconds of the client per GB got"),
    Figure("get_daemon_cpu_s_per_gb", "CPU seconds of the daemon per GB got"),
    Figure("put_client_cpu_s_per_gb", "CPU seconds of the client per GB put"),
    Figure("put_daemon_cpu_s_per_gb", "CPU seconds of the daemon per GB put"),
)


def _suffixed(suffix: str) -> list[Figure]:
    size = {"": "", "_128k": " (128 KiB blocks)", "_2m": " (2 MiB blocks)"}[suffix]
    return [Figure(f.key + suffix, f.meaning + size, "" if suffix else f.target) for f in _CELL_FIGURES]


def _clients_figures(clients: int) -> list[Figure]:
    return [
        Figure(f"get_gbps_clients_{clients}", f"{clients} client processes get one resident chain each, together"),
        Figure(f"memmove_gbps_clients_{clients}", f"the same {clients} processes memmove as many bytes, together"),
        Figure(f"get_ratio_clients_{clients}", "memmove rate / get rate of those processes"),
    ]


FIGURES: Final = (
    *(figure for _, suffix in _SIZES for figure in _suffixed(suffix)),
    Figure("lookup512_p50_us", "lookup of a resident chain of 512, end to end, median us", "<= 250"),
    Figure("get1_p50_us", "get and release of one resident block, no copy, median us", "<= 150"),
    Figure("get1_copy_p50_us", "get of one resident block of 512 KiB into a buffer, median us"),
    *(figure for clients in _CLIENTS for figure in _clients_figures(clients)),
    Figure("grpc_inline_get_gbps", "get through gRPC messages over a Unix socket, GB/s"),
    Figure("grpc_inline_put_gbps", "put through gRPC messages over a Unix socket, GB/s"),
    Figure("get_speedup_over_grpc_inline", "time of the gRPC get / time of the get, per byte"),
    Figure("redis_get_gbps", "redis-py, hiredis parser, tuned packer, Unix socket: get, GB/s"),
    Figure("redis_put_gbps", "the same: put, GB/s"),
    Figure("get_speedup_over_redis", "time of the Redis get / time of the get, repeat by repeat", ">= 5"),
    Figure("put_speedup_over_redis", "time of the Redis put / time of the put, repeat by repeat"),
    Figure("wrong_blocks", "blocks delivered with other bytes than were put", "== 0"),
    Figure("missed_blocks", "resident blocks that a client process was not delivered", "== 0"),
    Figure("repeats", "interleaved repeats behind each median"),
    Figure("foreign_cpu_share", "share of all CPUs that other processes of the machine used meanwhile"),
    Figure("block_bytes", "main block size"),
    Figure("blocks", "blocks of the main size in each repeat"),
)


class TransferBench:
    """One daemon, two clients in this process, and the measurements in order."""

    def __init__(self, daemon: DaemonProcess, client: Client, stager: Client, arguments: argparse.Namespace) -> None:
        self._daemon, self._client, self._stager = daemon, client, stager
        self._repeats: int = arguments.repeats
        self._total_bytes: int = arguments.mib * MIB
        self._with_redis: bool = not arguments.no_redis
        self._wrong_blocks = self._missed_blocks = 0

    def run(self) -> Values:
        """Everything; returns all figures."""
        values: dict[str, Value] = {}
        for block_bytes, suffix in _SIZES:
            progress(f"blocks of {block_bytes // _KIB} KiB")
            cell = Cell(self._daemon, self._client, self._stager, block_bytes, self._total_bytes)
            cell.prepare()
            values |= self._main(cell) if not suffix else self._side(cell, suffix)
            cell.close()
            self._wrong_blocks += cell.wrong_blocks
        return {
            **values,
            "wrong_blocks": self._wrong_blocks,
            "missed_blocks": self._missed_blocks,
            "repeats": self._repeats,
            "block_bytes": _MAIN_BYTES,
            "blocks": self._total_bytes // _MAIN_BYTES,
        }

    def _side(self, cell: Cell, suffix: str) -> Values:
        for _ in range(self._repeats):
            cell.repeat()
        return cell.figures(suffix)

    def _main(self, cell: Cell) -> Values:
        executable = server_path() if self._with_redis else None
        values = self._beside_redis(cell, executable) if executable else self._side(cell, "")
        values = {**values, **self._latencies(cell)}
        progress("gRPC messages")
        values |= self._inline(cell)
        for clients in _CLIENTS:
            progress(f"{clients} client processes")
            values |= self._clients(cell, clients)
        return values

    def _beside_redis(self, cell: Cell, executable: str) -> Values:
        """The cell's repeats, each with a Redis put and get in between."""
        put_s: list[float] = []
        get_s: list[float] = []
        with RedisPeer(executable, 2 * cell.total_bytes + (256 << 20)) as peer:
            for repeat in range(self._repeats + 1):
                peer.put(cell.hashes, cell.source, put_s)
                cell.destination.clear()
                peer.get(cell.hashes, cell.destination, get_s)
                self._wrong_blocks += cell.destination.wrong_blocks(cell.source)
                peer.delete(cell.hashes)
                if repeat:  # the first warms the server's arenas
                    cell.repeat()
        del put_s[0], get_s[0]
        return {
            **cell.figures(""),
            "redis_get_gbps": cell.total_bytes / median(get_s) / GB,
            "redis_put_gbps": cell.total_bytes / median(put_s) / GB,
            "get_speedup_over_redis": median_ratio(get_s, cell.get.wall_s),
            "put_speedup_over_redis": median_ratio(put_s, cell.put.wall_s),
        }

    def _latencies(self, cell: Cell) -> Values:
        chain = chain_hashes("lookup", _LOOKUP_BLOCKS)
        small = Pool(_LOOKUP_BLOCKS, _LOOKUP_BLOCK_BYTES)
        assert self._client.put(cell.namespace, chain, small.views).stored == len(chain)
        one, buffer = cell.hashes[:1], cell.destination.views[:1]

        def lookup() -> None:
            assert self._client.lookup(cell.namespace, chain).ready_blocks == len(chain)

        def get_one() -> None:
            with self._client.get(cell.namespace, one) as blocks:
                assert len(blocks) == 1

        def copy_one() -> None:
            assert self._client.get_into(cell.namespace, one, buffer) == 1

        return {
            "lookup512_p50_us": p50_us(call_latencies(lookup, 400)),
            "get1_p50_us": p50_us(call_latencies(get_one, 1000)),
            "get1_copy_p50_us": p50_us(call_latencies(copy_one, 400)),
        }

    def _inline(self, cell: Cell) -> Values:
        blocks = min(128, len(cell.hashes))
        hashes = chain_hashes("inline", blocks)
        source, destination = Pool(blocks, cell.block_bytes), Pool(blocks, cell.block_bytes)
        source.fill(seed=3)
        client = InlineClient(self._daemon.grpc_target, NamespaceSpec(model="bench.transfer", extra="inline"))
        put_s: list[float] = []
        get_s: list[float] = []
        for _ in range(min(3, self._repeats)):
            assert client.put(hashes, source, put_s) == blocks
            destination.clear()
            assert client.get(hashes, destination, get_s) == source.size_bytes
            self._wrong_blocks += destination.wrong_blocks(source)
            client.delete(hashes)
        client.close()
        per_byte = median(get_s) / source.size_bytes
        return {
            "grpc_inline_get_gbps": 1 / per_byte / GB,
            "grpc_inline_put_gbps": source.size_bytes / median(put_s) / GB,
            "get_speedup_over_grpc_inline": per_byte / (median(cell.get.wall_s) / cell.total_bytes),
        }

    def _clients(self, cell: Cell, clients: int) -> Values:
        task = Task(
            address=self._daemon.address,
            spec=NamespaceSpec(model="bench.transfer", extra=str(cell.block_bytes)).SerializeToString(),
            hashes=cell.hashes[: len(cell.hashes) // 2],
            block_bytes=cell.block_bytes,
            fill_seed=cell.block_bytes,
            repeats=self._repeats,
        )
        together = aggregate(task, clients)
        self._wrong_blocks += together.wrong_blocks
        self._missed_blocks += together.missed_blocks
        return {
            f"get_gbps_clients_{clients}": together.get_gbps,
            f"memmove_gbps_clients_{clients}": together.memmove_gbps,
            f"get_ratio_clients_{clients}": together.memmove_gbps / together.get_gbps,
        }


def main() -> int:
    """Entry point; exit status 1 where a block had wrong bytes."""
    built = parser("bench.transfer", "Blocks between the DRAM tier and a client, beside plain memmove.", FIGURES)
    built.add_argument("--repeats", type=int, default=9, help="interleaved repeats of every path")
    built.add_argument("--mib", type=int, default=256, help="MiB moved in each repeat")
    built.add_argument("--no-redis", action="store_true", help="leave the Redis comparison out")
    arguments = built.parse_args()
    total_bytes = arguments.mib * MIB
    load = ForeignLoad()
    settings = {
        "dram.capacity_bytes": str(3 * total_bytes + 512 * MIB),
        "limits.staging_bytes_per_session": str(2 * total_bytes + 64 * MIB),
    }
    with (
        DaemonProcess(settings) as daemon,
        Client(daemon.address, name="bench.transfer", timeout_s=60.0, connect_timeout_s=60.0) as client,
        Client(
            daemon.address,
            name="bench.stage",
            staging_bytes=total_bytes + 32 * MIB,
            timeout_s=60.0,
            connect_timeout_s=60.0,
        ) as stager,
    ):
        values = TransferBench(daemon, client, stager, arguments).run()
    values = {**values, "foreign_cpu_share": load.share()}
    emit(values, FIGURES, arguments.json)
    return int(bool(values["wrong_blocks"]))


if __name__ == "__main__":
    run(main)
