"""Who keeps the memory of the DRAM tier while no daemon runs.

A service manager holds descriptors for the process that it starts next; so does `kvstored
--supervise`. The tier needs no more of either than what stands here.
"""

from __future__ import annotations

from typing import Protocol


class Keeper(Protocol):
    """Keeps descriptors of this process beyond its end. Names are ASCII, without colons, unique."""

    def inherited(self) -> dict[str, int]:
        """Descriptors that an earlier process left, by name; the caller owns them from then on, and asks once.

        They stay kept for the next process until they are dropped.
        """
        ...

    def keep(self, name: str, fd: int) -> bool:
        """Have a descriptor kept; returns when it is. False: it is not (nobody keeps any, or its store is full).

        Blocks for a round trip: for threads.
        """
        ...

    def drop(self, name: str) -> None:
        """Have a descriptor kept no longer; one that was not is fine."""
        ...


class NoKeeper:
    """Nobody keeps anything: what is in DRAM ends with the process."""

    def inherited(self) -> dict[str, int]:
        """None."""
        return {}

    def keep(self, name: str, fd: int) -> bool:
        """Not kept."""
        return False

    def drop(self, name: str) -> None:
        """Nothing to do."""
