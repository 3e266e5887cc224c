"""Which blocks are worth a write to the tier below when DRAM lets go of them."""

from __future__ import annotations

from typing import Protocol


class Admission(Protocol):
    """Decides before a write below. It sheds stores, never loads.

    A rule that needs history (a budget of written bytes a day) keeps it and is told the time.
    """

    def admit(self, size_bytes: int, now: float) -> bool:
        """Whether to write a block of this size; True counts as written. `now` is in seconds."""
        ...


class AdmitAll:
    """Writes everything. Rules that wait for a second use lose most hits of chat workloads."""

    def admit(self, size_bytes: int, now: float) -> bool:
        """See `Admission`."""
        return True
