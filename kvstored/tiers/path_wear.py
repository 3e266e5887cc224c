"""What is said of the wear of one path's drive."""

from __future__ import annotations

import msgspec


class PathWear(msgspec.Struct, frozen=True):
    """What was written to one path's drive, and what it takes. Days are in UTC; 0 is unknown, or none."""

    number: int
    path: str
    today_bytes: int
    month_bytes: int  # this calendar month
    total_bytes: int
    since_s: float  # wall clock, when counting began
    recent_bytes: int  # in the last 30 days
    recent_s: float  # how long of these was counted
    endurance_bytes: int
    budget_bytes_per_day: int
    budget_left_bytes: int  # negative: overdrawn
    # Since the daemon started: blocks as they were put, those that were written again, and everything.
    stored_bytes: int = 0
    reinserted_bytes: int = 0
    written_bytes: int = 0
