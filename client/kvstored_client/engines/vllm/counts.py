"""What the connector counts, on both sides; the engine's /metrics show it."""

from __future__ import annotations

import threading
from typing import Final

# Name of each counter, and what it says.
COUNTERS: Final = {
    "lookups": "Requests that were looked up",
    "lookup_hits": "Requests of which a prefix was found",
    "lookup_late": "Requests that were computed because their blocks did not come up in time",
    "lookup_seconds": "Seconds from a request's first look-up to its answer",
    "hit_tokens": "Prompt tokens whose KV was promised to the engine",
    "loads": "Loads that ended, one per request and worker",
    "loaded_blocks": "Blocks loaded into the engine's memory",
    "loaded_bytes": "Bytes loaded into the engine's memory",
    "load_seconds": "Seconds from a load's order to its end",
    "failed_loads": "Loads that did not bring all their blocks; the engine computes the rest",
    "failed_blocks": "Blocks that were promised and did not come",
    "saved_blocks": "Blocks stored",
    "saved_bytes": "Bytes stored",
    "existing_blocks": "Blocks to save that were stored already",
    "save_seconds": "Seconds spent on saves, off the engine's steps",
    "refused_blocks": "Blocks that the store did not take",
    "cancelled_saves": "Saves given up because the engine took their blocks back",
    "skipped_saves": "Saves given up because too many were under way",
}


class Counts:
    """Counters that several threads add to, taken away as a whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] = self._values.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        if not self._values:
            return {}  # most steps
        with self._lock:
            taken, self._values = self._values, {}
        return taken


def merged(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """The sum of two such counts."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
