"""How long blocks are kept: what a put asks for, and what becomes of it for one block.

Ends are times of the wall clock, because they outlast the process, in steps of an eighth of a second,
rounded down: a block is never there after its end. `EndClock` tells whether it has come.
"""

from __future__ import annotations

from typing import Final, Self

import msgspec

from kvstored.clock import Clock
from kvstored.errors import InvalidArgument

STEPS_PER_S: Final = 8
SLIDING_S_MAX: Final = (1 << 24) - 1  # 194 days: it has three bytes in every record
TTL_S_MAX: Final = 100 * 365 * 86_400
_SLIDING_BITS: Final = 24
_LIMIT_MAX: Final = (1 << 32) - 1


class Lifetime(msgspec.Struct, frozen=True):
    """What a put asks for: so long from the put, or, `sliding`, from the last use."""

    ttl_s: float
    sliding: bool = False

    def check(self) -> None:
        """Raises InvalidArgument where it cannot be kept."""
        if not 0 < self.ttl_s <= TTL_S_MAX:
            raise InvalidArgument(f"a TTL of {self.ttl_s} s: more than 0 and at most {TTL_S_MAX} are allowed")
        if self.sliding and not 1 <= self.ttl_s <= SLIDING_S_MAX:
            raise InvalidArgument(f"a sliding TTL of {self.ttl_s} s: 1 to {SLIDING_S_MAX} are allowed")


class Expiry(msgspec.Struct, frozen=True, gc=False):
    """When a block ends: at `expires_s`, or, where `sliding_s` is not 0, so long after its last use.

    No use moves it beyond `limit_s` (0: no limit).
    """

    expires_s: float
    sliding_s: int = 0
    limit_s: int = 0

    @property
    def word(self) -> int:
        """End and sliding TTL in 64 bits; never 0."""
        return int(self.expires_s * STEPS_PER_S) << _SLIDING_BITS | self.sliding_s

    @classmethod
    def of(cls, word: int, limit_s: int) -> Self | None:
        """What `word` and a limit say; None: it does not end."""
        if not word:
            return None
        return cls((word >> _SLIDING_BITS) / STEPS_PER_S, word & SLIDING_S_MAX, limit_s)

    def at(self, expires_s: float) -> Expiry:
        """The same with its end there, or at its limit."""
        return Expiry(step_down(min(expires_s, self.limit_s or expires_s)), self.sliding_s, self.limit_s)


def step_down(wall_s: float) -> float:
    """The step that a time lies in; exact in binary."""
    return int(wall_s * STEPS_PER_S) / STEPS_PER_S


def expiry_of(lifetime: Lifetime | None, max_age_s: float, now_s: float) -> Expiry | None:
    """When a block ends that is put now; `max_age_s` is its tenant's, 0 where there is none."""
    limit_s = min(int(now_s + max_age_s), _LIMIT_MAX) if max_age_s else 0
    if lifetime is None:
        return Expiry(float(limit_s)) if limit_s else None
    expires_s = min(now_s + lifetime.ttl_s, limit_s or _LIMIT_MAX)
    if not lifetime.sliding:
        return Expiry(step_down(expires_s))
    return Expiry(step_down(expires_s), int(lifetime.ttl_s), limit_s)


def capped(expiry: Expiry | None, end_s: float) -> Expiry | None:
    """The same, but no later than `end_s` (0: as it is)."""
    if not end_s:
        return expiry
    if expiry is None:
        return Expiry(step_down(end_s))
    limit_s = min(int(end_s), expiry.limit_s or _LIMIT_MAX) if expiry.sliding_s else 0
    return Expiry(step_down(min(expiry.expires_s, end_s)), expiry.sliding_s, limit_s)


class EndClock:
    """The wall clock as far as it goes forward: set back, it goes on at its pace, and no block lives longer for it.

    Set forward, what has an end by then is over. A clock that is set back between two lives of the daemon
    prolongs by as much.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_s = clock.wall() - clock.monotonic()  # of the wall clock, when it began

    def now_s(self) -> float:
        """Seconds since the epoch."""
        return max(self._clock.wall(), self._clock.monotonic() + self._ahead_s)
