"""What several who ask a device worker at once get of it."""

import asyncio
import os

import pytest

from kvstored.device import worker_messages as messages
from kvstored.testing.waiting import turns, until
from kvstored.tiers.gpu import Gpus, How, Registration
from kvstored.tiers.gpu_worker import GpuWorker


class Sent:
    """An outbox that keeps what is sent."""

    def __init__(self):
        self.messages, self.fds = [], 0

    def send(self, frame, fds):
        body = memoryview(frame)[-int.from_bytes(frame[:4], "little") :]
        self.messages.append(messages.to_worker.decode(body))
        self.fds += len(fds)
        for fd in fds:
            os.close(fd)

    def of(self, kind):
        return [message for message in self.messages if isinstance(message, kind)]


@pytest.fixture
async def worker(monkeypatch):
    """One that has just started, and has opened nothing."""
    made = GpuWorker(bytes(16), 15.0)
    made._outbox = Sent()
    return made


@pytest.fixture
def gpus(worker, monkeypatch):
    made = Gpus(None, silence_max_s=15.0, drain_max_s=15.0)

    async def the_worker(_):
        return worker, ""

    monkeypatch.setattr(made.devices, "worker", the_worker)
    return made


@pytest.fixture
def registration():
    fds = [os.memfd_create("chunk") for _ in range(3)]
    yield Registration(1, bytes(16), [], [(0, 0, 1, 1)], 1, 1, [1, 1, 1], fds)
    for fd in fds:
        os.close(fd)


async def test_transfers_that_find_a_fresh_worker_at_once_have_the_memory_opened_once(worker, gpus, registration):
    moving = [asyncio.create_task(gpus.transfer(registration, b"", [], How(to_device=True))) for _ in range(3)]
    await until(lambda: worker._outbox.of(messages.Register))
    await asyncio.sleep(0)
    assert len(worker._outbox.of(messages.Register)) == 1
    assert worker._outbox.fds == 3
    worker._hear(messages.Registered(1, ""))
    await until(lambda: len(worker._outbox.of(messages.Transfer)) == 3)
    for transfer in worker._outbox.of(messages.Transfer):
        worker._hear(messages.Done(transfer.transfer, ""))
    assert await asyncio.gather(*moving) == ["", "", ""]


async def test_who_stops_waiting_takes_the_answer_from_nobody_else(worker):
    asking = [asyncio.create_task(worker.ask(messages.Unregister(1), messages.Unregistered, 1)) for _ in range(3)]
    await turns()
    asking[0].cancel()
    await asyncio.wait(asking[:1])
    assert worker.owes(messages.Unregistered, 1), "it is done all the same"
    worker._hear(messages.Unregistered(1))
    assert await asyncio.gather(*asking[1:]) == ["", ""]
    assert len(worker._outbox.of(messages.Unregister)) == 1
    assert not worker.owes(messages.Unregistered, 1)


async def test_memory_that_is_unregistered_while_several_have_it_opened_is_let_go_of_once(worker, gpus, registration):
    moving = [asyncio.create_task(gpus.transfer(registration, b"", [], How(to_device=True))) for _ in range(3)]
    await until(lambda: worker._outbox.of(messages.Register))
    registration.ended = True
    worker._hear(messages.Registered(1, ""))
    await until(lambda: worker._outbox.of(messages.Unregister))
    await asyncio.sleep(0)
    assert len(worker._outbox.of(messages.Unregister)) == 1
    worker._hear(messages.Unregistered(1))
    assert await asyncio.gather(*moving) == ["the memory is not registered any more"] * 3


async def test_who_unregisters_memory_that_a_fresh_worker_is_just_opening_waits_until_it_is_closed(
    worker, gpus, registration, monkeypatch
):
    gpus._registrations[registration.number] = registration
    monkeypatch.setattr(gpus.devices, "known", lambda uuid: worker)
    moving = asyncio.create_task(gpus.transfer(registration, b"", [], How(to_device=True)))
    await until(lambda: worker._outbox.of(messages.Register))
    closing = asyncio.create_task(gpus.unregister(registration))
    await turns()
    assert not closing.done(), "the worker is about to hold it"
    worker._hear(messages.Registered(1, ""))
    await until(lambda: worker._outbox.of(messages.Unregister))
    worker._hear(messages.Unregistered(1))
    await closing
    while not moving.done():  # it asked for the same, or does so now
        worker._hear(messages.Unregistered(1))
        await asyncio.sleep(0)
    assert await moving == "the memory is not registered any more"
    assert not worker.registered


async def test_memory_whose_descriptors_cannot_be_had_is_refused_and_none_of_them_is_left(
    worker, gpus, registration, monkeypatch
):
    real, made = os.dup, []

    def dup(fd):
        if len(made) == 2:
            raise OSError(24, "Too many open files")
        made.append(real(fd))
        return made[-1]

    monkeypatch.setattr(os, "dup", dup)
    error = await gpus.transfer(registration, b"", [], How(to_device=True))
    assert error == "the descriptors of the memory's chunks: Too many open files"
    assert worker._outbox.messages == []
    for fd in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
