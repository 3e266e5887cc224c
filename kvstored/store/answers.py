"""What reads answer with, before it is a message."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec
from kvstored_proto import frames

from kvstored.catalog.catalog import Entry, Space
from kvstored.catalog.known import Places
from kvstored.catalog.leases import Lease
from kvstored.policy.cost import Estimate

# Bits of `ContainsReply.tiers`.
IN_DRAM: Final = 1
ON_NVME: Final = 2


class FoundRun(msgspec.Struct):
    """How far a chain is stored: see `LookupReply`."""

    prefix_blocks: int
    ready_blocks: int
    dram_blocks: int
    nvme_blocks: int
    pending_blocks: int
    next: int


class Looked(msgspec.Struct):
    """A lookup that was asked for more than where the blocks are."""

    run: FoundRun
    estimate: Estimate | None = None
    prefetch_id: int = 0
    queued_blocks: int = 0


class Held(msgspec.Struct):
    """What a get holds: leading blocks, one lease per space, and what ended the run."""

    blocks: int
    next: int
    leases: list[Lease]


def places_of(space: Space, entries: list[Entry]) -> Places:
    """Where some entries of a space lie."""
    known = space.known
    if known is not None and known.entries is entries and known.places is not None:
        return known.places
    slots = array("Q", [entry.slot for entry in entries])
    places = Places(slots, runs_of(slots))
    if known is not None and known.entries is entries:
        known.places = places
    return places


def runs_of(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Slots as runs of neighbours: the first one, and how many."""
    return [(slots[first], end - first) for first, end in frames.slot_runs(slots)]
