"""Several client processes at once: what they get together, beside what they memmove together.

Each client is a spawned process with its own buffers; all read one resident chain. Every round
starts at a barrier, alternates memmove and get, and counts from the first start to the last end.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any, Final, NamedTuple

from kvstored_client import Client, NamespaceSpec

from bench.buffers import Pool, addresses_of
from bench.ceiling import memmove_blocks
from bench.common import GB, median

_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Task:
    """What every client of a round does."""

    address: str
    spec: bytes  # a serialized NamespaceSpec: messages do not pickle
    hashes: Sequence[bytes]
    block_bytes: int
    fill_seed: int
    repeats: int


class Span(NamedTuple):
    """When one client started and ended each half of a round, and what it was delivered."""

    memmove_start_s: float
    memmove_end_s: float
    get_start_s: float
    get_end_s: float
    missed_blocks: int
    wrong_blocks: int


class Aggregate(NamedTuple):
    """What the clients of all rounds did together."""

    get_gbps: float
    memmove_gbps: float
    missed_blocks: int
    wrong_blocks: int


def aggregate(task: Task, clients: int) -> Aggregate:
    """Run so many clients and add up what they do."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(clients), context.Queue()
    processes = [context.Process(target=_client, args=(task, barrier, queue), daemon=True) for _ in range(clients)]
    for process in processes:
        process.start()
    try:
        spans: list[list[Span]] = [queue.get(timeout=_TIMEOUT_S) for _ in processes]
    finally:
        for process in processes:
            process.join(1.0)
            process.kill()
    return _figures(spans, clients * len(task.hashes) * task.block_bytes)


def _figures(spans: Sequence[Sequence[Span]], total_bytes: int) -> Aggregate:
    rounds = list(zip(*spans, strict=True))
    get_s = [max(s.get_end_s for s in r) - min(s.get_start_s for s in r) for r in rounds]
    memmove_s = [max(s.memmove_end_s for s in r) - min(s.memmove_start_s for s in r) for r in rounds]
    every = [span for each in spans for span in each]
    return Aggregate(
        get_gbps=total_bytes / median(get_s) / GB,
        memmove_gbps=total_bytes / median(memmove_s) / GB,
        missed_blocks=sum(span.missed_blocks for span in every),
        wrong_blocks=sum(span.wrong_blocks for span in every),
    )


def _client(task: Task, barrier: Barrier, queue: Any) -> None:
    source = Pool(len(task.hashes), task.block_bytes, seed=1)
    source.fill(seed=task.fill_seed)
    destination = Pool(len(task.hashes), task.block_bytes, seed=2)
    with Client(
        task.address, name="bench.clients", staging_bytes=1 << 20, timeout_s=_TIMEOUT_S, connect_timeout_s=_TIMEOUT_S
    ) as client:
        namespace = client.namespace(NamespaceSpec.FromString(task.spec))
        with client.get(namespace, task.hashes) as blocks:
            assert len(blocks) == len(task.hashes), f"{len(blocks)} of {len(task.hashes)} blocks are resident"
            mapped = addresses_of(blocks[index] for index in range(len(blocks)))
            rounds = [_round(task, client, mapped, source, destination, barrier) for _ in range(task.repeats)]
    queue.put(rounds)


def _round(
    task: Task, client: Client, mapped: Sequence[int], source: Pool, destination: Pool, barrier: Barrier
) -> Span:
    namespace = client.namespace(NamespaceSpec.FromString(task.spec))
    destination.clear()  # as before the get: both find the caches in one state
    barrier.wait(_TIMEOUT_S)
    memmove_start_s = time.monotonic()
    memmove_blocks(destination.addresses, mapped, task.block_bytes)
    memmove_end_s = time.monotonic()
    destination.clear()
    barrier.wait(_TIMEOUT_S)
    get_start_s = time.monotonic()
    delivered = client.get_into(namespace, task.hashes, destination.spans())
    get_end_s = time.monotonic()
    return Span(
        memmove_start_s,
        memmove_end_s,
        get_start_s,
        get_end_s,
        missed_blocks=len(task.hashes) - delivered,
        wrong_blocks=destination.wrong_blocks(source, delivered),
    )
