"""What is known of hinted blocks, and how far those who hint are believed."""

from __future__ import annotations

from typing import Final

import msgspec

PRIORITY_MAX: Final = 3
INNER, FIRST, LAST, HARD = range(4)  # where a hinted block stands


class Trust:
    """How often `final` was wrong lately. Above `WRONG_MAX` it has no effect, but is still watched."""

    WRONG_MAX: Final = 0.2
    WEIGHT: Final = 1 / 64  # of one block

    def __init__(self) -> None:
        self.wrong_share = 0.0

    def note(self, *, wrong: bool) -> None:
        """A block of which it was said was asked for again, or was not for a long time."""
        self.wrong_share += self.WEIGHT * (wrong - self.wrong_share)

    @property
    def earned(self) -> bool:
        """Whether it is to be believed."""
        return self.wrong_share <= self.WRONG_MAX


class Hint(msgspec.Struct, gc=False):
    """What is known of one hinted block. Times are those of whoever hints; 0: not pinned so."""

    place: int = INNER
    uses: int = 0  # while it is in a ring of ours
    hard_until_s: float = 0.0
    soft_until_s: float = 0.0
    priority: int = 0
    final: bool = False
    held: bool = False  # when `final` was said: the end of that hold is not a use

    @property
    def where(self) -> int:
        """Where it belongs by its pins."""
        return HARD if self.hard_until_s else LAST if self.soft_until_s else INNER

    @property
    def empty(self) -> bool:
        """Whether nothing is left to know."""
        return not (self.hard_until_s or self.soft_until_s or self.priority or self.final)
