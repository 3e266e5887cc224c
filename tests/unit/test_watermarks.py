import pytest

from kvstored.policy.watermarks import Watermarks

MARKS = Watermarks(high=0.9, low=0.7, batch=0.05)


@pytest.mark.parametrize(
    ("used", "active", "expected"),
    [
        (899, False, 0),  # under the high mark it waits
        (900, False, 50),
        (899, True, 50),  # once begun it goes on
        (730, True, 30),  # never below the low mark
        (700, True, 0),
        (0, True, 0),
        (1000, False, 50),
    ],
)
def test_demotion_starts_at_the_high_mark_and_ends_at_the_low_one(used, active, expected):
    assert MARKS.to_move_bytes(used, 1000, active) == expected


def test_demotion_started_at_the_high_mark_reaches_the_low_mark_exactly():
    used, steps, active = 951, 0, False
    while (step := MARKS.to_move_bytes(used, 1000, active)) > 0:
        used, steps, active = used - step, steps + 1, True
    assert used == 700
    assert steps == 6


def test_a_capacity_too_small_for_a_batch_still_moves_and_ends():
    assert MARKS.to_move_bytes(10, 10, False) == 1
    assert MARKS.to_move_bytes(0, 0, False) == 0


@pytest.mark.parametrize("marks", [{"high": 0.5, "low": 0.7}, {"high": 1.1}, {"low": -0.1}, {"batch": 0}, {"batch": 2}])
def test_marks_out_of_order_are_refused(marks):
    with pytest.raises(ValueError, match="watermark"):
        Watermarks(**marks)
