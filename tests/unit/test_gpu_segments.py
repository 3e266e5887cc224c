"""Pinning ahead, as the daemon asks for it."""

import asyncio
import os

import pytest

from kvstored.device.worker_messages import Pin, Segment
from kvstored.testing.waiting import until
from kvstored.tiers import gpu_segments


class Tier:
    """Segments with numbers only."""

    capacity_bytes = 4096

    def __init__(self, numbers):
        self.numbers = set(numbers)

    def segments(self):
        return [type("Segment", (), {"segment_id": number}) for number in self.numbers]

    def in_service(self, number):
        return number in self.numbers

    def writable_fd(self, number):
        return self.fd

    def segment_bytes(self, number):
        return 1024


class Worker:
    def __init__(self):
        self.sent_segments, self.said, self.answers = set(), [], {}
        self.alive, self.gone = True, asyncio.Event()
        self.why_not_pinned, self.pins_ahead_bytes = "", 0

    def send(self, message, fds):
        os.close(*fds)
        self.said.append(message)

    async def ask(self, message, *_):
        await asyncio.sleep(0)
        self.said.append(message)
        return self.answers.get(message.segment_id, "")

    def end(self):
        self.alive = False
        self.gone.set()


@pytest.fixture
def tier():
    made = Tier([1, 2])
    made.fd = os.memfd_create("segment")
    yield made
    os.close(made.fd)


async def said(worker, count):
    await until(lambda: len(worker.said) >= count)
    return worker.said


async def test_segments_that_come_later_are_pinned_too_and_each_is_asked_for_once(tier, monkeypatch):
    monkeypatch.setattr(gpu_segments, "LOOK_EVERY_S", 0.001)
    worker = Worker()
    worker.sent_segments.add(2)  # a transfer needed it
    pinning = asyncio.ensure_future(gpu_segments.pin_ahead(tier, worker))
    assert await said(worker, 3) == [Segment(1, 1024), Pin(1), Pin(2)]
    tier.numbers = {2, 3}  # one changed hands: its memory comes back as another
    assert (await said(worker, 5))[3:] == [Segment(3, 1024), Pin(3)]
    await asyncio.sleep(0.01)
    assert len(worker.said) == 5
    assert worker.pins_ahead_bytes == 4096
    worker.end()
    await pinning


async def test_it_ends_with_an_error_of_a_segment_that_is_in_service(tier, monkeypatch):
    worker = Worker()
    worker.answers = {1: "no such luck"}
    await gpu_segments.pin_ahead(tier, worker)
    assert worker.why_not_pinned == "no such luck"
    assert worker.said == [Segment(1, 1024), Pin(1)]
    monkeypatch.setattr(os, "dup", lambda fd: os.open("/nonexistent", os.O_RDONLY))
    other = Worker()
    await gpu_segments.pin_ahead(tier, other)
    assert "cannot be given" in other.why_not_pinned


async def test_an_error_of_a_segment_that_went_away_meanwhile_is_none(tier, monkeypatch):
    monkeypatch.setattr(gpu_segments, "LOOK_EVERY_S", 0.001)
    worker = Worker()
    worker.answers = {1: "segment 1 is not mapped here"}
    monkeypatch.setattr(tier, "in_service", lambda number: number != 1)
    pinning = asyncio.ensure_future(gpu_segments.pin_ahead(tier, worker))
    assert (await said(worker, 4))[-1] == Pin(2)
    assert not worker.why_not_pinned
    worker.end()
    await pinning
