"""What goes below and what does not: the admission rule, and the budget of writes as it runs short.

Each tenant has a memory of its own of what it asked for: what one of them does decides nothing for
another, but that the budget is the drive's and so everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from kvstored.catalog.catalog import Entry, Space
from kvstored.policy.admission import MEMORY_KEYS, Admission, AdmitAll, Asked
from kvstored.policy.thrift import affords

OVER_BUDGET: Final = "not written to NVMe: the budget of writes has run short, and others were worth more"
NO_KEY: Final = "not written to NVMe: its tenant's blocks are to be encrypted, and the key is not there"

Left = tuple[int, int]
"""Bytes that may still be written today (negative: overdrawn), and those of a whole day."""


class Gate:
    """Decides block by block, without changing anything; `asked` tells it what it knows of them."""

    def __init__(
        self,
        rule: Admission | None = None,
        *,
        name: str = "admit_all",
        memory_keys: int = MEMORY_KEYS,
        budget: Callable[[], Left | None] = lambda: None,
        budgeted: bool = False,
    ) -> None:
        self._rule = rule or AdmitAll()
        self._refusal = f"not admitted to NVMe (policy.admission is {name})"
        # And what each is counted as.
        self.refusals = {self._refusal: "not_admitted", OVER_BUDGET: "shed", NO_KEY: "barred"}
        self._memory_keys = memory_keys
        self._budget = budget
        self._asked: dict[str, Asked] = {}
        self.barred: Collection[str] = ()  # set by the mover: tenants of whom nothing may go below
        self.open = isinstance(self._rule, AdmitAll) and not budgeted  # everything passes: nothing need be noted

    def asked(self, space: Space, hashes: Iterable[bytes]) -> None:
        """Blocks were put, or got: called where `open` is not set, once for all blocks of a call."""
        asked = self._asked.get(space.tenant)
        if asked is None:
            asked = self._asked[space.tenant] = Asked(self._memory_keys)
        asked.note(map(space.digest.__add__, hashes))

    def times_asked(self, entry: Entry) -> int:
        """How often a block was asked for lately."""
        asked = self._asked.get(entry.pool.space.tenant)
        return 0 if asked is None else asked.times(entry.pool.space.digest + entry.hash)

    def refusal(self, entry: Entry) -> str:
        """Why a block would not be written now; empty: it would."""
        if self.barred and entry.pool.space.tenant in self.barred:
            return NO_KEY
        if self.open:
            return ""
        times = self.times_asked(entry)
        if not self._rule.admits(times, entry.hint):
            return self._refusal
        left = self._budget()
        return OVER_BUDGET if left is not None and not affords(times, entry.hint, left[0] / left[1]) else ""

    def allowed(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those of the blocks that may go below at all, whatever rule and budget say."""
        if not self.barred:
            return list(entries)
        return [entry for entry in entries if entry.pool.space.tenant not in self.barred]

    def admitted(self, entries: Iterable[Entry], *, rule: bool = True) -> list[Entry]:
        """Those of the blocks that are to be written; without `rule` only the budget is asked.

        Each takes its part of the budget before the next is looked at.
        """
        entries = self.allowed(entries)
        if self.open:
            return entries
        left = self._budget()
        spent, admitted = 0, list[Entry]()
        for entry in entries:
            times = self.times_asked(entry)
            if rule and not self._rule.admits(times, entry.hint):
                continue
            if left is not None and not affords(times, entry.hint, (left[0] - spent) / left[1]):
                continue
            spent += entry.pool.slot_bytes
            admitted.append(entry)
        return admitted
