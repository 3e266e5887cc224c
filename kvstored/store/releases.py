"""Releases that clients post in their session pages, and when the daemon looks for them.

It looks before it serves what the order of releases matters to, so that a client's own calls find
its releases done; when somebody finds no room or is at a limit, in all pages; when a session ends;
and, while leases are held, by a timer. Gets and lookups do not wait for that: what they answer is
the same, and they answer sooner. Long work is done in turns, so that the loop is not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvstored_proto.page import Taker

from kvstored.catalog.leases import Session
from kvstored.errors import DeviceError
from kvstored.store.endings import BLOCKS_PER_TURN
from kvstored.store.parts import Parts
from kvstored.store.reads import Reads
from kvstored.tiers.session_page import SessionPage

LOOK_EVERY_S: Final = 0.01


class PostedReleases:
    """The session pages and their timer."""

    def __init__(self, parts: Parts, reads: Reads) -> None:
        self._counters = parts.counters
        self._reads = reads
        self._takers: dict[Session, Taker] = {}
        self._corrupt: set[Session] = set()
        self._next_look: asyncio.Handle | None = None
        self._ended = 0
        # Set by the transport: told once of a session whose page makes no sense.
        self.on_corrupt: Callable[[Session], None] = lambda session: None

    # ---- pages ----

    def open_page(self, session: Session) -> None:
        """Give a session its page. Where there is no memory for one, it goes without and releases by frames."""
        try:
            session.page = SessionPage()
        except DeviceError:
            self._counters["session_pages_refused"] += 1
            return
        self._takers[session] = Taker(session.page.memory)

    def close_page(self, session: Session) -> None:
        """Give a session's page back, if it has one."""
        taker = self._takers.pop(session, None)
        if taker is None:
            return
        assert session.page is not None, "its taker reads it"
        self._corrupt.discard(session)
        taker.close()
        session.page.close()

    # ---- taking ----

    def take(self, session: Session) -> bool:
        """End leases that a session has posted, a turn's worth; whether nothing is left.

        Unknown ids are passed over. Where the page makes no sense, what the session holds stays until it
        is released by frame or the session ends. What ended and still holds its blocks is left, too.
        """
        if session.group.ending_leases:
            return False
        taker = self._takers.get(session)
        return taker is None or self._take(session, taker, BLOCKS_PER_TURN) > 0

    def take_any(self) -> bool:
        """Give back what leases held that ended or whose release is posted, a turn's worth; whether there was any."""
        if self._reads.ends.take():
            return True
        before = self._ended
        for session in self._takers:
            self.take(session)
            if self._ended > before:
                return True
        return False

    def take_all(self) -> None:
        """End all that is posted."""
        for session in self._takers:
            self.finish(session)

    def finish(self, session: Session) -> None:
        """End all that a session has posted until now: one look, since it may post on and on."""
        taker = self._takers.get(session)
        if taker is not None:
            self._end(session, taker.take())

    def _take_from_all(self) -> int:
        left = BLOCKS_PER_TURN
        for session, taker in self._takers.items():
            left = self._take(session, taker, left)
            if left <= 0:
                self._takers[session] = self._takers.pop(session)  # the next turn begins with another
                break
        return left

    def _take(self, session: Session, taker: Taker, budget_blocks: int) -> int:
        """What is left of the budget; nothing: there may be more to take."""
        held = session.group.leases
        while budget_blocks > 0:
            lease_ids = taker.take(1)
            if lease_ids:
                lease = held.get(lease_ids[0])
                budget_blocks -= len(lease.entries) if lease is not None else 1
            self._end(session, lease_ids)
            if not lease_ids:
                break
        return budget_blocks

    def _end(self, session: Session, lease_ids: list[int] | None) -> None:
        if lease_ids is None:
            self._note_corrupt(session)
        elif lease_ids:
            self._ended += self._reads.release(session, lease_ids)

    def _note_corrupt(self, session: Session) -> None:
        self._counters["session_pages_corrupt"] += 1
        if session not in self._corrupt:
            self._corrupt.add(session)
            self.on_corrupt(session)

    # ---- the timer ----

    def watch(self) -> None:
        """A lease was handed out: look for its release from time to time, until none is left."""
        if self._next_look is None and self._takers:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        if self._take_from_all() <= 0:
            self._next_look = asyncio.get_running_loop().call_soon(self._look)
        elif any(session.group.leases for session in self._takers):
            self.watch()
