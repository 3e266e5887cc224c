"""The simulation: worlds in which everything holds, the same trace for the same seed, and every planted bug found.

In processes of their own, where the order of hashes is always the same.
"""

import json
import subprocess
import sys

import pytest

from tests.sim.canaries import CANARIES, Misfit, canary
from tests.sim.plan import make_plan
from tests.sim.repeats import parted
from tests.sim.runner import run_many

pytestmark = pytest.mark.timeout(1200)

SEEDS = 40


def simulate(*arguments):
    command = [sys.executable, "-m", "tests.sim", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_invariants_hold():
    figures = json.loads(simulate("--seeds", f"0..{SEEDS}", "--json", "-"))
    assert (figures["seeds"], figures["violations"]) == (SEEDS, 0)
    assert figures["ops"] >= 200 * SEEDS
    assert min(figures[name] for name in ("hits", "durable_checked", "adopted")) > 0


def test_every_planted_bug_is_found():
    figures = json.loads(simulate("--canaries", "--json", "-"))
    assert figures == {"canaries": len(CANARIES), "canaries_missed": 0}


class Outgrown:
    def asked(self, what):
        """Has a parameter that the bug does not know."""

    def answered(self):
        """Is not async any more."""


async def waits(self):
    """A planted bug."""


@pytest.mark.parametrize(("name", "bug"), [("gone", waits), ("asked", lambda self: None), ("answered", waits)])
def test_a_planted_bug_that_fits_nothing_any_more_is_not_found_but_said(monkeypatch, name, bug):
    monkeypatch.setitem(CANARIES, "outgrown", None)  # taken out again after the test

    @canary
    def outgrown():
        yield Outgrown, name, bug

    with pytest.raises(Misfit, match=f"outgrown: .*Outgrown.{name}"):
        run_many([0], 10, canary="outgrown", processes=1)


def test_the_same_seed_gives_the_same_trace():
    first = simulate("--seed", "5", "--ops", "100")
    assert "trace" in first
    assert simulate("--seed", "5", "--ops", "100") == first


def test_each_world_has_the_same_steps_wherever_its_objects_lie_and_whatever_was_run_before_it():
    figures = json.loads(simulate("--seeds", "0..20", "--repeat", "--json", "-"))
    assert figures == {"seeds": 20, "seeds_not_repeated": 0}


def test_noting_its_steps_changes_no_world(tmp_path):
    plain = simulate("--seed", "5", "--ops", "100")
    assert simulate("--seed", "5", "--ops", "100", "--steps", str(tmp_path / "steps")) == plain
    kinds = {line.split("'")[1] for line in (tmp_path / "steps").read_text().splitlines()}
    assert kinds == {"soon", "at", "thread", "device", "read", "write", "world", "file", "index"}


def test_where_two_worlds_part_is_told():
    assert parted(["a", "b"], ["a", "b"]) == ""
    assert parted(["a", "b"], ["a", "c"]) == "step 1, after a: b or c"
    assert parted(["a"], ["a", "c"]) == "step 1, after a: None or c"


def test_half_of_the_worlds_restart_before_their_end_and_all_faults_are_drawn():
    plans = [make_plan(seed, 200) for seed in range(400)]
    assert sum(bool(plan.restarts) for plan in plans) > 200
    for kind in plans[0].faults.__struct_fields__:
        assert any(getattr(plan.faults, kind) for plan in plans)
    assert any(plan.slow_share for plan in plans)
