"""The writing verbs, once for both clients (see `effects`): reserve, fill staging, commit.

`put` works in batches of about 4 MiB: while the daemon copies and hashes one, the next is copied
into staging. A region of the ring is free again when the reply to its commit has come, and not
before, however long ago its caller gave up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored_client import buffers as memory
from kvstored_client.connection import Connection, Ticket
from kvstored_client.core import Core
from kvstored_client.effects import CONNECT, Sleep, Verb, Work, call, finish
from kvstored_client.errors import KVStoredClientError, Unavailable
from kvstored_client.keys import Packed
from kvstored_client.namespace import Durability, Namespace
from kvstored_client.results import Outcome, PutResult, outcomes
from kvstored_client.staging import Region, StagingRing, aligned
from kvstored_client.verbs import check_knows_durability, check_seeded, leading, milliseconds, namespace_ids

BATCH_BYTES: Final = 4 << 20  # two of them in flight stay in cache until the daemon has taken them
COMMITS_IN_FLIGHT: Final = 2
DURABLE_COMMITS_IN_FLIGHT: Final = 16  # they wait for NVMe, and those that wait together share one write there
DURABLE_TIMEOUT_S: Final = 10.0  # on top of the usual: what a slow drive may take
_DURABLE_PAUSE_S: Final = 0.05
_DURABILITIES: Final = {None: pb.DURABILITY_UNSPECIFIED, "memory": pb.DURABILITY_MEMORY, "nvme": pb.DURABILITY_NVME}
_PAUSE_MIN_S: Final = 0.001
_PAUSE_MAX_S: Final = 0.05


@dataclass(slots=True)
class Batch:
    """Consecutive reserved blocks that lie in one region of the ring."""

    indices: list[int]  # in the reserve call
    region: Region
    offsets: list[int]  # in the ring


@dataclass(slots=True)
class Reservation:
    """Slots that are held for this session's blocks, and what has become of each."""

    connection: Connection
    reservation_id: int
    sizes_bytes: Sequence[int]
    final: list[Outcome]
    retry_after_s: float = 0.0
    durable: bool = False
    stored: int = 0
    stored_bytes: int = 0
    in_flight: deque[tuple[Ticket, Batch]] = field(default_factory=deque)

    @property
    def ring(self) -> StagingRing:
        """The session's staging. Raises Unavailable where the daemon granted none."""
        if self.connection.staging is None:
            raise Unavailable("the daemon granted no staging memory: nothing can be put")
        return self.connection.staging

    @property
    def reserved(self) -> list[int]:
        """Indices of the blocks that still want their bytes."""
        return [i for i, each in enumerate(self.final) if each is Outcome.RESERVED]

    def settle(self) -> None:
        """Whatever is unfinished ends here: replies nobody waits for, slots nobody fills."""
        for ticket, _ in self.in_flight:
            self.connection.abandon(ticket)
        self.in_flight.clear()
        self.abort(self.reserved, Outcome.MISS)

    def abort(self, indices: list[int], become: Outcome) -> None:
        """Give these slots back."""
        if not indices:
            return
        for i in indices:
            self.final[i] = become
        self.connection.post(pb.OPERATION_ABORT, pb.AbortRequest(reservation_id=self.reservation_id, indices=indices))


def reserve(
    core: Core,
    namespace: Namespace,
    hashes: Packed,
    sizes_bytes: Sequence[int],
    parent: bytes,
    wait_s: float,
    durability: Durability | None,
) -> Verb[Reservation]:
    """Ask for slots, for no more blocks than one call carries. Raises Refused where durability cannot be had."""
    check_seeded(hashes)
    connection = yield CONNECT
    durable = (durability or namespace.durability) == "nvme"
    if durable:
        check_knows_durability(connection)
    (namespace_id,) = yield from namespace_ids(core, connection, [namespace])
    equal = min(sizes_bytes) == max(sizes_bytes)
    request = pb.ReserveRequest(
        namespace_id=namespace_id,
        hashes=hashes.data,
        hash_bytes=hashes.hash_bytes,
        parent=parent,
        block_bytes=sizes_bytes[0] if equal else 0,
        sizes_bytes=() if equal else sizes_bytes,
        wait_ms=milliseconds(wait_s),
        durability=_DURABILITIES[durability],
    )
    late = partial(_abort_late, connection)
    limit_s = core.timeout_s(wait_s) + (DURABLE_TIMEOUT_S if durable else 0.0)
    reply = yield from call(connection, pb.OPERATION_RESERVE, request, pb.ReserveReply, limit_s, late)
    if len(reply.outcomes) != hashes.length:
        _abort_late(connection, reply.SerializeToString())
        raise Unavailable(f"{len(reply.outcomes)} outcomes for {hashes.length} blocks")
    final, retry_after_s = outcomes(reply.outcomes), reply.retry_after_ms / 1000.0
    return Reservation(connection, reply.reservation_id, sizes_bytes, final, retry_after_s, durable)


def _abort_late(connection: Connection, body: bytes) -> None:
    reservation_id = pb.ReserveReply.FromString(body).reservation_id
    if reservation_id:
        connection.post(pb.OPERATION_ABORT, pb.AbortRequest(reservation_id=reservation_id))


def batches(
    indices: Iterable[int], sizes_bytes: Sequence[int], ring: StagingRing, batch_bytes: int = BATCH_BYTES
) -> Iterator[list[int]]:
    """Cut into lists of about `batch_bytes`, and of no more than a quarter of a small ring: several are in flight."""
    limit = min(batch_bytes, ring.size_bytes // 4)
    batch: list[int] = []
    filled = 0
    for i in indices:
        size = aligned(sizes_bytes[i])
        if batch and filled + size > limit:
            yield batch
            batch, filled = [], 0
        batch.append(i)
        filled += size
    if batch:
        yield batch


def place(indices: list[int], sizes_bytes: Sequence[int], ring: StagingRing) -> Batch | None:
    """Room in the ring for these blocks, or None when there is none now."""
    strides = [aligned(sizes_bytes[i]) for i in indices]
    region = ring.take(sum(strides))
    if region is None:
        return None
    offsets, offset = [], region.offset
    for stride in strides:
        offsets.append(offset)
        offset += stride
    return Batch(indices, region, offsets)


def start_commit(reservation: Reservation, batch: Batch) -> None:
    """Hand a filled batch to the daemon."""
    request = pb.CommitRequest(
        reservation_id=reservation.reservation_id, indices=batch.indices, staging_offsets=batch.offsets
    )
    settled = partial(reservation.ring.give_back, batch.region)
    ticket = reservation.connection.start(pb.OPERATION_COMMIT, request, settled=settled)
    reservation.in_flight.append((ticket, batch))
    for i in batch.indices:
        reservation.final[i] = Outcome.MISS  # until the reply says otherwise


def collect(core: Core, reservation: Reservation, at_most: int) -> Verb[None]:
    """Wait until no more than `at_most` commits are in flight."""
    limit_s = core.timeout_s() + (DURABLE_TIMEOUT_S if reservation.durable else 0.0)
    while len(reservation.in_flight) > at_most:
        ticket, batch = reservation.in_flight.popleft()
        reply = yield from finish(reservation.connection, ticket, pb.CommitReply, limit_s)
        for i, each in zip(batch.indices, outcomes(reply.outcomes), strict=False):
            reservation.final[i] = each
            if each is Outcome.HIT:
                reservation.stored += 1
                reservation.stored_bytes += reservation.sizes_bytes[i]


# ---- put ----


@dataclass(slots=True)
class _Progress:
    final: list[Outcome]
    durability: Durability | None
    stored: int = 0


def put(
    core: Core,
    namespace: Namespace,
    hashes: Packed,
    source: memory.Spans,
    parent: bytes,
    wait_s: float,
    durability: Durability | None,
) -> Verb[PutResult]:
    """Store blocks. What was stored before a failure counts; the rest is refused."""
    progress = _Progress([Outcome.MISS] * hashes.length, durability)
    try:
        yield from _put_parts(core, namespace, hashes, source, parent, wait_s, progress)
    except KVStoredClientError as error:
        core.failed_open(error)
    durable = (durability or namespace.durability) == "nvme"
    return PutResult.of(progress.final, progress.stored, durable=durable)


def _put_parts(
    core: Core,
    namespace: Namespace,
    hashes: Packed,
    source: memory.Spans,
    parent: bytes,
    wait_s: float,
    progress: _Progress,
) -> Verb[None]:
    """One reservation after the other; throttled blocks again, while `wait_s` lasts."""
    deadline_s = time.monotonic() + wait_s
    start = 0
    while start < hashes.length:
        connection: Connection = yield CONNECT
        part = leading(connection, hashes.part(start, hashes.length))
        end = start + part.length
        left_s = max(0.0, deadline_s - time.monotonic())
        before = hashes.one(start - 1) if start else parent
        sizes_bytes, durability = source.sizes_bytes[start:end], progress.durability
        reservation = yield from reserve(core, namespace, part, sizes_bytes, before, left_s, durability)
        try:
            yield from _fill(core, reservation, source.addresses[start:end])
        finally:
            reservation.settle()
            progress.final[start:end] = reservation.final
            progress.stored += reservation.stored
            core.stats.blocks_stored += reservation.stored
            core.stats.bytes_stored += reservation.stored_bytes
        again = _first_to_retry(core, reservation)
        if again is None:
            start = end
            continue
        pause_s = max(_DURABLE_PAUSE_S if reservation.durable else _PAUSE_MIN_S, reservation.retry_after_s)
        if time.monotonic() + pause_s > deadline_s:
            return
        yield Sleep(pause_s)
        start += again


def _first_to_retry(core: Core, reservation: Reservation) -> int | None:
    final = reservation.final
    core.stats.throttled += Outcome.THROTTLED in final
    return next((i for i, each in enumerate(final) if each in (Outcome.THROTTLED, Outcome.NOT_DURABLE)), None)


def _fill(core: Core, reservation: Reservation, addresses: Sequence[int]) -> Verb[None]:
    """Copy into staging and commit, batch by batch."""
    reserved = reservation.reserved
    if not reserved:
        return
    ring = reservation.ring
    in_flight = DURABLE_COMMITS_IN_FLIGHT if reservation.durable else COMMITS_IN_FLIGHT
    for indices in batches(reserved, reservation.sizes_bytes, ring):
        batch = yield from _room(core, reservation, indices)
        if batch is None:
            reservation.abort(reservation.reserved, Outcome.THROTTLED)
            break
        copied = False
        try:
            size_bytes = sum(reservation.sizes_bytes[i] for i in indices)
            yield Work(partial(_copy_in, ring, batch, addresses, reservation.sizes_bytes), size_bytes)
            copied = True
        finally:
            if not copied:
                ring.give_back(batch.region)
        start_commit(reservation, batch)
        yield from collect(core, reservation, in_flight - 1)
    yield from collect(core, reservation, 0)


def _room(core: Core, reservation: Reservation, indices: list[int]) -> Verb[Batch | None]:
    """Room in the ring, which other threads' puts may fill for a moment; None where it does not come."""
    give_up_s = time.monotonic() + core.timeout_s()
    pause_s = _PAUSE_MIN_S
    while True:
        batch = place(indices, reservation.sizes_bytes, reservation.ring)
        if batch is not None:
            return batch
        if reservation.in_flight:
            yield from collect(core, reservation, len(reservation.in_flight) - 1)
            continue
        too_large = sum(aligned(reservation.sizes_bytes[i]) for i in indices) > reservation.ring.size_bytes
        if too_large or time.monotonic() >= give_up_s:
            return None
        yield Sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def _copy_in(ring: StagingRing, batch: Batch, addresses: Sequence[int], sizes_bytes: Sequence[int]) -> None:
    mapping = ring.mapping
    memory.copy_runs(
        memory.merge(
            (mapping.address + offset, addresses[i], sizes_bytes[i])
            for i, offset in zip(batch.indices, batch.offsets, strict=True)
        )
    )
