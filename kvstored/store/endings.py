"""The ends of leases: what they held is given back, in turns where it is much.

A client that dies may leave thousands of leases of thousands of blocks. Giving all of that back in
one go would keep the event loop for seconds; nobody but whoever needs the room waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from kvstored.catalog.leases import Group, Lease
from kvstored.store.lease_notes import LeaseNotes
from kvstored.store.parts import Parts

BLOCKS_PER_TURN: Final = 512  # given back in one go, or as many as the last lease has more


class LeaseEnds:
    """Leases that are no longer in their group, until their blocks are given back: first come, first ended."""

    def __init__(self, parts: Parts, notes: LeaseNotes) -> None:
        self._parts = parts
        self._notes = notes
        self._waiting: deque[tuple[Group, Lease, Callable[[], None] | None]] = deque()
        self._next_turn: asyncio.Handle | None = None

    def add(self, group: Group, leases: Sequence[Lease], on_ended: Callable[[], None] | None = None) -> None:
        """End leases that were a group's: at once, but for what is more than a turn's worth; then `on_ended`."""
        last = len(leases) - 1
        self._waiting.extend((group, lease, on_ended if i == last else None) for i, lease in enumerate(leases))
        if on_ended is not None and not leases:
            on_ended()
        group.ending_leases += len(leases)
        if self._next_turn is None:
            self._turn()

    def take(self) -> bool:
        """A turn's worth, for somebody who needs the room now; whether there was any."""
        left, any_waiting = BLOCKS_PER_TURN, bool(self._waiting)
        while self._waiting and left > 0:
            group, lease, on_ended = self._waiting.popleft()
            group.ending_leases -= 1
            if lease.place:
                self._notes.ended([lease])
            self._parts.catalog.pin(lease.space.tenant, lease.runs, len(lease.entries), more=-1)
            self._parts.room.unlease(lease)
            left -= len(lease.entries)
            if on_ended is not None:
                on_ended()
        if any_waiting and self._parts.below is not None:
            self._parts.below.mover.kick()
        return any_waiting

    def _turn(self) -> None:
        self._next_turn = None
        self.take()
        if self._waiting:
            self._next_turn = asyncio.get_running_loop().call_soon(self._turn)
