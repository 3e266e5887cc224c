"""The bench of versions, small: both versions run every cell, each with its own code. Figures say nothing here."""

import subprocess
import sys

import pytest

from bench.past_code import ROOT
from bench.versions import CELLS, FIGURES, Version, measure

BEFORE_TENANCY = "5ac6776"


@pytest.mark.timeout(400)
def test_old_and_new_code_run_the_same_cells_in_turns(monkeypatch):
    rounds, round_ = [], Version.round
    monkeypatch.setattr(Version, "round", lambda self: rounds.append(self) or round_(self))
    try:
        values = measure(BEFORE_TENANCY, 2, 8, 3)
    except LookupError as error:
        pytest.skip(str(error))
    assert values["wrong_blocks"] == 0
    assert set(values) | {"foreign_cpu_share"} == {figure.key for figure in FIGURES}
    assert all(values[f"{cell}_{which}"] > 0 for cell in CELLS for which in ("old", "new", "new_to_old"))
    first, second, third, fourth = rounds
    assert (first, second) == (fourth, third)
    assert first is not second


def test_a_commit_that_is_not_there_is_said():
    done = subprocess.run(
        [sys.executable, "-m", "bench.versions", "--against", "0" * 40], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "is not in this checkout's history" in done.stderr
