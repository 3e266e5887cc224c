"""Examples that hypothesis makes up: the same in every run, and none fails because the machine is busy."""

import ast
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TESTS = Path(__file__).parents[1]
FILES = sorted(path for path in TESTS.rglob("*.py") if "settings(" in path.read_text())


def test_an_example_may_take_long_and_so_may_thinking_of_one():
    @settings(max_examples=12)
    @given(st.integers().map(lambda number: (time.sleep(0.25), number)))
    def slow(_):
        time.sleep(0.25)

    slow()


def test_every_run_has_the_same_examples():
    def run():
        seen = []

        @given(st.integers())
        def note(number):
            seen.append(number)

        note()
        return seen

    assert run() == run()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_asks_for_less(path):
    for call in ast.walk(ast.parse(path.read_text())):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "settings":
            said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert said.get("deadline", "None") == "None"
            assert said.get("derandomize", "True") == "True"
            spared = said.get("suppress_health_check", HealthCheck.too_slow.name)
            assert HealthCheck.too_slow.name in spared or spared == "list(HealthCheck)", "it replaces the profile's"
