"""Blocks that are committed together, when all of them lie in staging: puts with a deadline, and stores by layers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from kvstored_client import buffers as memory
from kvstored_client.core import Core
from kvstored_client.deadline import Deadline
from kvstored_client.effects import Sleep, Verb, Work
from kvstored_client.results import Outcome
from kvstored_client.staged import BATCH_BYTES, COMMITS_IN_FLIGHT
from kvstored_client.staging import StagingRing, aligned
from kvstored_client.writing import Batch, Reservation, batches, commit_all, place

_PAUSE_S: Final = 0.001


def most_blocks(sizes_bytes: Sequence[int], ring: StagingRing) -> int:
    """How many leading blocks are held together: what half of the ring takes, and one at least."""
    left_bytes = ring.size_bytes // 2
    for count, size in enumerate(sizes_bytes):
        left_bytes -= aligned(size)
        if left_bytes < 0:
            return max(1, count)
    return len(sizes_bytes)


def room_now(
    indices: Sequence[int], sizes_bytes: Sequence[int], ring: StagingRing, spare_bytes: int = 0
) -> list[Batch]:
    """Room for as many leading ones of these blocks as there is, `spare_bytes` left to others."""
    parts = []
    for some in batches(indices, sizes_bytes, ring, BATCH_BYTES):
        part = place(some, sizes_bytes, ring, spare_bytes)
        if part is None:
            break
        parts.append(part)
    return parts


def give_back(ring: StagingRing, parts: Iterable[Batch]) -> None:
    """Return room that is not handed to the daemon."""
    for part in parts:
        ring.give_back(part.region)


def fill(core: Core, reservation: Reservation, source: memory.Place, deadline: Deadline) -> Verb[None]:
    """Copy all of the reserved blocks into staging, then commit them; none where the deadline passes before."""
    if not reservation.reserved:
        return
    ring, parts = reservation.ring, (yield from _room(core, reservation, deadline))
    try:
        for part in parts:
            if deadline.passed():
                return
            read = partial(_copy_in, ring, part, source)
            yield Work(read, part.region.size_bytes)
        if parts and not deadline.passed():
            yield from commit_all(core, reservation, parts, COMMITS_IN_FLIGHT)
    finally:
        give_back(ring, parts)


def _room(core: Core, reservation: Reservation, deadline: Deadline) -> Verb[list[Batch]]:
    """For all of them. Holds none while it waits, or two could wait for each other; none: it does not come in time."""
    indices, give_up_s = reservation.reserved, time.monotonic() + core.timeout_s()
    while True:
        parts = room_now(indices, reservation.sizes_bytes, reservation.ring)
        if sum(len(part.indices) for part in parts) == len(indices):
            return parts
        give_back(reservation.ring, parts)
        if time.monotonic() >= give_up_s:
            reservation.abort(indices, Outcome.THROTTLED)
            return []
        if deadline.passed():
            return []
        yield Sleep(_PAUSE_S)


def _copy_in(ring: StagingRing, batch: Batch, source: memory.Place) -> None:
    mapping = ring.mapping
    source.read(batch.indices, [mapping.address + offset for offset in batch.offsets])
