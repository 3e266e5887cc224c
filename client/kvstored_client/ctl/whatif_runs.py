"""The simulations of `kvstorectl whatif`: one for each policy, admission and pair of tier sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvstored.policy.admission import make_admission
from kvstored.policy.calls import Call
from kvstored.policy.extent_log import REINSERT_SHARE, ExtentLog
from kvstored.policy.ideal import ideal_hits
from kvstored.policy.orders import make_order
from kvstored.policy.simulator import Tier, replay
from kvstored.policy.turns import Turns
from kvstored.policy.two_tiers import TwoTiers

OPT: Final = "opt"
YEAR_S: Final = 365.25 * 86_400
DAY_S: Final = 86_400
STEP_CALLS: Final = 200
EXTENT_BYTES: Final = 256 << 20  # the daemon's default
EXTENTS_MIN: Final = 8

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Workload:
    """A trace, and what its blocks and its time amount to."""

    calls: Sequence[Call]
    block_bytes: int
    asked_blocks: int
    span_s: float  # 0: the trace has no times
    predict: bool = False  # as the setting prefetch.predict


@dataclass(frozen=True)
class Cell:
    """One simulation. Without NVMe there is no admission; `opt` is one tier as large as both."""

    policy: str
    admission: str
    dram_blocks: int
    nvme_blocks: int


@dataclass(frozen=True)
class Result:
    """What it would have hit and moved, in blocks; None: the ideal moves nothing that could be counted."""

    hits: int
    dram_written_blocks: int | None = None
    dram_read_blocks: int | None = None
    nvme_written_blocks: int | None = None
    nvme_read_blocks: int | None = None
    ahead_blocks: int = 0  # of these: because a turn was expected
    ahead_used_blocks: int = 0  # of which it came in time
    seconds: float = 0.0  # that the simulation took


def run_cell(work: Workload, cell: Cell, advance: Advance) -> Result:
    """Simulate one cell; `advance` is told of every so many calls done."""
    started = time.perf_counter()
    result = _simulated(work, cell, advance)
    return replace(result, seconds=time.perf_counter() - started)


def _simulated(work: Workload, cell: Cell, advance: Advance) -> Result:
    if cell.policy == OPT:
        requests: list[Sequence[Hashable]] = [call.ids for call in work.calls]
        found = ideal_hits(requests, cell.dram_blocks + cell.nvme_blocks)
        advance(len(work.calls))
        return Result(sum(hits for hits, call in zip(found, work.calls, strict=True) if call.gets))
    if not cell.nvme_blocks:
        tier = Tier(make_order(cell.policy), cell.dram_blocks)
        hits = _hits(work.calls, tier, advance)
        return Result(hits, tier.stored_blocks, hits)
    extent_blocks = max(1, min(EXTENT_BYTES // work.block_bytes, cell.nvme_blocks // EXTENTS_MIN))
    tiers = TwoTiers(
        make_order(cell.policy),
        cell.dram_blocks,
        make_admission(cell.admission),
        block_bytes=work.block_bytes,
        nvme=ExtentLog(cell.nvme_blocks, extent_blocks, reinsert_share=REINSERT_SHARE),
        waits=True,
        turns=Turns() if work.predict else None,
    )
    hits = _hits(work.calls, tiers, advance)
    written = tiers.written_blocks + tiers.below.reinserted_blocks
    return Result(
        *(hits, tiers.stored_blocks, hits + tiers.written_blocks, written, tiers.read_blocks),
        *(tiers.ahead_blocks, tiers.ahead_used_blocks),
    )


def _hits(calls: Sequence[Call], tier: Tier, advance: Advance) -> int:
    hits = 0
    for number, found in enumerate(replay(calls, tier), 1):
        hits += found
        if not number % STEP_CALLS:
            advance(STEP_CALLS)
    advance(len(calls) % STEP_CALLS)
    return hits


def life_years(work: Workload, written_blocks: int | None, endurance_bytes: int) -> float | None:
    """How long a drive lasts that may be written `endurance_bytes`, at the trace's rate; None: not known."""
    if not written_blocks or not endurance_bytes or not work.span_s:
        return None
    return endurance_bytes / (written_blocks * work.block_bytes / work.span_s) / YEAR_S


def as_json(work: Workload, cell: Cell, result: Result, endurance_bytes: int) -> dict[str, Any]:
    """One result with bytes instead of blocks; null where there is nothing to say."""

    def in_bytes(blocks: int | None) -> int | None:
        return None if blocks is None else blocks * work.block_bytes

    written = in_bytes(result.nvme_written_blocks)
    return {
        "policy": cell.policy,
        "admission": cell.admission or None,
        "dram_blocks": cell.dram_blocks,
        "nvme_blocks": cell.nvme_blocks,
        "hits": result.hits,
        "hit_rate": result.hits / work.asked_blocks,
        "dram_written_bytes": in_bytes(result.dram_written_blocks),
        "dram_read_bytes": in_bytes(result.dram_read_blocks),
        "nvme_written_bytes": written,
        "nvme_read_bytes": in_bytes(result.nvme_read_blocks),
        "nvme_read_ahead_bytes": in_bytes(result.ahead_blocks),
        "nvme_read_ahead_used_bytes": in_bytes(result.ahead_used_blocks),
        "nvme_written_bytes_per_day": None if written is None or not work.span_s else written / work.span_s * DAY_S,
        "drive_life_years": life_years(work, result.nvme_written_blocks, endurance_bytes),
    }
