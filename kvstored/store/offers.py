"""Descriptors of engines' memory that came ahead of the registration that names them (see `OfferDescriptors`)."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Final

from kvstored_proto.frames import close_all

from kvstored.catalog.leases import Session

DESCRIPTORS_MAX: Final = 4096  # of one session, in registrations too
SHARE_OF_FILES: Final = 4  # all of them together: a fourth of what this process may have open


class Descriptors:
    """Descriptors that are closed once, by whoever ends what they are for."""

    def __init__(self, fds: list[int], budget: Budget) -> None:
        self.fds = fds
        self._budget = budget

    def close(self) -> None:
        """Close them; harmless when repeated."""
        fds, self.fds = self.fds, []
        self._budget.used -= len(fds)
        close_all(fds)


class Budget:
    """How many there are, and may be."""

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = soft // SHARE_OF_FILES if soft > 0 else DESCRIPTORS_MAX
        self.used = 0


class Offers:
    """By session, and by the client's own number of the memory that they are of."""

    def __init__(self) -> None:
        self._budget = Budget()
        self._offered: dict[Session, dict[int, Descriptors]] = {}

    def add(self, session: Session, memory: int, fds: Iterable[int]) -> None:
        """Take descriptors over. Past a limit they are closed, and the registration finds that some are missing."""
        listed = list(fds)
        mine = self._offered.setdefault(session, {})
        waiting = sum(len(each.fds) for each in mine.values())
        if (
            session.ended
            or waiting + len(listed) > DESCRIPTORS_MAX
            or self._budget.used + len(listed) > self._budget.limit
        ):
            close_all(listed)
            return
        self._budget.used += len(listed)
        mine.setdefault(memory, Descriptors([], self._budget)).fds.extend(listed)

    def take(self, session: Session, memory: int) -> Descriptors:
        """Those of a memory, which are the caller's now."""
        return self._offered.get(session, {}).pop(memory, None) or Descriptors([], self._budget)

    def end_session(self, session: Session) -> None:
        """Close what nobody asked for."""
        for descriptors in self._offered.pop(session, {}).values():
            descriptors.close()
