"""Each seed twice, in two processes that differ in what may differ: are they the same worlds, step by step?

One runs them upwards, the other downwards, so that each world comes after others. They have other hashes of bytes
and texts, memory that was used otherwise before, and a collector that runs at other moments.
"""

import gc
import os
import random
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.sim.runner import COLLECT_EVERY, run_one

SEEDS_AT_ONCE = 100  # whose steps lie in files at a time
OBJECTS_MAX = 200_000
MAKERS = (object, dict, list, lambda: {1, 2, 3}, lambda: [None] * 7, lambda: bytes(100), lambda: bytearray(3000))


def differing(seeds, ops):
    """Seeds whose steps are not the same, each with the place where they part."""
    found = []
    for start in range(0, len(seeds), SEEDS_AT_ONCE):
        some = [*map(str, seeds[start : start + SEEDS_AT_ONCE])]
        with TemporaryDirectory() as folder:
            ways = [_begin(Path(folder), way, ops, some) for way in ("0", "1")]
            codes = [way.wait() for way in ways]
            if any(codes):
                raise RuntimeError("a process that ran worlds has failed")
            for seed in some:
                where = parted(*((Path(folder) / f"{way}.{seed}").read_text().splitlines() for way in ("0", "1")))
                found += [(int(seed), where)] if where else []
    return found


def _begin(folder, way, ops, seeds):
    command = [sys.executable, "-m", "tests.sim.repeats", str(folder), way, str(ops), *seeds]
    return subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": way})


def parted(one, other):
    """The first step that is not the same, and the one before it; empty where all are."""
    before = "the beginning"
    for number, (a, b) in enumerate(zip_longest(one, other)):
        if a != b:
            return f"step {number}, after {before}: {a} or {b}"
        before = a
    return ""


def _run(folder, way, ops, seeds):
    """In a process of its own: the steps of each seed, a file each."""
    other = way != "0"
    dice = random.Random(f"memory {way}")
    memory = [dice.choice(MAKERS)() for _ in range(dice.randrange(OBJECTS_MAX))] if other else []
    if not other:
        gc.disable()
    for number, seed in enumerate(reversed(seeds) if other else seeds):
        for _ in range(len(memory) // 100):  # holes of all sizes
            memory[dice.randrange(len(memory))] = dice.choice((*MAKERS, lambda: None))()
        if other:
            gc.set_threshold(dice.randrange(300, 3000))
        with (folder / f"{way}.{seed}").open("w") as file:
            _run_world(int(seed), ops, lambda *step, file=file: print(step, file=file))
        if not number % COLLECT_EVERY:
            gc.collect()


def _run_world(seed, ops, note):
    try:
        counts, _ = run_one(seed, ops, note=note)
        note("counts", sorted(counts.items()))
    except Exception as error:  # nothing is asked here but whether it is the same one
        note("violation", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    _run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
