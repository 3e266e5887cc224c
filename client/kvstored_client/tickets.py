"""Requests that wait for their reply."""

from __future__ import annotations

from collections.abc import Callable

from kvstored_client.errors import KVStoredClientError

Late = Callable[[bytes], None]


class Ticket:
    """One request and what became of it."""

    __slots__ = ("body", "done", "error", "late", "long", "request_id", "settled", "wake")

    def __init__(self, request_id: int, late: Late | None, settled: Callable[[], None] | None) -> None:
        """`late` undoes what a reply gave that nobody waits for any more.

        `settled` is called when the reply comes, early or late, and not where the connection ends first.
        """
        self.request_id = request_id
        self.long = False  # the reply takes so long that its waiter sleeps at once
        self.late = late
        self.settled = settled
        self.body = b""
        self.error: KVStoredClientError | None = None
        self.done = False
        self.wake: Callable[[], None] | None = None

    def result(self) -> bytes:
        """The reply's body; raises what went wrong instead."""
        if self.error is not None:
            raise self.error
        return self.body

    def undo(self) -> None:
        """Give back what the reply gave, once. Raises DecodeError for one that makes no sense."""
        late, self.late = self.late, None
        if late is not None and self.error is None:
            late(self.body)
