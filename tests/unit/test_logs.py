from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvstored.reporting import logs


class SteppedClock:
    """Time that goes on when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_json_line_has_the_event_its_fields_its_level_and_its_logger(capsys):
    logs.configure("json", "info")
    logs.get_logger("kvstored.x").info("serving", sessions=3)
    (line,) = lines(capsys.readouterr().err)
    assert line.pop("timestamp")
    assert line == {"event": "serving", "sessions": 3, "level": "info", "logger": "kvstored.x"}


def test_text_is_one_line_for_people(capsys):
    logs.configure("text", "info")
    logs.get_logger("kvstored.x").warning("tier is off", tier="nvme")
    (line,) = capsys.readouterr().err.splitlines()
    assert "tier is off" in line
    assert "tier=nvme" in line


def test_lines_below_the_level_are_not_written(capsys):
    logs.configure("json", "warning")
    log = logs.get_logger("kvstored.x")
    log.info("quiet")
    log.warning("loud")
    assert [line["event"] for line in lines(capsys.readouterr().err)] == ["loud"]


def test_a_logger_made_before_the_configuration_follows_it(capsys):
    log = logs.get_logger("kvstored.early")
    logs.configure("json", "error")
    log.warning("quiet")
    logs.configure("json", "info")
    log.warning("loud")
    assert [line["event"] for line in lines(capsys.readouterr().err)] == ["loud"]


def test_lines_of_libraries_come_in_the_same_form(capsys):
    logs.configure("json", "info")
    logging.getLogger("grpc").warning("channel %s closed", "x")
    (line,) = lines(capsys.readouterr().err)
    assert (line["event"], line["logger"], line["level"]) == ("channel x closed", "grpc", "warning")


def test_an_exception_is_one_json_line_with_its_traceback(capsys):
    logs.configure("json", "info")
    try:
        raise ValueError("broken")
    except ValueError:
        logs.get_logger("kvstored.x").error("failed", exc_info=True)
    (line,) = lines(capsys.readouterr().err)
    assert "ValueError: broken" in str(line["exception"])


def test_a_token_that_is_logged_all_the_same_is_blanked(capsys):
    logs.configure("json", "info")
    logs.get_logger("kvstored.x").info("session", token="hunter2")
    assert "hunter2" not in capsys.readouterr().err


def test_a_throttle_lets_one_through_per_interval_and_counts_the_rest():
    clock = SteppedClock()
    with structlog.testing.capture_logs() as seen:
        throttle = logs.Throttle(structlog.get_logger(), interval_s=10, clock=clock)
        assert [throttle.warning("slow", client="a") for _ in range(4)] == [True, False, False, False]
        assert throttle.warning("other")
        clock.now_s = 10.0
        assert throttle.warning("slow", client="b")
    assert [(line["event"], line.get("held_back")) for line in seen] == [("slow", None), ("other", None), ("slow", 3)]


def test_a_throttle_keeps_a_bounded_number_of_events():
    throttle = logs.Throttle(structlog.get_logger(), clock=SteppedClock())
    with structlog.testing.capture_logs():
        for number in range(10 * logs.THROTTLED_EVENTS_MAX):
            throttle.warning(f"event {number}")
            throttle.warning(f"event {number}")
    assert len(throttle._next_s) <= logs.THROTTLED_EVENTS_MAX
    assert len(throttle._held_back) <= logs.THROTTLED_EVENTS_MAX
