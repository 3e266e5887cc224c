"""How a thread waits for a reply: awake for a moment, unless others want its CPU."""

import os
import socket
import time

import pytest
from kvstored_client import waiting
from kvstored_client.connection import Ticket


@pytest.fixture
def connection():
    ours, theirs = socket.socketpair()
    made = waiting.ThreadedConnection(ours)
    yield made
    made.close()
    theirs.close()


class Poll:
    """Finds an answer at its so-manieth look."""

    def __init__(self, answered_at=0):
        self.looks, self.answered_at = 0, answered_at

    def poll(self, timeout_ms):
        assert timeout_ms == 0, "a look, and no sleep"
        self.looks += 1
        return bool(self.answered_at) and self.looks >= self.answered_at


def soon():
    return time.monotonic() + 60.0


def test_who_waits_looks_for_a_while(connection, monkeypatch):
    monkeypatch.setattr(waiting, "CROWDED_S", 60.0)  # nothing is, whatever else runs beside this test
    monkeypatch.setattr(waiting, "CROWDED_ANSWERED_S", 60.0)
    assert connection._spin(Poll(answered_at=5), soon())
    assert not connection._spin(Poll(), time.monotonic() + 0.001)
    before_s = time.monotonic()
    assert connection._spin_until_s(Ticket(1, None, None)) > before_s


def test_who_yielded_to_others_than_the_daemon_sleeps_and_does_not_try_again_soon(connection, monkeypatch):
    monkeypatch.setattr(os, "sched_yield", lambda: time.sleep(2 * waiting.CROWDED_S))
    monkeypatch.setattr(waiting, "CROWDED_ANSWERED_S", 60.0)
    monkeypatch.setattr(waiting, "CROWDED_FOR_S", 60.0)
    poll = Poll()
    assert not connection._spin(poll, soon())
    assert poll.looks == 2, "before and after it yielded"
    assert connection._spin_until_s(Ticket(1, None, None)) == 0.0
    monkeypatch.setattr(waiting, "CROWDED_FOR_S", -1.0)
    connection._spin(Poll(), soon())
    assert connection._spin_until_s(Ticket(1, None, None)) > 0.0, "that was a while ago"


def test_who_yielded_to_the_daemon_goes_on_looking_next_time(connection, monkeypatch):
    monkeypatch.setattr(os, "sched_yield", lambda: time.sleep(2 * waiting.CROWDED_S))
    monkeypatch.setattr(waiting, "CROWDED_ANSWERED_S", 60.0)
    assert connection._spin(Poll(answered_at=2), soon())
    assert connection._spin_until_s(Ticket(1, None, None)) > 0.0


def test_who_yielded_for_longer_than_an_answer_takes_sleeps_next_time_though_there_is_one(connection, monkeypatch):
    monkeypatch.setattr(os, "sched_yield", lambda: time.sleep(2 * waiting.CROWDED_ANSWERED_S))
    monkeypatch.setattr(waiting, "CROWDED_FOR_S", 60.0)
    assert not connection._spin(Poll(answered_at=2), soon()), "the answer is there, and taken without another look"
    assert connection._spin_until_s(Ticket(1, None, None)) == 0.0


def test_the_answer_to_a_long_request_is_slept_for(connection):
    ticket = Ticket(1, None, None)
    ticket.long = True
    assert connection._spin_until_s(ticket) == 0.0
