"""What a million catalogue entries cost in memory, and what the garbage collector pauses for.

Entries are made as a put makes them: hashes and parents cut from packed chains, reserved,
published, let go. Memory is the growth of the process's resident set, so it holds everything:
entries, hashes, dictionaries, eviction order.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Final, Literal

from bench.common import Figure, emit, parser, progress, run
from kvstored.catalog.catalog import READY, WRITING, Catalog, Entry
from kvstored.keys import Namespace, split_hashes

_CHAIN_BLOCKS: Final = 100
_HASH_BYTES: Final = 32
_BLOCK_BYTES: Final = 16384
_SLOTS_PER_SEGMENT: Final = 4096
_PAGE_BYTES: Final = 4096

FIGURES: Final = (
    Figure("entries", "entries in the catalogue"),
    Figure("bytes_per_entry", "resident memory per entry, keys and eviction order included"),
    Figure("catalogue_mb", "resident memory of all of them, MB", "<= 300"),
    Figure(
        "gc_pause_max_ms", "longest pause of the garbage collector, while filling and for a full collection", "<= 20"
    ),
    Figure("enter_us", "reserve, publish and let go of one block, us"),
    Figure("touch_us", "touch of one block in a chain, us"),
)


class PauseMeter:
    """Longest pause of the garbage collector, by its own callbacks."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._started_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase == "start":
            self._started_s = time.perf_counter()
        else:
            self.longest_s = max(self.longest_s, time.perf_counter() - self._started_s)

    def close(self) -> None:
        """Stop measuring."""
        gc.callbacks.remove(self._note)


def fill(catalog: Catalog, entries: int) -> list[list[Entry]]:
    """Enter so many blocks in chains; returns a sample of the chains."""
    namespace = Namespace(tenant="default", digest=bytes(16), encoding=b"bench", fields={})
    space = catalog.space(namespace)
    sample: list[list[Entry]] = []
    for start in range(0, entries, _CHAIN_BLOCKS):
        count = min(_CHAIN_BLOCKS, entries - start)
        packed = b"".join((start + i).to_bytes(_HASH_BYTES, "little") for i in range(count))
        chain, parent = [], b""
        for index, hash_ in enumerate(split_hashes(packed, _HASH_BYTES), start):
            slot = (index // _SLOTS_PER_SEGMENT + 1) << 20 | index % _SLOTS_PER_SEGMENT
            chain.append(catalog.reserve(space, hash_, parent, slot, _BLOCK_BYTES, WRITING))
            parent = hash_
        for entry in chain:
            assert catalog.publish(entry)
        assert not catalog.unhold(chain)
        if start % (1000 * _CHAIN_BLOCKS) == 0:
            sample.append(chain)
    return sample


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def measure(entries: int) -> dict[str, float]:
    """Fill a catalogue and say what it costs."""
    catalog = Catalog()
    fill(Catalog(), 1000)  # code paths and allocator arenas
    gc.collect()
    before, meter, started = resident_bytes(), PauseMeter(), time.perf_counter()
    sample = fill(catalog, entries)
    filled_s = time.perf_counter() - started
    gc.collect()
    meter.close()
    grown = resident_bytes() - before
    assert len(catalog) == entries
    assert all(entry.state == READY for chain in sample for entry in chain)
    return {
        "entries": entries,
        "bytes_per_entry": grown / entries,
        "catalogue_mb": grown / 1e6,
        "gc_pause_max_ms": meter.longest_s * 1e3,
        "enter_us": filled_s / entries * 1e6,
        "touch_us": _touch_us(catalog, sample),
    }


def _touch_us(catalog: Catalog, chains: list[list[Entry]]) -> float:
    started = time.perf_counter()
    for chain in chains:
        catalog.touch(chain)
    return (time.perf_counter() - started) / sum(map(len, chains)) * 1e6


def main() -> int:
    """Entry point."""
    built = parser("bench.catalog", "Memory and collector pauses of a large catalogue.", FIGURES)
    built.add_argument("--entries", type=int, default=1_000_000)
    arguments = built.parse_args()
    progress(f"entering {arguments.entries} blocks")
    emit(measure(arguments.entries), FIGURES, arguments.json)
    return 0


if __name__ == "__main__":
    run(main)
