"""The fuzzing targets without a fuzzer: on their seeds, on every input that once broke one, and on hypothesis'."""

import importlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.__main__ import HEAVY, cases_of, light_names, load
from tests.fuzz.targets import TARGETS, seeds

LIGHT = light_names()
SEEDS = seeds()


@pytest.mark.parametrize("name", LIGHT)
def test_seeds_and_cases_that_once_broke_a_reader(name):
    target, examples = load(name)
    for example in (*examples, *cases_of(name)):
        target(example)


@st.composite
def near(draw, examples):
    """An example with a piece cut out and another one put in, or anything at all."""
    data = draw(st.sampled_from(examples) | st.binary(max_size=512))
    at, size = draw(st.integers(0, len(data))), draw(st.integers(0, 8))
    return data[:at] + draw(st.binary(max_size=12)) + data[at + size :]


@pytest.mark.parametrize("name", LIGHT)
def test_whatever_bytes_there_are(name):
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(near(SEEDS[name]))
    def check(data):
        TARGETS[name](data)

    check()


@pytest.mark.parametrize("name", HEAVY)
def test_the_daemon_and_the_client_on_seeds_cases_and_what_is_near(name, monkeypatch):
    module = importlib.import_module(f"tests.fuzz.{name}")
    for described in ("session", "servicers"):  # the target watches them: as they were, afterwards
        owner = importlib.import_module(f"kvstored.rpc.{described}")
        monkeypatch.setattr(owner, "describe", owner.describe)
    target, examples = module.make(), module.seeds()
    try:
        for example in (*examples, *cases_of(name)):
            target(example)

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(near(examples))
        def check(data):
            target(data)

        check()
    finally:
        getattr(target, "close", lambda: None)()
