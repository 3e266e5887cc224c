"""Seeds, one after the other, on every CPU; one seed alone tells what went wrong in it.

python -m tests.sim --seeds 0..10000 --json -
python -m tests.sim --seed 4711
python -m tests.sim --seeds 0..100 --canary early_publish
python -m tests.sim --seeds 0..100 --repeat
"""

import sys
import traceback
from contextlib import ExitStack

from bench.common import Figure, emit, parser, progress, run
from tests.sim.canaries import CANARIES
from tests.sim.model import Violation
from tests.sim.repeats import differing
from tests.sim.runner import deterministic, find_canaries, run_many, run_one

OPS = 200
CANARY_SEEDS = 100
FAULTS = (
    *("read_error", "write_error", "sync_error", "open_error", "no_space", "short", "read_flip", "rot", "torn_write"),
    *("misdirected", "read_only", "vanished", "index_error", "slow"),
)
RESTARTS = ("orderly", "kill", "power_cut")
FIGURES = (
    Figure("seeds", "worlds run"),
    Figure("violations", "worlds in which an invariant did not hold", "== 0"),
    Figure("first_violation", "the seed of the first of them"),
    Figure("ops", "operations of clients"),
    Figure("restarted_seeds_share", "worlds that restarted before their last operation", ">= 0.5"),
    *(Figure(f"restarts_{kind}", f"restarts of the kind {kind}", ">= 1") for kind in RESTARTS),
    *(Figure(f"fault_{kind}", f"faults of the kind {kind} that fell", ">= 1") for kind in FAULTS),
    Figure("hits", "blocks delivered and checked byte by byte"),
    Figure("hit_bytes", "their bytes"),
    Figure("durable_checked", "durable blocks looked for after a restart"),
    Figure("adopted", "blocks taken over from kept memory after a kill"),
    Figure("seeds_per_s", "worlds per second, all CPUs together"),
    Figure("seconds", "how long it ran"),
)

CANARY_FIGURES = (
    Figure("canaries", "planted bugs"),
    Figure("canaries_missed", f"planted bugs that {CANARY_SEEDS} worlds did not find", "== 0"),
)

REPEAT_FIGURES = (
    Figure("seeds", "worlds run twice"),
    Figure("seeds_not_repeated", "worlds that were another one the second time", "== 0"),
)


def main():
    arguments = _arguments()
    if arguments.seed is not None:
        return _one(arguments)
    if arguments.canaries:
        return _canaries(arguments)
    first, last = (int(part) for part in arguments.seeds.split(".."))
    if arguments.repeat:
        return _repeat(range(first, last), arguments)
    found = run_many(
        range(first, last),
        arguments.ops,
        canary=arguments.canary,
        seconds=arguments.seconds,
        processes=arguments.processes,
        told=progress,
    )
    values = figures(found)
    emit(values, FIGURES, arguments.json)
    for seed, what in sorted(found.violations)[:10]:
        canary = f" --canary {arguments.canary}" if arguments.canary else ""
        progress(f"seed {seed}: {what}\n    again: python -m tests.sim --seed {seed} --ops {arguments.ops}{canary}")
    if arguments.canary:
        return int(not found.violations)
    silent = [f.key for f in FIGURES if f.target == ">= 1" and not values.get(f.key)] if arguments.all_faults else []
    if silent:
        progress(f"never happened: {', '.join(silent)}")
    return int(bool(found.violations or silent))


def _canaries(arguments):
    """Each planted bug must be found; the table says by which seed."""
    found = find_canaries(sorted(CANARIES), range(CANARY_SEEDS), arguments.ops, processes=arguments.processes)
    for name in sorted(found):
        seed, what = found[name] or (None, f"NOT FOUND in {CANARY_SEEDS} seeds")
        progress(f"{name}: {what if seed is None else f'seed {seed}: {what[:100]}'}")
    missed = sum(first is None for first in found.values())
    values = {"canaries": len(found), "canaries_missed": missed}
    emit(values, CANARY_FIGURES, arguments.json)
    return int(bool(missed))


def figures(found):
    """What was counted, by the names of the figures."""
    counts, seconds = found.counts, found.seconds
    return {
        "seeds": found.seeds,
        "violations": len(found.violations),
        "first_violation": min(found.violations)[0] if found.violations else None,
        "ops": counts["ops"],
        "restarted_seeds_share": counts["restarted_seeds"] / max(1, found.seeds),
        **{f"restarts_{kind}": counts[f"restart.{kind}"] for kind in RESTARTS},
        **{f"fault_{kind}": counts[f"fault.{kind}"] for kind in FAULTS},
        **{name: counts[name] for name in ("hits", "hit_bytes", "durable_checked", "adopted")},
        "seeds_per_s": found.seeds / seconds if seconds else None,
        "seconds": seconds,
    }


def _repeat(seeds, arguments):
    """Each seed must give the same steps in two processes."""
    found = differing(seeds, arguments.ops)
    for seed, where in found[:10]:
        progress(f"seed {seed}: {where}")
    emit({"seeds": len(seeds), "seeds_not_repeated": len(found)}, REPEAT_FIGURES, arguments.json)
    return int(bool(found))


def _one(arguments):
    seed = arguments.seed
    try:
        with ExitStack() as stack:
            file = stack.enter_context(open(arguments.steps, "w")) if arguments.steps else None
            note = (lambda *step: print(step, file=file)) if file else None
            counts, trace = run_one(seed, arguments.ops, canary=arguments.canary, note=note)
    except Violation:
        traceback.print_exc()
        return 1
    print(f"seed {seed}: all invariants held; trace {trace}; {dict(sorted(counts.items()))}")
    return 0


def _arguments():
    built = parser(
        "tests.sim", "The store in simulated time, on devices that fail, with restarts and power cuts.", FIGURES
    )
    built.add_argument("--seeds", default="0..1000", metavar="A..B", help="from A up to, not including, B")
    built.add_argument("--seed", type=int, help="this one alone, with a traceback")
    built.add_argument("--steps", metavar="FILE", help="with --seed: write down what it does, a line for each step")
    built.add_argument("--ops", type=int, default=OPS, help=f"operations of each world ({OPS})")
    built.add_argument("--seconds", type=float, default=0.0, help="begin no world after so many (0: all seeds)")
    built.add_argument("--processes", type=int, default=0, help="0: one for each CPU")
    built.add_argument("--canary", choices=sorted(CANARIES), help="plant this bug: success is to find it")
    built.add_argument("--canaries", action="store_true", help="plant all of them, one at a time")
    built.add_argument("--repeat", action="store_true", help="run each seed twice: fail where a step is not the same")
    built.add_argument("--all-faults", action="store_true", help="fail where a kind of fault or restart never happened")
    return built.parse_args()


if __name__ == "__main__":
    deterministic(sys.argv)
    run(main)
