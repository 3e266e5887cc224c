"""Waiting for replies in threads: leader and followers.

The thread that waits first reads the socket, for all of them. It wakes the others as their
replies come, and when it has its own it hands the lead on. There is no reader thread, since
two thread switches cost more than a call.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from typing import Final

from kvstored_client.connection import Connection
from kvstored_client.errors import Timeout, Unavailable
from kvstored_client.tickets import Ticket

# A reply takes less than this mostly, and to be woken from sleep takes as long as the reply itself: a look-up
# of one block took 124 us sleeping and 73 us so (2-CPU virtual machine). Of a daemon that was idle for 20 ms, nothing
# of which is in any cache then, the reply to a get of 512 blocks takes 600 us.
SPIN_S: Final = 700e-6
# To have yielded for longer than this, and to find no answer then: others than the daemon want this CPU, which takes
# less for an answer. Who yields to them goes behind them, each time, while who sleeps and is woken goes before them.
# So it is not tried for a while.
CROWDED_S: Final = 500e-6
# The same where an answer has come by then: the daemon, if it was on this CPU, took less than this for it.
CROWDED_ANSWERED_S: Final = 1e-3
CROWDED_FOR_S: Final = 1.0
_POLL_MS_MAX: Final = 60_000
_SEND_POLL_MS: Final = 20


class ThreadedConnection(Connection):
    """A connection on which any number of threads wait."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._lead = threading.Lock()
        self._followers: dict[int, threading.Event] = {}  # by request id
        self._crowded_until_s = 0.0

    def result(self, ticket: Ticket, timeout_s: float) -> bytes:
        """The reply's body. Raises Timeout, or what ended the request."""
        if not ticket.done:
            self._wait(ticket, time.monotonic() + timeout_s, timeout_s)
        return ticket.result()

    def poke(self) -> None:
        """Take what has arrived, without waiting."""
        if self._lead.acquire(blocking=False):
            try:
                self.receive()
            finally:
                self._lead.release()  # here: what interrupts a call on its way would leave it held for good
                self._wake_one()

    def close(self) -> None:
        """End the connection, and close it when no thread waits on its socket any more."""
        self.fail(Unavailable("the client is closed"))
        with self._lead:
            super().close()

    def _wait(self, ticket: Ticket, deadline_s: float, timeout_s: float) -> None:
        while not ticket.done:
            if self._lead.acquire(blocking=False):
                try:
                    self._read_until(ticket, deadline_s)
                finally:
                    self._lead.release()  # here: what interrupts a call on its way would leave it held for good
                    self._wake_one()
            else:
                self._follow(ticket, deadline_s)
            if not ticket.done and time.monotonic() >= deadline_s:
                raise Timeout(f"no answer within {timeout_s:g} s")

    def _read_until(self, ticket: Ticket, deadline_s: float) -> None:
        spin_until_s = self._spin_until_s(ticket)
        while not ticket.done:
            left_ms = min((deadline_s - time.monotonic()) * 1000.0, _POLL_MS_MAX)
            if left_ms <= 0.0:
                return
            if self.unsent:
                self.flush()
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN | (select.POLLOUT if self.unsent else 0))
            if not self._spin(poll, spin_until_s):
                poll.poll(left_ms)
            self.receive()

    def _spin_until_s(self, ticket: Ticket) -> float:
        now = time.monotonic()
        return 0.0 if ticket.long or now < self._crowded_until_s else now + SPIN_S

    def _spin(self, poll: select.poll, until_s: float) -> bool:
        """Look for a while without sleeping; whether something came."""
        while (now := time.monotonic()) < until_s:
            if poll.poll(0):
                return True
            os.sched_yield()  # the daemon may have been put on this very CPU
            away_s = time.monotonic() - now
            if away_s > CROWDED_ANSWERED_S or (away_s > CROWDED_S and not poll.poll(0)):
                self._crowded_until_s = now + CROWDED_FOR_S
                break
        return False

    def _follow(self, ticket: Ticket, deadline_s: float) -> None:
        """Sleep until the reply is here, or the lead is free."""
        woken = threading.Event()
        ticket.wake = woken.set
        self._followers[ticket.request_id] = woken
        try:
            # In this order: a leader that leaves after this sees the new follower and wakes it.
            if ticket.done or not self._lead.locked():
                return
            self._send_as_follower(ticket, deadline_s)
            woken.wait(max(0.0, deadline_s - time.monotonic()))
        finally:
            self._followers.pop(ticket.request_id, None)
            ticket.wake = None
            if not self._lead.locked():
                self._wake_one()

    def _send_as_follower(self, ticket: Ticket, deadline_s: float) -> None:
        """Send what is left: the leader may sleep on, unaware that the socket was full."""
        while self.unsent and not ticket.done and self._lead.locked() and time.monotonic() < deadline_s:
            fd = self.fileno()
            if fd < 0:  # closed meanwhile
                return
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll(_SEND_POLL_MS)
            self.flush()

    def _wake_one(self) -> None:
        for woken in list(self._followers.values()):
            woken.set()
            return
