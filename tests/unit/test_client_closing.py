"""A client or a registration that is closed while others use it: what was begun is answered, and nothing copies on."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from fake_daemon import PATIENT, SLOT_BYTES, SPEC, STAGING_BYTES
from kvstored_client import AsyncClient, Client, Outcome, PagedKV, Unavailable, device_verbs, mapping
from kvstored_client.core import Core, settings_of
from kvstored_client.effects import Finish, Sleep
from kvstored_client.paged import PagedPlace
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.waiting import PATIENCE_S, until

HASHES = [bytes([i]) * 32 for i in range(1, 65)]
LAYERS, BLOCKS = 4, 128
MISSES = [Outcome.MISS] * 4


@pytest.fixture
def elsewhere():
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def engine_memory():
    """Blocks of one slot each."""
    return np.random.default_rng(1).integers(1, 255, (LAYERS, BLOCKS, SLOT_BYTES // LAYERS), np.uint8)


class Held:
    """Copies from or to an engine's blocks stop before the one with this number, until they may go on."""

    def __init__(self, monkeypatch, name, number=1):
        self.copying, self.go_on, self.begun, self.ended = threading.Event(), threading.Event(), 0, 0
        real = getattr(PagedPlace, name)

        def held(place, *arguments):
            self.begun += 1
            if self.begun == number:
                self.copying.set()
                assert self.go_on.wait(PATIENCE_S)
            real(place, *arguments)
            self.ended += 1

        monkeypatch.setattr(PagedPlace, name, held)


# ---- what was begun ----


def test_what_was_begun_is_answered_after_the_client_was_closed(client, namespace):
    transfers = client.register(PagedKV(list(engine_memory())))
    assert transfers.store(namespace, HASHES[:4], range(4)).stored == 4
    loading = transfers.start_load(namespace, HASHES[:4], range(8, 12), by_layer=True)
    ready, cancelled, raised = (transfers.start_store(namespace, HASHES[n : n + 4], range(4)) for n in (8, 16, 24))
    ready.ready(LAYERS)
    left, staged = client.stage(namespace, HASHES[40:44], 100), client.stage(namespace, HASHES[44:48], 100)
    prefetch = client.prefetch(namespace, HASHES)
    client.close()
    assert loading.result() in (0, 4)
    assert loading.result() == loading.result()
    for result in (ready.result(), cancelled.cancel(), staged.commit()):
        assert (result.stored, result.outcomes) == (0, MISSES)
    assert isinstance(ready.result().error, Unavailable)
    with pytest.raises(ZeroDivisionError), raised:
        raise ZeroDivisionError  # the engine's own
    left.abort()
    assert prefetch.wait(60.0).done
    assert prefetch.cancel().failed_blocks == 64
    with pytest.raises(RuntimeError, match="closed"):
        client.lookup(namespace, HASHES)
    transfers.close()


async def test_what_was_begun_is_answered_after_the_client_was_closed_in_a_loop(daemon):
    async with AsyncClient(daemon.address, staging_bytes=STAGING_BYTES, **PATIENT) as client:
        namespace, transfers = client.namespace(SPEC), client.register(PagedKV(list(engine_memory())))
        assert (await transfers.store(namespace, HASHES[:4], range(4))).stored == 4
        loading = await transfers.start_load(namespace, HASHES[:4], range(8, 12), by_layer=True)
        ready, cancelled = [await transfers.start_store(namespace, HASHES[n : n + 4], range(4)) for n in (8, 16)]
        ready.ready(LAYERS)
        staged, prefetch = await client.stage(namespace, HASHES[40:44], 100), await client.prefetch(namespace, HASHES)
        await client.close()
        assert await loading.result() in (0, 4)
        for result in (await ready.result(), await cancelled.cancel(), await staged.commit()):
            assert (result.stored, result.outcomes) == (0, MISSES)
        assert (await prefetch.wait(60.0)).done
        assert (await prefetch.cancel()).done
        with pytest.raises(RuntimeError, match="closed"):
            await client.lookup(namespace, HASHES)
        await transfers.close()


# ---- the end of a registration ----


@pytest.mark.parametrize("name", ["write", "read"])
def test_the_end_of_a_registration_waits_for_a_blocking_transfer(client, namespace, monkeypatch, elsewhere, name):
    transfers = client.register(PagedKV(list(engine_memory())))
    assert transfers.store(namespace, HASHES[:4], range(4)).stored == 4
    held = Held(monkeypatch, name)
    if name == "write":
        moving = elsewhere(transfers.load, namespace, HASHES[:4], range(8, 12))
    else:
        moving = elsewhere(transfers.store, namespace, HASHES[8:12], range(8, 12))
    assert held.copying.wait(PATIENCE_S)
    closing = elsewhere(transfers.close)
    asyncio.run(until(lambda: transfers._uses._over))
    assert not closing.done()
    held.go_on.set()
    closing.result(PATIENCE_S)
    assert held.ended == held.begun, "the memory is the engine's alone"
    moving.result(PATIENCE_S)
    assert held.ended == held.begun == 1
    transfers.close()


def test_the_end_of_a_registration_does_not_wait_for_the_copy_that_it_interrupts(client, namespace, monkeypatch):
    """As a signal's handler does, in the main thread."""
    transfers = client.register(PagedKV(list(engine_memory())))
    assert transfers.store(namespace, HASHES[:4], range(4)).stored == 4
    real = PagedPlace.write

    def interrupted(place, *arguments):
        transfers.close()
        real(place, *arguments)

    monkeypatch.setattr(PagedPlace, "write", interrupted)
    loading = threading.Thread(target=transfers.load, args=(namespace, HASHES[:4], range(8, 12)), daemon=True)
    loading.start()
    loading.join(PATIENCE_S)
    assert not loading.is_alive()


async def test_the_end_of_a_registration_waits_for_a_blocking_transfer_in_a_loop(daemon, monkeypatch):
    async with AsyncClient(daemon.address, staging_bytes=STAGING_BYTES, **PATIENT) as client:
        namespace, transfers = client.namespace(SPEC), client.register(PagedKV(list(engine_memory())))
        assert (await transfers.store(namespace, HASHES, range(64))).stored == 64
        held = Held(monkeypatch, "write")
        loading = asyncio.create_task(transfers.load(namespace, HASHES, range(64, 128)))
        await until(held.copying.is_set)
        closing = asyncio.create_task(transfers.close())
        await until(lambda: transfers._uses._over)
        assert not closing.done()
        held.go_on.set()
        await closing
        assert held.ended == held.begun
        assert await loading == 64, "all had come"


def test_what_was_not_copied_at_the_end_of_a_registration_is_a_miss(client, namespace, daemon, monkeypatch):
    transfers = client.register(PagedKV(list(engine_memory())))
    assert transfers.store(namespace, HASHES[:4], range(4)).stored == 4
    with client.get(namespace, HASHES[:4]) as blocks:
        load = transfers.load_verb(namespace, HASHES[:4], range(8, 12), 0.0)
        store = transfers.store_verb(namespace, HASHES[8:12], range(4), b"", 0.0, namespace.terms)
        begun = transfers.start_load_verb(namespace, HASHES[:4], range(8, 12), 0.0, None, True, 0.0)
        staging = transfers.start_store_verb(namespace, HASHES[16:20], range(4), b"", 0.0, namespace.terms)
        transfers.close()
        copies = Held(monkeypatch, "write")
        assert client._driver.data(load, 0) == 0
        assert client._driver.run(store).stored == 0
        assert client._driver.data(client._driver.run(begun).finish(), 0) == 0
        storing = client._driver.run(staging)
        storing.ready(LAYERS)
        assert client._driver.run(storing.finish(cancel=False)).stored == 0
        assert copies.begun == 0
        assert len(blocks) == 4
    ring = client._core.connection.staging
    asyncio.run(until(lambda: not daemon.leases and not daemon.reservations and ring.free_bytes == STAGING_BYTES))


# ---- the daemon's memory ----


@pytest.mark.parametrize("name", ["write", "read"])
def test_what_is_copied_from_or_to_stays_mapped_until_the_copy_has_ended(
    client, namespace, monkeypatch, elsewhere, name
):
    transfers = client.register(PagedKV(list(engine_memory())))
    assert transfers.store(namespace, HASHES[:4], range(4)).stored == 4
    held, live = Held(monkeypatch, name), mapping._live
    if name == "write":
        moving = elsewhere(transfers.load, namespace, HASHES[:4], range(8, 12))
    else:
        moving = elsewhere(transfers.store, namespace, HASHES[8:12], range(8, 12))
    assert held.copying.wait(PATIENCE_S)
    mine = [each for each in live.values() if each() is not None and each().writable == (name == "read")]
    client.close()
    assert any(each() is not None for each in mine)
    held.go_on.set()
    moved = moving.result(PATIENCE_S)
    assert (moved if name == "write" else moved.stored) == 0
    assert held.ended == 1


def test_what_cannot_be_mapped_is_a_miss_and_read_or_staged_another_time(client, namespace, daemon, monkeypatch):
    with Client(daemon.address, staging_bytes=STAGING_BYTES, **PATIENT) as other:
        assert other.put(other.namespace(SPEC), HASHES[:2], [b"x" * 100] * 2).stored == 2

    def full(*_):
        raise Unavailable("no address space")

    buffers = [bytearray(100) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "_map", full)
        assert client.get_into(namespace, HASHES[:2], buffers) == 0
        with client.get(namespace, HASHES[:2]) as blocks:
            assert len(blocks) == 0
        with client.stage(namespace, HASHES[4:6], 100) as staged:
            assert staged.outcomes == [Outcome.MISS] * 2
            assert staged.views == [None] * 2
            result = staged.commit()
            assert (result.stored, result.refused, str(result.error)) == (0, 2, "no address space")
        assert client.put(namespace, HASHES[4:6], buffers).refused == 2
    ring = client._core.connection.staging
    asyncio.run(until(lambda: not daemon.leases and not daemon.reservations and ring.free_bytes == STAGING_BYTES))
    assert client.get_into(namespace, HASHES[:2], buffers) == 2
    assert client.put(namespace, HASHES[4:6], buffers).stored == 2


# ---- the end of a client ----


def test_a_put_that_a_close_overtakes_opens_no_further_session(client, namespace, daemon, monkeypatch, elsewhere):
    transfers = client.register(PagedKV(list(engine_memory())))
    held = Held(monkeypatch, "read")
    storing = elsewhere(transfers.store, namespace, HASHES * 2, range(128))  # more than one reservation
    assert held.copying.wait(PATIENCE_S)
    client.close()
    held.go_on.set()
    assert storing.result(PATIENCE_S).stored == 0
    assert daemon.counts[pb.OPERATION_OPEN_SESSION] == 1
    assert not client.connected
    verb = transfers.store_verb(namespace, HASHES[:1], [0], b"", 0.0, namespace.terms)
    assert client._driver.run(verb, begun=True).refused == 1
    assert daemon.counts[pb.OPERATION_OPEN_SESSION] == 1


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_that_is_closed_while_it_connects_has_no_session(daemon, kind, elsewhere):
    daemon.silent.add(pb.OPERATION_OPEN_SESSION)
    if kind is Client:
        made = Client(daemon.address, timeout_s=60.0, connect_timeout_s=0.001)  # its first attempt fails
        made._core.breaker.success()
        made._core.settings = settings_of(daemon.address, None, None, None, "", 0, 60.0, 60.0, False, b"")
        asyncio.run(until(lambda: daemon.held))
        daemon.held.clear()
        asking = elsewhere(made.status)
        asyncio.run(until(lambda: daemon.held))
        made.close()
        daemon.answer_held()
        assert asking.result(PATIENCE_S) is None
        assert not made.connected
        assert made._core.connection is None
        return

    async def run():
        made = AsyncClient(daemon.address, **PATIENT)
        asking = asyncio.create_task(made.status())
        await until(lambda: daemon.held)
        await made.close()
        daemon.answer_held()
        assert await asking is None
        assert made._core.connection is None

    asyncio.run(run())


def test_a_thread_that_waits_for_another_to_read_finds_the_socket_closed(client):
    connection = client._core.connection
    connection._outbox._frames.append((memoryview(b"x"), ()))
    ticket = SimpleNamespace(done=False)
    with connection._lead:
        connection._sock.close()
        connection._send_as_follower(ticket, float("inf"))


async def test_a_socket_that_another_thread_found_dead_is_not_watched_any_more_once_it_is_closed(daemon):
    async with AsyncClient(daemon.address, **PATIENT) as client:
        connection, loop = client._core.connection, asyncio.get_running_loop()
        fd = connection.fileno()
        failing = threading.Thread(target=connection.fail, args=(Unavailable("found by a finalizer"),))
        failing.start()
        failing.join(PATIENCE_S)
        client._driver._drop()  # before the loop hears of it
        assert not loop.remove_reader(fd), "the next socket may have its number"
        assert await client.status() is not None


# ---- memory of a GPU ----


def registered(connection):
    memory = device_verbs.DeviceMemory(PagedKV([np.zeros((4, 8), np.uint8)]))
    memory.connection, memory.number = connection, 7
    return memory


@pytest.fixture
def core():
    made = Core(settings_of("unix:/nowhere", None, None, None, "", 0, 1.0, 1.0, False, b""))
    made.closed = True  # a client that was closed has a worker to wait for all the same
    return made


def test_the_end_of_a_registration_waits_for_the_worker_of_a_session_that_was_lost(client, core):
    connection = client._core.connection
    connection.fail(Unavailable("lost"))
    effects = list(device_verbs.unregister(core, memory := registered(connection)))
    assert [(type(effect), effect.whole) for effect in effects] == [(Sleep, True)]
    assert effects[0].seconds > 0.0
    assert list(device_verbs.unregister(core, memory)) == [], "once"
    connection.ended_at_s -= 3600.0
    (pause,) = device_verbs.unregister(core, registered(connection))
    assert pause.seconds == 0.0, "it has ended long ago"


@pytest.mark.parametrize("lost", [True, False])
def test_the_end_of_a_registration_waits_where_it_gets_no_answer(client, core, monkeypatch, lost):
    connection = client._core.connection
    monkeypatch.setattr(connection._outbox, "put", lambda *_: True)  # this daemon knows no GPUs
    verb = device_verbs.unregister(core, registered(connection))
    assert isinstance(next(verb), Finish)
    if lost:
        connection.fail(Unavailable("lost"))
    pause = verb.throw(Unavailable("lost"))
    assert isinstance(pause, Sleep)
    assert pause.whole
    assert pause.seconds > 0.0
    with pytest.raises(StopIteration):
        verb.send(None)


def test_a_registration_that_was_answered_after_its_end_is_ended_again(client, core):
    connection, posted = client._core.connection, []
    connection.post = lambda operation, message: posted.append((operation, message))
    memory = registered(None)
    memory.number = 0
    assert list(device_verbs.unregister(core, memory)) == []
    reply = pb.RegisterMemoryReply(registration_id=9)
    device_verbs._registered(memory, connection, reply.SerializeToString())
    assert posted == [(pb.OPERATION_UNREGISTER_MEMORY, pb.UnregisterMemoryRequest(registration_id=9))]
    with pytest.raises(Unavailable, match="not registered any more"):
        next(device_verbs.number_of(connection, memory, 1.0))


def test_a_forked_child_says_nothing_of_its_parents_registration(client, namespace):
    transfers = client.register(PagedKV(list(engine_memory())))
    transfers._device = registered(client._core.connection)
    transfers._uses._count = 1  # of a thread that there is in the parent alone
    client._core._pid = os.getpid() + 1
    transfers.close()
    client._core._pid = os.getpid()
    assert client.lookup(namespace, HASHES).prefix_blocks == 0
