"""Counting misses by their reason, and saying where a namespace stores much for little.

On the way of every lookup and get, so one look a call: only the first missing block is asked for, in the memory
of the process. What only the record on NVMe knows counts as never stored; `explain` asks that too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kvstored.catalog.catalog import Catalog, Space
from kvstored.catalog.history import Reason
from kvstored.explain.difference import differences, same_model, shard_of, told
from kvstored.explain.hit_rates import Low
from kvstored.store.parts import Parts

LOG_INTERVAL_S: Final = 3600.0

_log = logging.getLogger(__name__)


class Misses:
    """What reads and puts report."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._stats = parts.stats
        self._history = parts.history

    def looked_up(self, spaces: Sequence[Space], hashes: Sequence[bytes], found: int) -> None:
        """A lookup that found the leading `found` blocks. Of the shards of a model the first stands for all."""
        stats = self._stats[spaces[0].tenant]
        stats.blocks_looked_up += len(hashes)
        stats.blocks_found += found
        stats.rates.looked_up(spaces[0], len(hashes), found)
        if found < len(hashes):
            stats.misses[self.reason(spaces, hashes[found])] += 1

    def got(self, spaces: Sequence[Space], hashes: Sequence[bytes], got: int, *, missed: bool) -> None:
        """A get of the leading `got` blocks; `missed`: the next is not there, rather than refused or pending."""
        stats = self._stats[spaces[0].tenant]
        stats.rates.got(spaces[0], len(hashes), got)
        if missed and got < len(hashes):
            stats.misses[self.reason(spaces, hashes[got])] += 1

    def reason(self, spaces: Sequence[Space], hash_: bytes) -> Reason:
        """Why not all of the spaces have a block, as far as one look tells."""
        for space in spaces:
            gone = self._history.why(space, hash_) if hash_ not in space.entries else None
            if gone is not None:
                return gone.reason
        return Reason.NEVER_STORED

    def stored(self, space: Space, blocks: int) -> None:
        """A put. Where its namespace stores much for little the log says so, once an hour for each tenant."""
        stats = self._stats[space.tenant]
        if not stats.rates.stored(space, blocks):
            return
        now = self._parts.clock.monotonic()
        if now >= stats.warn_again_s:
            stats.warn_again_s = now + LOG_INTERVAL_S
            _log.warning("%s", warning_of(self._parts, space))


def warning_of(parts: Parts, space: Space) -> str:
    """The warning about one namespace; empty where there is none."""
    low = parts.stats[space.tenant].rates.low.get(space)
    if low is None:
        return ""
    low.text = low.text or _warning(parts.catalog, space, low)  # once: it looks at all namespaces of the tenant
    return low.text


def warnings(parts: Parts, tenant: str, most: int) -> list[str]:
    """What to tell a tenant of its namespaces that store much for little; those with the fewest hits first."""
    low = parts.stats[tenant].rates.low
    if not low:
        return []
    return [warning_of(parts, space) for space in sorted(low, key=lambda space: low[space].share)[:most]]


def _warning(catalog: Catalog, space: Space, low: Low) -> str:
    model = space.namespace.fields.get("model", "")
    what = (
        f"namespace {space.namespace.digest.hex()} (model {model}) of tenant {space.tenant} "
        f"stored {low.stored} blocks, and of {low.asked} asked for {100 * low.share:.0f} % were there"
    )
    earlier = _opened_before(catalog, space)
    if earlier is None:
        cause = "do its block hashes change with each start (PYTHONHASHSEED)?"
    else:
        differ = told(differences(space.namespace, earlier.namespace))
        cause = f"the namespace before it of this model differs in {differ}: does that change with each start?"
    return f"{what}: {cause} `kvstorectl explain --namespace {space.namespace.digest.hex()}` tells more"


def _opened_before(catalog: Catalog, space: Space) -> Space | None:
    """The namespace of the same model and shard that became known just before this one."""
    before: Space | None = None
    for other in catalog.tenant_spaces(space.tenant):  # in the order in which they became known
        if other is space:
            break
        if same_model(other.namespace, space.namespace) and shard_of(other.namespace) == shard_of(space.namespace):
            before = other
    return before
