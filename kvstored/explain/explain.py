"""Where a block is, or why it is not: the answer to "why was this a miss"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from kvstored.catalog.catalog import DEAD, READY, Entry, Space
from kvstored.catalog.history import RECYCLED, Gone, Reason
from kvstored.explain.difference import Difference, differences, told
from kvstored.store.parts import Parts
from kvstored.tiers.base import Record

NEVER: Final = "it was not stored since the daemon started, or so long ago that the memory of it is gone"


class Near(msgspec.Struct):
    """Another namespace of the same tenant, and in what it differs from the one that was asked about."""

    space: Space
    differences: list[Difference]


class Answer(msgspec.Struct):
    """A verdict (see `ExplainReply`), one sentence, every copy that there is, and where else the block is."""

    verdict: str
    detail: str
    entries: list[Entry]
    records: list[tuple[Space, Record]]
    nearest: Near | None = None


async def explain(parts: Parts, spaces: Sequence[Space], wanted: Space | None, hash_: bytes) -> Answer:
    """Look for a hash in the caller's spaces; `wanted` is the one that a reader would use (None: any)."""
    if wanted is not None:
        spaces = [space for space in spaces if space.tenant == wanted.tenant]
    moved = True
    while moved:  # down, or gone, while the index was asked: its slot may be another's by now
        entries = [entry for space in spaces if (entry := space.entries.get(hash_)) is not None]
        records = await _records(parts, spaces, hash_)
        moved = any(entry.state == DEAD for entry in entries)
    here = [entry for entry in entries if wanted in (None, entry.pool.space)]
    below = [space for space, _ in records if wanted in (None, space)]
    if any(entry.state == READY for entry in here):
        return Answer("hit", "it is in DRAM" + (" and on NVMe" if below else ""), entries, records)
    if here:
        return Answer("pending", "it is being written, brought up, or verified after a restart", entries, records)
    if below:
        return Answer("hit", "it is on NVMe: a get or a prefetch brings it up", entries, records)
    elsewhere = [entry.pool.space for entry in entries] + [space for space, _ in records]
    near = nearest(wanted, elsewhere) if wanted is not None else None
    verdict, detail = await _missing(parts, spaces if wanted is None else [wanted], near, hash_)
    return Answer(verdict, detail, entries, records, near)


async def _in_past_epoch(parts: Parts, space: Space, hash_: bytes) -> bool:
    """Whether no key reaches it any more, and its bytes are still to be taken away."""
    old = [past for past in parts.catalog.retired if past.namespace.digest == space.namespace.digest]
    below = [Space(space.namespace, digest) for digest in parts.epochs.now.past_digests(space.namespace)]
    return any(hash_ in past.entries for past in old) or bool(await _records(parts, below, hash_))


def nearest(ours: Space, others: Iterable[Space]) -> Near | None:
    """The one that differs in the fewest fields."""
    found = [Near(other, differences(ours.namespace, other.namespace)) for other in others if other is not ours]
    return min(found, key=lambda near: len(near.differences), default=None)


async def _records(parts: Parts, spaces: Sequence[Space], hash_: bytes) -> list[tuple[Space, Record]]:
    if parts.below is None:
        return []
    found: list[tuple[Space, Record]] = []
    for space in spaces:
        found += [(space, record) for record in (await parts.below.records(space, [hash_])).values()]
    return found


async def _missing(parts: Parts, spaces: Sequence[Space], near: Near | None, hash_: bytes) -> tuple[str, str]:
    stored = f"the nearest namespace that has this block differs in: {told(near.differences)}" if near else ""
    for space in spaces:
        gone = parts.history.why(space, hash_) or await _evicted_before(parts, space, hash_)
        if gone is not None:
            return gone.reason, describe(gone) + (f"; {stored}" if stored else "")
        if await _in_past_epoch(parts, space, hash_):
            return Reason.EPOCH, "it was stored before the last epoch bump of its model, and is being taken away"
    return (Reason.NAMESPACE_DIFFERS, stored) if stored else (Reason.NEVER_STORED, NEVER)


def describe(gone: Gone) -> str:
    """One sentence: what became of a block, when, and by which rule."""
    when = datetime.fromtimestamp(gone.wall_s, UTC).isoformat(timespec="seconds")
    return f"{_PAST[gone.reason]} at {when}" + (f": {gone.rule}" if gone.rule else "")


async def _evicted_before(parts: Parts, space: Space, hash_: bytes) -> Gone | None:
    """What the lower tier has on record, also of what an earlier daemon evicted."""
    wall_s = await parts.below.tier.evicted_s(space.digest, hash_) if parts.below is not None else None
    return None if wall_s is None else Gone(Reason.EVICTED, RECYCLED, wall_s)


_PAST = {
    **{reason: f"it was {reason}" for reason in Reason},
    Reason.EXPIRED: "it expired",
    Reason.EPOCH: "it was left behind by an epoch bump",
    Reason.QUOTA: "it went, or was not taken, by its tenant's quota",
    Reason.CORRUPT: "it was found corrupt and dropped",
    Reason.PUT_REFUSED: "it was not stored: its put was refused",
    Reason.UNKNOWN: "it is gone, for a reason that is not remembered,",
}
