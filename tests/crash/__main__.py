"""Entry point; see the package."""

import time
from collections import Counter
from pathlib import Path

from bench.common import Figure, emit, median, parser, progress, run
from tests.crash.crashing import crash_phase
from tests.crash.phases import PHASES

PHASE_S = 40.0  # at most: what is written in a longer one would no longer fit beside what is live
FIGURES = (
    Figure("wrong_bytes", "delivered bytes that differ from what was put", "== 0"),
    Figure("durable_lost", "blocks acknowledged as durable that were lost without a recorded eviction", "== 0"),
    Figure("dram_survived", "share of the blocks committed in DRAM that were there after the restart", "== 1"),
    Figure("accounting_errors", "sums in status that differ from what is listed", "== 0"),
    Figure("resurrected", "blocks delivered after their delete was acknowledged", "== 0"),
    Figure("corrupt_blocks", "blocks whose content hash was wrong at the end", "== 0"),
    Figure("client_errors", "client processes that ended by an exception", "== 0"),
    Figure("kills", "times the daemon was killed"),
    Figure("blackouts", "of these, together with the memory: only what is durable must be there then"),
    Figure("rounds", "times that everything was checked after it"),
    Figure("restart_s", "seconds until it served again, median"),
    Figure("restart_max_s", "the longest of them"),
    Figure("puts", "blocks stored"),
    Figure("durable_acks", "of these, acknowledged as durable at once"),
    Figure("flushes", "flushes after which everything was durable"),
    Figure("gets", "gets"),
    Figure("prefetches", "prefetches"),
    Figure("deletes", "blocks deleted"),
    Figure("checks", "times that a writer looked for all of its blocks"),
    Figure("checked_blocks", "blocks found and compared after a crash"),
    Figure("checked_bytes", "bytes delivered and compared"),
    Figure("durable_checked", "durable blocks looked for after a crash"),
    Figure("dram_checked", "committed blocks looked for after a crash"),
    Figure("dram_lost", "of these, not there"),
    Figure("evicted_blocks", "acknowledged blocks not there because they were evicted, on record"),
    Figure("dropped_blocks", "of dram_lost: as many as the daemon had counted as dropped while NVMe took none"),
    Figure("held_through", "blocks whose lease was good after a crash"),
    Figure("accounts", "times that the account was compared"),
    Figure("promoted_blocks", "blocks read from NVMe, last lives only"),
    Figure("demoted_blocks", "blocks written to NVMe, last lives only"),
    Figure("recycled_extents", "extents recycled, last lives only"),
    Figure("seconds", "how long it ran"),
    Figure("seed", "what the randomness came from"),
)
MUST_BE_ZERO = ("wrong_bytes", "durable_lost", "accounting_errors", "resurrected", "corrupt_blocks", "client_errors")
COUNTED = ("puts", "durable_acks", "flushes", "gets", "prefetches", "deletes", "checks", "checked_blocks")
COUNTED += ("checked_bytes", "durable_checked", "dram_checked", "dram_lost", "evicted_blocks", "held_through")
COUNTED += ("wrong_bytes", "durable_lost", "resurrected", "client_errors")


def crash(seconds, seed, directory=None, phases=PHASES):
    """All phases in turn until the time is up; returns all figures."""
    started = time.monotonic()
    totals = Counter()
    totals["restarts_s"] = []
    turns = len(phases) * max(1, round(seconds / (PHASE_S * len(phases))))
    for turn in range(turns):
        phase = phases[turn % len(phases)]
        left_s = seconds - (time.monotonic() - started)
        progress(f"{phase.name}: {left_s / (turns - turn):.0f} s, seed {seed}")
        totals.update(crash_phase(phase, left_s / (turns - turn), seed * 1000 + turn, directory, totals))
    return figures(totals, time.monotonic() - started, seed)


def figures(totals, seconds, seed):
    """The totals as they are printed."""
    names = (
        "kills",
        "dropped_blocks",
        "blackouts",
        "rounds",
        "accounts",
        "accounting_errors",
        "corrupt_blocks",
        "promoted_blocks",
        "demoted_blocks",
    )
    checked = totals["dram_checked"]
    return {
        **{name: totals[name] for name in (*names, *COUNTED)},
        "recycled_extents": totals["nvme_recycled_extents"],
        "dram_survived": 1 - (totals["dram_lost"] - totals["dropped_blocks"]) / checked if checked else None,
        "restart_s": median(totals["restarts_s"]),
        "restart_max_s": max(totals["restarts_s"]),
        "seconds": seconds,
        "seed": seed,
    }


def passed(values):
    """Whether nothing was wrong and nothing lost."""
    return values["dram_survived"] == 1.0 and not any(values[name] for name in MUST_BE_ZERO)


def main():
    built = parser("tests.crash", "The daemon dies at random: nothing wrong, nothing lost.", FIGURES)
    built.add_argument("--seconds", type=float, default=120.0, help="how long, all phases together (120)")
    built.add_argument("--seed", type=int, default=1, help="what the randomness comes from (1)")
    built.add_argument("--directory", type=Path, help="where the daemon's files go")
    names = [phase.name for phase in PHASES]
    built.add_argument("--phase", action="append", choices=names, help="only this one; may be repeated")
    arguments = built.parse_args()
    phases = [phase for phase in PHASES if phase.name in (arguments.phase or names)]
    values = crash(arguments.seconds, arguments.seed, arguments.directory, phases)
    emit(values, FIGURES, arguments.json)
    return int(not passed(values))


if __name__ == "__main__":
    run(main)
