"""What the verbs answer."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstored_client.errors import KVStoredClientError


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
    # Load or recompute: the daemon's estimates for prefix_blocks; 0 where no prefill rate was given.
    load_s: float = 0.0
    recompute_s: float = 0.0
    paying_blocks: int = 0  # the longest leading run that is loaded no later than computed; without a rate, all
    # What comes up from NVMe because of this lookup, and its name for `cancel_prefetch`; 0: nothing.
    queued_blocks: int = 0
    prefetch_id: int = 0

    @property
    def pays(self) -> bool:
        """Whether loading all that was found is no slower than computing it, as far as is known."""
        return 0 < self.prefix_blocks == self.paying_blocks


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of each block of a put. `outcomes`: HIT means readable now."""

    stored: int = 0  # written by this call
    existing: int = 0  # were there already
    pending: int = 0  # another session is writing them
    refused: int = 0  # no room, throttled, not durable as asked, or no daemon
    outcomes: list[Outcome] = field(default_factory=list)
    durable: int = 0  # of stored and existing: known to be on NVMe; all of them, or none where it was not asked for
    # What ended the put where it was not these outcomes: the daemon refused it, or does not answer.
    error: KVStoredClientError | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        final: Sequence[Outcome],
        stored: int,
        *,
        durable: bool = False,
        error: KVStoredClientError | None = None,
    ) -> PutResult:
        """Counts from the final outcomes, `stored` of whose hits this call wrote."""
        if error is not None:
            # Frames hold the caller's buffers, which a result must not keep.
            error.with_traceback(None)
            error.__context__ = error.__cause__ = None
        hits, pending = final.count(Outcome.HIT), final.count(Outcome.PENDING)
        refused = len(final) - hits - pending
        return cls(stored, hits - stored, pending, refused, list(final), hits if durable else 0, error)


@dataclass(frozen=True, slots=True)
class HintResult:
    """What became of a hint; all 0 where the daemon does not answer or does not know hints."""

    blocks: int = 0  # in DRAM, with what they hang on
    applied: int = 0  # of these: it has an effect on
    hard_pinned_bytes: int = 0  # of the tenant, now


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
    transfers_failed: int = 0  # loads and stores of a GPU's memory in which a copy failed
    late_replies: int = 0  # replies that came after their call had given up
    connects: int = 0
    reconnects: int = 0
    blocks_delivered: int = 0
    bytes_delivered: int = 0
    blocks_stored: int = 0
    bytes_stored: int = 0
