"""Where a block is, or why it is not: the answer to "why was this a miss"."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from kvstored.catalog import READY, Entry, Space
from kvstored.history import Gone
from kvstored.parts import Parts
from kvstored.tiers.base import Record


class Answer(msgspec.Struct):
    """A verdict (see `ExplainReply`), one sentence, and every copy that there is."""

    verdict: str
    detail: str
    entries: list[Entry]
    records: list[tuple[Space, Record]]


async def explain(parts: Parts, spaces: Sequence[Space], wanted: Space | None, hash_: bytes) -> Answer:
    """Look for a hash in the caller's spaces; `wanted` is the one that a reader would use (None: any)."""
    entries = [entry for space in spaces if (entry := space.entries.get(hash_)) is not None]
    records = await _records(parts, spaces, hash_)
    here = [entry for entry in entries if wanted in (None, entry.pool.space)]
    below = [space for space, _ in records if wanted in (None, space)]
    if any(entry.state == READY for entry in here):
        verdict, detail = "hit", "it is in DRAM" + (" and on NVMe" if below else "")
    elif here:
        verdict, detail = "pending", "it is being written, brought up, or verified after a restart"
    elif below:
        verdict, detail = "hit", "it is on NVMe: a get or a prefetch brings it up"
    else:
        verdict, detail = await _missing(parts, spaces, wanted, hash_, entries, records)
    return Answer(verdict, detail, entries, records)


async def _records(parts: Parts, spaces: Sequence[Space], hash_: bytes) -> list[tuple[Space, Record]]:
    if parts.below is None:
        return []
    found = []
    for space in spaces:
        (record,) = await parts.below.tier.find(space.tenant, space.digest, [hash_], prefix=False)
        if record is not None:
            parts.below.tier.unpin([record])
            found.append((space, record))
    return found


async def _missing(
    parts: Parts,
    spaces: Sequence[Space],
    wanted: Space | None,
    hash_: bytes,
    entries: Sequence[Entry],
    records: Sequence[tuple[Space, Record]],
) -> tuple[str, str]:
    for space in spaces if wanted is None else [wanted]:
        gone = parts.history.why(space.digest, hash_) or await _evicted_before(parts, space, hash_)
        if gone is not None:
            when = datetime.fromtimestamp(gone.wall_s, UTC).isoformat(timespec="seconds")
            return gone.verdict, f"it was {gone.verdict} at {when}: {gone.rule}"
    elsewhere = [entry.pool.space for entry in entries] + [space for space, _ in records]
    if wanted is not None and elsewhere:
        return "namespace_differs", f"it is stored, but in another namespace: {difference(wanted, elsewhere[0])}"
    return "never_stored", "it was not stored since the daemon started, or so long ago that the memory of it is gone"


async def _evicted_before(parts: Parts, space: Space, hash_: bytes) -> Gone | None:
    """What the lower tier has on record, also of what an earlier daemon evicted."""
    wall_s = await parts.below.tier.evicted_s(space.digest, hash_) if parts.below is not None else None
    return None if wall_s is None else Gone("evicted", "the oldest extent on NVMe was recycled", wall_s)


def difference(ours: Space, theirs: Space) -> str:
    """Which fields of two namespaces differ, and how."""
    a, b = ours.namespace.fields, theirs.namespace.fields
    names = sorted({*a, *b})
    return "; ".join(f"{n} is {a.get(n, 'unset')}, there {b.get(n, 'unset')}" for n in names if a.get(n) != b.get(n))
