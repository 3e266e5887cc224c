"""Which stores are shed as a day's budget of writes runs short: the least valuable first."""

from __future__ import annotations

from typing import Final

from kvstored.policy.admission import ASKED_MAX, REUSED

NOTHING: Final = ASKED_MAX + 1  # more than any block is asked for
# Share of a day's budget that is left -> how often a block must have been asked for to be written.
STEPS: Final = ((0.5, 0), (0.25, REUSED), (0.1, REUSED + 1))


def least_asked(left_share: float) -> int:
    """How often a block must have been asked for, with this share of a day's budget left.

    All down to a half of it; then blocks that were used again since they were put; then those used more and
    more often; without any left, none. It rises as the budget falls, so that a load that asks for more than
    there is settles where what is still written is what the budget refills.
    """
    if left_share <= 0:
        return NOTHING
    return next((least for share, least in STEPS if left_share >= share), ASKED_MAX)


def affords(times_asked: int, hinted: bool, left_share: float) -> bool:
    """Whether to write a block; one that a hint says will come back is worth as much as one that did."""
    return (max(times_asked, REUSED) if hinted else times_asked) >= least_asked(left_share)
