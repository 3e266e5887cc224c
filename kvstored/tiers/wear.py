"""What was written to one path's drive: today, this month, ever; and what of its budget is left.

Counted on the event loop, kept in the file `wear` beside the index. It is written rarely, each time with a
promise: so many bytes more may be written before it is written again. An orderly close takes the promise
back; after anything else it counts as written. So a kill makes the account up to one promise too high and
never too low by more than what follows a store (a footer and a commit of the index).

Days are the wall clock's, in UTC. One that is set back makes an earlier day's count grow; the total and
the budget do not go by it.
"""

from __future__ import annotations

import logging
import zlib
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec

from kvstored.clock import Clock
from kvstored.tiers.allowance import DAY_S, Allowance
from kvstored.tiers.path_wear import PathWear

FILE: Final = "wear"
DAYS_KEPT: Final = 62  # this month and the 30 days before today are among them
RATE_DAYS: Final = 30
PROMISE_BYTES_MAX: Final = 256 << 20
PROMISE_BYTES_MIN: Final = 1 << 20
PROMISES_PER_DAY: Final = 64  # of a budget: the account errs by no more than that part of a day's
_log = logging.getLogger(__name__)


class Kept(msgspec.Struct):
    """What the file says."""

    total_bytes: int = 0
    since_s: float = 0.0  # wall clock
    days: dict[str, int] = {}
    promised_bytes: int = 0
    at_s: float = 0.0  # wall clock, when it was written
    left_bytes: float | None = None  # of the budget, then


class WearMeter:
    """The account of one path."""

    def __init__(
        self, clock: Clock, kept: Kept | None = None, *, budget_bytes: int = 0, endurance_bytes: int = 0
    ) -> None:
        self._clock = clock
        self._kept = kept or Kept(since_s=clock.wall())
        self._endurance_bytes = endurance_bytes
        self._promised_bytes = 0  # above the total at which the file has to be written again
        self._allowance: Allowance | None = None
        lost_bytes, self._kept.promised_bytes = self._kept.promised_bytes, 0
        if budget_bytes:
            self._allowance = Allowance(budget_bytes, clock.monotonic(), self._left_now(budget_bytes))
            self._promise = min(PROMISE_BYTES_MAX, max(PROMISE_BYTES_MIN, budget_bytes // PROMISES_PER_DAY))
        else:
            self._promise = PROMISE_BYTES_MAX
        self.wrote(lost_bytes)

    def _left_now(self, budget_bytes: int) -> float | None:
        """What is left of the budget after the time that nobody ran; a clock set back refills nothing."""
        kept = self._kept
        if kept.left_bytes is None:
            return None
        return kept.left_bytes + max(0.0, self._clock.wall() - kept.at_s) * budget_bytes / DAY_S

    # --- counting ---

    def wrote(self, size_bytes: int) -> None:
        """So many bytes went to the drive."""
        if not size_bytes:
            return
        self._kept.total_bytes += size_bytes
        today = self._today().isoformat()
        self._kept.days[today] = self._kept.days.get(today, 0) + size_bytes
        for day in sorted(self._kept.days)[:-DAYS_KEPT]:
            del self._kept.days[day]
        if self._allowance is not None:
            self._allowance.spend(size_bytes, self._clock.monotonic())

    def _today(self) -> date:
        return datetime.fromtimestamp(self._clock.wall(), UTC).date()

    # --- the file ---

    def overdue(self, size_bytes: int) -> bool:
        """Whether the file has to be written before so many bytes are."""
        return self._kept.total_bytes + size_bytes > self._promised_bytes

    def pack(self, size_bytes: int | None = None) -> tuple[bytes, int]:
        """What to write, for so many bytes and the next promise (None: exactly what was written), and up to where."""
        promised = 0 if size_bytes is None else size_bytes + self._promise
        self._kept.at_s = self._clock.wall()
        left = None if self._allowance is None else self._allowance.left_bytes(self._clock.monotonic())
        kept = msgspec.structs.replace(self._kept, promised_bytes=promised, left_bytes=left)
        body = msgspec.json.encode(kept)
        return body + b"\n%08x\n" % zlib.crc32(body), self._kept.total_bytes + promised

    def saved(self, up_to_bytes: int) -> None:
        """It is in the file."""
        self._promised_bytes = max(self._promised_bytes, up_to_bytes)

    # --- asked ---

    def left(self) -> tuple[int, int] | None:
        """Bytes of the budget that are left (negative: overdrawn), and those of a whole day; None: no budget."""
        if self._allowance is None:
            return None
        return self._allowance.left_bytes(self._clock.monotonic()), self._allowance.bytes_per_day

    def report(self, number: int, path: str) -> PathWear:
        """For people."""
        today, days = self._today(), self._kept.days
        first = (today - timedelta(days=RATE_DAYS - 1)).isoformat()
        since_s = self._kept.since_s
        left = self.left() or (0, 0)
        return PathWear(
            number=number,
            path=path,
            today_bytes=days.get(today.isoformat(), 0),
            month_bytes=sum(count for day, count in days.items() if day[:7] == today.isoformat()[:7]),
            total_bytes=self._kept.total_bytes,
            since_s=since_s,
            recent_bytes=sum(count for day, count in days.items() if first <= day <= today.isoformat()),
            recent_s=min(RATE_DAYS * DAY_S, max(0.0, self._clock.wall() - since_s)),
            endurance_bytes=self._endurance_bytes,
            budget_bytes_per_day=left[1],
            budget_left_bytes=left[0],
        )


def unpack(data: bytes | None, path: Path) -> Kept | None:
    """What a file says; None where there is none. One that is damaged is said to be, and not believed."""
    if not data:
        return None
    body, _, crc = data.removesuffix(b"\n").rpartition(b"\n")
    try:
        if int(crc, 16) == zlib.crc32(body):
            return msgspec.json.decode(body, type=Kept)
    except ValueError:  # msgspec's errors are of that kind too
        pass
    _log.error("%s is damaged: what was written to this drive is counted from now on", path)
    return None
