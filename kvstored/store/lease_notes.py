"""Noting leases for the daemon that comes after this one (see `tiers.lease_ledger`).

Only those of local sessions: who reads over gRPC has a copy. Where nobody keeps the memory, or
the session could not be noted, none of this costs anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstored.catalog.leases import Lease, Session
from kvstored.device.processes import start_ticks
from kvstored.tiers.dram import DramTier
from kvstored.tiers.lease_ledger import NotedSession


class LeaseNotes:
    """What goes into the ledger, and when."""

    def __init__(self, dram: DramTier) -> None:
        self._dram = dram

    def opened(self, session: Session) -> None:
        """A session is open: it may lease from now on."""
        ledger, caller = self._dram.ledger, session.caller
        if ledger is not None and caller.transport == "session":
            group = session.group
            session.place = ledger.note_session(
                NotedSession(
                    session_id=session.session_id,
                    client_id=session.client_id,
                    group_key=group.key,
                    group_id=group.group_id,
                    tenant=caller.tenant,
                    pid=caller.pid,
                    started=start_ticks(caller.pid),
                    uid=caller.uid,
                )
            )

    def closed(self, session: Session) -> None:
        """A session has ended."""
        if session.place:
            self.void(session.place)
            session.place = 0

    def leased(self, session: Session, leases: Sequence[Lease]) -> bool:
        """Leases are about to be handed out. False: they must not be, there is no room to note them."""
        ledger, key = self._dram.ledger, session.group.key
        assert ledger is not None, "its session is noted there"
        for lease in leases:
            lease.place = ledger.note_lease(lease.lease_id, key, lease.space.digest, lease.runs)
        if all(lease.place for lease in leases):
            return True
        self.ended(leases)
        return False

    def ended(self, leases: Sequence[Lease]) -> None:
        """Leases have ended; what they held is given back after this."""
        for lease in leases:
            if lease.place:
                self.void(lease.place)
                lease.place = 0

    def void(self, place: int) -> None:
        """An entry is void from now on."""
        ledger = self._dram.ledger
        assert ledger is not None, "it is noted there"
        ledger.void(place)

    def freeze(self) -> None:
        """The daemon stops: what is leased now stays noted."""
        if self._dram.ledger is not None:
            self._dram.ledger.freeze()
