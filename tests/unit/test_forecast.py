"""The forecast: a decayed rate against the time that a batch takes."""

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.policy.forecast import Forecast
from kvstored.policy.watermarks import Watermarks

MARKS = Watermarks(high=0.9, low=0.7, batch=0.05)


def fed(rate, seconds, half_life_s=5.0):
    forecast = Forecast(half_life_s)
    for step in range(seconds * 10 + 1):
        forecast.taken(rate * step // 10, step / 10)
    return forecast


def test_a_steady_rate_is_found_and_is_gone_after_some_half_lives():
    forecast = fed(1000, 60)
    assert forecast.rate_bytes_per_s(60.0) == pytest.approx(1000, rel=0.02)
    assert forecast.rate_bytes_per_s(65.0) == pytest.approx(500, rel=0.02)
    assert forecast.rate_bytes_per_s(160.0) < 1


def test_what_comes_is_the_rate_times_how_long_a_batch_takes():
    forecast = fed(1000, 60)
    assert forecast.coming_bytes(500, 60.0) == 0  # nobody knows yet how long it takes
    forecast.demoted(100, 1.0)
    assert forecast.coming_bytes(500, 60.0) == pytest.approx(5000, rel=0.02)
    for _ in range(50):  # the device became four times as fast
        forecast.demoted(400, 1.0)
    assert forecast.coming_bytes(500, 60.0) == pytest.approx(1250, rel=0.02)


def test_what_was_there_before_the_first_look_is_no_rate():
    forecast = Forecast()
    forecast.taken(1 << 40, 100.0)
    assert forecast.rate_bytes_per_s(100.0) == 0


def test_a_burst_counts_at_once_and_by_its_size():
    forecast = Forecast(5.0)
    forecast.taken(0, 0.0)
    forecast.taken(1000, 0.0)
    assert forecast.rate_bytes_per_s(0.0) == pytest.approx(1000 * log(2) / 5)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(-10, 100)), max_size=30))
def test_the_rate_is_never_negative_and_a_clock_that_goes_back_stands_still(events):
    forecast, total, now = Forecast(), 0, 50.0
    forecast.taken(0, now)
    for bytes_, elapsed in events:
        total, now = total + bytes_, now + elapsed
        forecast.taken(total, now)
        forecast.demoted(bytes_, max(0.0, elapsed))
        assert forecast.rate_bytes_per_s(now) >= 0
        assert forecast.rate_bytes_per_s(now) <= total * log(2) / 5 + 1e-6
        assert forecast.coming_bytes(1000, now) >= 0


@pytest.mark.parametrize("half_life_s", [0, -1, float("nan")])
def test_a_half_life_must_be_over_nothing(half_life_s):
    with pytest.raises(ValueError, match="half-life"):
        Forecast(half_life_s)


@pytest.mark.parametrize(
    ("used", "coming", "expected"),
    [
        (800, 0, 0),
        (800, 100, 0),  # that would just reach the high mark
        (800, 120, 20),  # only what would be over it
        (800, 900, 50),  # a batch at most
        (710, 900, 10),  # and never below the low mark
        (700, 900, 0),
        (100, 5000, 0),
    ],
)
def test_ahead_of_time_goes_what_would_be_over_the_high_mark(used, coming, expected):
    assert MARKS.ahead_bytes(used, 1000, coming) == expected
