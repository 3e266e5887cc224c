"""What the verbs answer."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final


class Outcome(enum.IntEnum):
    """What became of one block, or what ended a run of blocks. Numbers are those of the protocol."""

    MISS = 0
    HIT = 1
    PENDING = 2  # being written or promoted: wait or ask again
    THROTTLED = 3  # the daemon protects itself: treat as a miss, it is not one
    NO_ROOM = 4  # no room, and waiting will not help
    RESERVED = 5  # a slot is held for this block until commit or abort
    NOT_DURABLE = 6  # readable, but not on NVMe as its put asked


# A newer daemon's outcome that this client does not know is a miss.
_BY_NUMBER: Final = tuple(Outcome(n) if n in set(Outcome) else Outcome.MISS for n in range(256))


def outcome(number: int) -> Outcome:
    """The outcome with this number; MISS for one that this version does not know."""
    return _BY_NUMBER[number] if 0 <= number < len(_BY_NUMBER) else Outcome.MISS


def outcomes(packed: bytes | bytearray) -> list[Outcome]:
    """The outcomes of a packed field, in order."""
    return [_BY_NUMBER[number] for number in packed]


@dataclass(frozen=True, slots=True)
class LookupResult:
    """How long a prefix is stored, and where. Counts are leading blocks."""

    prefix_blocks: int = 0  # stored or pending
    ready_blocks: int = 0  # stored
    dram_blocks: int = 0  # of prefix_blocks: in DRAM now
    nvme_blocks: int = 0  # of prefix_blocks: on NVMe only
    pending_blocks: int = 0  # of prefix_blocks: being written or promoted
    outcome: Outcome = Outcome.MISS  # what ended the run; HIT: nothing, all were found


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of each block of a put. `outcomes`: HIT means readable now."""

    stored: int = 0  # written by this call
    existing: int = 0  # were there already
    pending: int = 0  # another session is writing them
    refused: int = 0  # no room, throttled, not durable as asked, or no daemon
    outcomes: list[Outcome] = field(default_factory=list)
    durable: int = 0  # of stored and existing: known to be on NVMe; all of them, or none where it was not asked for

    @classmethod
    def of(cls, final: Sequence[Outcome], stored: int, *, durable: bool = False) -> PutResult:
        """Counts from the final outcomes, `stored` of whose hits this call wrote."""
        hits, pending = final.count(Outcome.HIT), final.count(Outcome.PENDING)
        refused = len(final) - hits - pending
        return cls(stored, hits - stored, pending, refused, list(final), hits if durable else 0)


@dataclass(frozen=True, slots=True)
class PrefetchStatus:
    """Progress of a prefetch, in blocks."""

    done: bool = True
    ready_blocks: int = 0  # promoted so far
    failed_blocks: int = 0  # will not be: no room, unreadable, cancelled, connection lost
    total_blocks: int = 0


@dataclass(slots=True)
class ClientStats:
    """What a client did and what failed open. Counted without locks: near enough under threads."""

    calls: int = 0
    misses_unavailable: int = 0  # calls that answered a miss because no daemon did
    timeouts: int = 0
    refused: int = 0  # the daemon answered with an error
    throttled: int = 0
    deliveries_lost: int = 0  # the connection ended during a copy: reported as a miss
    late_replies: int = 0  # replies that came after their call had given up
    connects: int = 0
    reconnects: int = 0
    blocks_delivered: int = 0
    bytes_delivered: int = 0
    blocks_stored: int = 0
    bytes_stored: int = 0
