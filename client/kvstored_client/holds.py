"""What a client holds, over the end of its connection: leases that a restarted daemon still keeps for it.

Finalizers release, in any thread and at any point, so nothing here waits for a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstored_proto.v1 import kvstored_pb2 as pb

if TYPE_CHECKING:
    from kvstored_client.connection import Connection


class Hold:
    """Leases in use here, and the connection by which they are held now."""

    __slots__ = ("connection", "lease_ids", "released")

    def __init__(self, connection: Connection, lease_ids: list[int]) -> None:
        self.connection = connection
        self.lease_ids = lease_ids
        self.released = False
        connection.holds[id(self)] = self

    def release(self) -> None:
        """End the leases; harmless when repeated, and on a connection that has ended."""
        self.released = True  # before the connection is read: see `move`
        self.forget()
        post_release(self.connection, self.lease_ids)

    def forget(self) -> None:
        """The leases are somebody else's from now on."""
        self.connection.holds.pop(id(self), None)

    def move(self, connection: Connection) -> None:
        """The leases are held by another connection now."""
        self.forget()
        self.connection = connection
        connection.holds[id(self)] = self
        if self.released:  # meanwhile, by the connection that has ended
            self.release()


class Left(NamedTuple):
    """What was in use when a session ended without the client's doing."""

    holds: dict[int, Hold]

    def in_use(self) -> list[int]:
        """The leases that are, still."""
        return [i for hold in list(self.holds.values()) if not hold.released for i in hold.lease_ids]

    def resume(self, connection: Connection, lease_ids: Sequence[int]) -> None:
        """The daemon still holds these; all others have ended."""
        resumed = set(lease_ids)
        for hold in list(self.holds.values()):
            if resumed.issuperset(hold.lease_ids):
                hold.move(connection)
                resumed.difference_update(hold.lease_ids)
        if resumed:  # released here since they were asked for
            post_release(connection, list(resumed))


def post_release(connection: Connection, lease_ids: list[int]) -> None:
    """End leases. Never waits; harmless on a connection that has ended."""
    page = connection.page  # not there in a fork, whose connection has an error
    if page is None or connection.error is not None or not page.post(lease_ids):
        connection.post(pb.OPERATION_RELEASE, pb.ReleaseRequest(lease_ids=lease_ids))
