"""Runs worlds: one in this process, or many in a process for each CPU."""

import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.sim.canaries import CANARIES, Misfit
from tests.sim.model import Violation
from tests.sim.small import make_small
from tests.sim.steps import SteppedWorld
from tests.sim.world import World

SEEDS_PER_TASK = 5
COLLECT_EVERY = 5


@dataclass
class Found:
    """What came of many worlds."""

    seeds: int = 0
    counts: Counter = field(default_factory=Counter)
    violations: list = field(default_factory=list)
    seconds: float = 0.0


def deterministic(argv):
    """Start anew with a fixed order of hashes, where this process has not one."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, "-m", "tests.sim", *argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})


def run_one(seed, ops, *, canary=None, note=None):
    """Counts and trace of one world; raises Violation. With a canary, with that bug planted. `note`: see `steps`."""
    undo = [make_small()]
    logging.disable(logging.CRITICAL)
    try:
        if canary is not None:
            undo.append(CANARIES[canary]())
        world = World(seed, ops) if note is None else SteppedWorld(seed, ops, note)
        trace = world.run()
        return world.counts, trace
    finally:
        for restore in reversed(undo):
            restore()
        logging.disable(logging.NOTSET)


def run_many(seeds, ops, *, canary=None, seconds=0.0, processes=0, told=lambda text: None):
    """All of the seeds, or as many as begin within the time."""
    found, started = Found(), time.monotonic()
    tasks = [(seeds[i : i + SEEDS_PER_TASK], ops, canary) for i in range(0, len(seeds), SEEDS_PER_TASK)]
    count = processes or len(os.sched_getaffinity(0))
    if count == 1:
        answers = map(_some, tasks)
        _collect(found, answers, started, seconds, told)
    else:
        with multiprocessing.get_context("spawn").Pool(count) as pool:
            _collect(found, pool.imap_unordered(_some, tasks), started, seconds, told)
    found.seconds = time.monotonic() - started
    return found


def find_canaries(names, seeds, ops, *, processes=0):
    """For each canary the first seed that finds it and what it saw, or None."""
    tasks = [(name, seeds, ops) for name in names]
    with multiprocessing.get_context("spawn").Pool(processes or len(os.sched_getaffinity(0))) as pool:
        return dict(pool.imap_unordered(_first, tasks))


def _first(task):
    name, seeds, ops = task
    for start in range(0, len(seeds), 2):
        _, _, violations = _some((seeds[start : start + 2], ops, name))
        if violations:
            return name, violations[0]
    return name, None


def _collect(found, answers, started, seconds, told):
    next_word = started + 30
    for number, counts, violations in answers:
        found.seeds += number
        found.counts.update(counts)
        found.violations += violations
        now = time.monotonic()
        if now > next_word:
            told(
                f"{found.seeds} seeds, {len(found.violations)} violations, {found.seeds / (now - started):.1f} a second"
            )
            next_word = now + 30
        if seconds and now - started > seconds:
            return


def _some(task):
    """A few worlds, in whatever process."""
    seeds, ops, canary = task
    counts, violations = Counter(), []
    gc.disable()  # worlds are made of cycles: they are collected between two
    for number, seed in enumerate(seeds):
        try:
            counts.update(run_one(seed, ops, canary=canary)[0])
        except Violation as error:
            violations.append((seed, str(error)))
        except Misfit:
            raise
        except Exception as error:
            violations.append((seed, f"{type(error).__name__}: {error}"))
        if not number % COLLECT_EVERY:
            gc.collect()
    gc.enable()
    return len(seeds), counts, violations
