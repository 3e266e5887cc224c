"""Runs the targets, each in a process of its own and for its share of the time; `--help` tells the rest.

Atheris guides them by the coverage of the code that they reach. Where it is not installed (it has wheels for
some versions of Python only), inputs are mutated at random, which finds less, and that is said.
"""

import argparse
import importlib.util
import os
import random
import re
import resource
import subprocess
import sys
import time
import traceback
from pathlib import Path

CASES = Path(__file__).parent / "cases"
HEAVY = ("operations", "session", "client")  # the whole daemon or client: these get more of the time
HEAVY_SHARE = 0.6
INPUT_BYTES_MAX = 16_384
INPUT_S_MAX = 200  # a hang ends sooner by limits of the targets' own; so slow is no machine
START_S_MAX = 300
RSS_MIB_MAX = 2048
GROWTH_MIB_MAX = 192  # once warm, for all inputs together
WARM_INPUTS = 500
COVERED = ["kvstored", "kvstored_proto", "kvstored_client"]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--target", action="append", help="one of them, again for more; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; 0: another one each time")
    parser.add_argument("--work", type=Path, default=Path("build/fuzz"), help="where inputs are collected")
    parser.add_argument("--in-process", dest="inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        run_one(options.target[0], options.seconds, options.seed, options.work / options.target[0])
        return
    guided = importlib.util.find_spec("atheris") is not None
    if not guided:
        print("fuzz: atheris is not installed: mutating without coverage (pip install '.[fuzz]')", flush=True)
    names = options.target or [*light_names(), *HEAVY]
    heavy = [name for name in names if name in HEAVY]
    failed = []
    for name in names:
        group = heavy if name in heavy else [other for other in names if other not in heavy]
        share = 1.0 if len(group) == len(names) else HEAVY_SHARE if name in heavy else 1 - HEAVY_SHARE
        seconds = max(1.0, options.seconds * share / len(group))
        failed += [] if run_child(name, seconds, options) else [name]
    if failed:
        sys.exit(f"fuzz: {', '.join(failed)} failed: keep the input as a file in {CASES}/<target>/")


def light_names():
    from tests.fuzz.targets import TARGETS

    return list(TARGETS)


def run_child(name, seconds, options):
    """One target in a process; whether it went well. Prints one line, and all there is where it failed."""
    started = time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz", "--in-process", "--target", name, "--seconds", str(seconds)]
    seed = options.seed or int.from_bytes(os.urandom(3), "little") + 1
    command += ["--seed", str(seed), "--work", str(options.work)]
    limit_s = seconds + START_S_MAX + INPUT_S_MAX
    env = {**os.environ, "PYTHONHASHSEED": "0"}  # the seed says it all, as far as it can
    kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(command, env=env, timeout=limit_s, **kept)
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = -1, (error.stdout or b"").decode(errors="replace") + f"\nno end within {limit_s:.0f} s"
    figures = re.findall(r"Done (\d+) |(\d+) inputs", output)
    inputs = next((a or b for a, b in reversed(figures)), "?")
    ok = code == 0
    verdict = "ok" if ok else "FAILED"
    print(f"fuzz {name}: {inputs} inputs in {time.monotonic() - started:.0f} s, seed {seed}: {verdict}")
    if not ok:
        print(output[-8000:])
    sys.stdout.flush()
    return ok


def run_one(name, seconds, seed, work):
    """The target in this process, until the time is over or something is wrong."""
    guided = importlib.util.find_spec("atheris") is not None
    corpus = work / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    if guided:
        import atheris

        with atheris.instrument_imports(include=COVERED):
            target, examples = load(name)
    else:
        target, examples = load(name)
    for number, example in enumerate([*examples, *cases_of(name)]):
        (corpus / f"seed-{number}").write_bytes(example)
    watched = Watched(target)
    if guided:
        arguments = [f"-max_total_time={int(seconds) or 1}", f"-seed={seed}", f"-max_len={INPUT_BYTES_MAX}"]
        arguments += [f"-timeout={INPUT_S_MAX}", f"-rss_limit_mb={RSS_MIB_MAX}", f"-artifact_prefix={work}/failed-"]
        atheris.Setup([sys.argv[0], *arguments, str(corpus)], watched)
        atheris.Fuzz()
    else:
        mutate(watched, examples, seconds, seed, work)


def load(name):
    """The function and its seeds."""
    if name in HEAVY:
        module = importlib.import_module(f"tests.fuzz.{name}")
        return module.make(), module.seeds()
    from tests.fuzz import targets

    return targets.TARGETS[name], targets.seeds()[name]


def cases_of(name):
    """Inputs that once broke a target."""
    return [path.read_bytes() for path in sorted((CASES / name).glob("*"))]


class Watched:
    """A target whose process may not grow."""

    def __init__(self, target):
        self._target = target
        self._inputs = 0
        self._warm_kib = 0

    def __call__(self, data):
        self._target(bytes(data))
        self._inputs += 1
        if self._inputs % WARM_INPUTS == 0:
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self._warm_kib = self._warm_kib or peak_kib
            grown_mib = (peak_kib - self._warm_kib) >> 10
            assert grown_mib <= GROWTH_MIB_MAX, f"the process grew by {grown_mib} MiB in {self._inputs} inputs"


def mutate(target, examples, seconds, seed, work):
    """Without coverage: seeds with bytes changed, cut and joined."""
    generator, end_s, inputs = random.Random(seed), time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        data = bytearray(generator.choice(examples))
        for _ in range(generator.randrange(8)):
            at = generator.randrange(len(data) + 1)
            change = generator.randrange(4)
            if change == 0 and at < len(data):
                data[at] = generator.randrange(256)
            elif change == 1:
                data[at:at] = generator.randbytes(generator.randrange(1, 16))
            elif change == 2:
                del data[at : at + generator.randrange(1, 16)]
            else:
                data += generator.choice(examples)
        inputs += 1
        try:
            target(bytes(data[:INPUT_BYTES_MAX]))
        except BaseException:
            (work / "failed-case").write_bytes(data)
            traceback.print_exc()
            sys.exit(1)
    print(f"{inputs} inputs")


if __name__ == "__main__":
    main()
