"""A client whose process runs out of threads, memory or descriptors: a miss, and nothing is left half-begun."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_daemon import PATIENT, SLOT_BYTES, SPEC, STAGING_BYTES, due
from kvstored_client import AsyncClient, Client, Outcome, PagedKV, Unavailable, dialing, threads, verbs
from kvstored_client import buffers as memory
from kvstored_client.paged import PagedPlace
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.waiting import PATIENCE_S, until
from tests.shortages import no_descriptors, no_threads

HASHES = [bytes([i]) * 32 for i in range(1, 65)]
LAYERS, BLOCKS = 4, 128


def engine_memory():
    """Blocks of one slot each."""
    return np.random.default_rng(1).integers(0, 255, (LAYERS, BLOCKS, SLOT_BYTES // LAYERS), np.uint8)


def idle(client, daemon):
    """Nothing is held, on either side; one-way messages have no reply to wait for."""
    ring = client._core.connection.staging
    asyncio.run(until(lambda: not daemon.leases and not daemon.reservations and ring.free_bytes == STAGING_BYTES))
    return True


# ---- threads ----


def test_work_for_which_a_pool_had_no_thread_is_never_done():
    done, pool = [], ThreadPoolExecutor(1)
    with no_threads(), pytest.raises(Unavailable, match="can't start new thread"):
        threads.submit(pool.submit, lambda: done.append("refused"))
    assert threads.submit(pool.submit, lambda: done.append("begun")).result(PATIENCE_S) is None
    assert done == ["begun"]
    pool.shutdown()
    with pytest.raises(Unavailable):
        threads.submit(pool.submit, lambda: done.append("too late"))
    assert done == ["begun"]


def test_work_that_a_thread_has_taken_although_another_could_not_start_is_done():
    pool, taken = ThreadPoolExecutor(2), threading.Event()

    def hand_over(action):
        pool.submit(action).result(PATIENCE_S)
        raise RuntimeError("can't start new thread")

    assert threads.submit(hand_over, taken.set).result(PATIENCE_S) is None
    assert taken.is_set()
    pool.shutdown()


@pytest.mark.parametrize("broken", [False, True], ids=["shut down", "broken"])
def test_work_that_its_pool_drops_is_waited_for_by_nobody(broken):
    busy, done = threading.Event(), []

    def begin():
        assert busy.wait(PATIENCE_S)
        assert not broken

    pool = ThreadPoolExecutor(1, initializer=begin)
    dropped = threads.submit(pool.submit, lambda: done.append("dropped"))
    if broken:
        busy.set()
    else:
        pool.shutdown(wait=False, cancel_futures=True)
        busy.set()
    assert isinstance(dropped.exception(PATIENCE_S), Unavailable)
    pool.shutdown()
    assert done == []


async def test_a_copy_that_a_loops_pool_drops_is_a_miss(daemon):
    pool, taken, busy = ThreadPoolExecutor(1), threading.Event(), threading.Event()

    def hold():
        taken.set()
        assert busy.wait(PATIENCE_S)

    asyncio.get_running_loop().set_default_executor(pool)
    async with AsyncClient(daemon.address, staging_bytes=STAGING_BYTES, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        data = np.random.default_rng(2).integers(1, 255, 64 * SLOT_BYTES, np.uint8)
        assert (await client.put(namespace, HASHES, data)).stored == 64
        pool.submit(hold)
        assert taken.wait(PATIENCE_S)
        target = np.zeros_like(data)
        loading = asyncio.create_task(client.get_into(namespace, HASHES, target))
        await until(lambda: pool._work_queue.qsize())
        pool.shutdown(wait=False, cancel_futures=True)
        busy.set()
        assert await asyncio.wait_for(loading, PATIENCE_S) == 0
        assert not target.any()


def test_a_load_by_layers_without_a_thread_is_a_miss_and_holds_nothing(client, namespace, daemon):
    layers = engine_memory()
    transfers = client.register(PagedKV(list(layers)))
    assert transfers.store(namespace, HASHES[:4], range(4)).stored == 4
    with no_threads():
        loading = transfers.start_load(namespace, HASHES[:4], range(8, 12), by_layer=True)
    assert (loading.done(), loading.result()) == (True, 0)
    assert idle(client, daemon)
    loading = transfers.start_load(namespace, HASHES[:4], range(8, 12), by_layer=True)
    assert loading.result() == 4
    assert (layers[:, 8:12] == layers[:, :4]).all()


def test_a_store_by_layers_without_a_thread_is_done_at_its_end(client, namespace, daemon):
    transfers = client.register(PagedKV(list(engine_memory())))
    with no_threads():
        storing = transfers.start_store(namespace, HASHES[:4], range(4))
        assert idle(client, daemon)
        storing.ready(LAYERS)
        assert storing.result().stored == 4
    assert idle(client, daemon)


@pytest.mark.parametrize("run", [asyncio.run, pytest.param(None, id="uvloop")])
def test_a_loop_without_threads_delivers_nothing_then_or_later(daemon, run):
    import uvloop

    async def large():
        async with AsyncClient(daemon.address, staging_bytes=STAGING_BYTES, **PATIENT) as client:
            namespace = client.namespace(SPEC)
            data = np.random.default_rng(2).integers(1, 255, 64 * SLOT_BYTES, np.uint8)
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            with no_threads():
                refused = await client.put(namespace, HASHES, data)
                assert (refused.stored, refused.refused) == (0, 64)
                assert "can't start new thread" in str(refused.error)
            await until(lambda: not daemon.reservations)
            assert (await client.put(namespace, HASHES, data)).stored == 64
            early, late = np.zeros_like(data), np.zeros_like(data)
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            with no_threads():
                assert await client.get_into(namespace, HASHES, early) == 0
            assert await client.get_into(namespace, HASHES, late) == 64
            assert (late == data).all()
            assert not early.any(), "its buffers are the caller's again"

    (run or uvloop.run)(large())


async def test_a_result_that_no_thread_can_wait_for_is_waited_for_all_the_same(daemon, monkeypatch):
    layers, real, writes = engine_memory(), PagedPlace.write, []
    waiting = threading.Event()

    def held(place, *arguments):
        writes.append(place)
        if len(writes) == 2:
            waiting.wait(PATIENCE_S)
        real(place, *arguments)

    def no_thread(*_):
        waiting.set()
        raise Unavailable("no thread")

    async with AsyncClient(daemon.address, staging_bytes=STAGING_BYTES, **PATIENT) as client:
        namespace, transfers = client.namespace(SPEC), client.register(PagedKV(list(layers)))
        assert (await transfers.store(namespace, HASHES[:4], range(4))).stored == 4
        monkeypatch.setattr(PagedPlace, "write", held)
        for end in ("result", "close"):
            writes.clear()
            waiting.clear()
            loading = await transfers.start_load(namespace, HASHES[:4], range(8, 12), by_layer=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(threads, "submit", no_thread)
                if end == "result":
                    assert await loading.result() == 4
                else:
                    await transfers.close()
            assert loading.done(), "nothing copies any more"
            assert await loading.result() == (4 if end == "result" else 0)


def test_a_release_that_fails_keeps_nobody_waiting(client, namespace, monkeypatch):
    transfers = client.register(PagedKV(list(engine_memory())))
    assert transfers.store(namespace, HASHES[:4], range(4)).stored == 4

    def fails(*_):
        raise MemoryError

    loading = transfers.start_load(namespace, HASHES[:4], range(8, 12), by_layer=True)
    monkeypatch.setattr("kvstored_client.blocks.Blocks.release", fails)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    assert loading.result() in (0, 4)
    transfers.close()


# ---- memory ----


def test_without_memory_for_a_copy_reads_are_misses_and_puts_refused(client, namespace, daemon, monkeypatch):
    blocks = [bytes([i]) * 1000 for i in range(4)]
    assert client.put(namespace, HASHES[:2], blocks[:2]).stored == 2

    def fails(_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(memory, "copy_runs", fails)
        assert client.get_into(namespace, HASHES[:2], [bytearray(1000), bytearray(1000)]) == 0
        result = client.put(namespace, HASHES[2:4], blocks[2:])
        assert (result.stored, result.refused) == (0, 2)
        assert isinstance(result.error, Unavailable)
        assert client.put(namespace, HASHES[2:4], blocks[2:], wait_s=0.0).refused == 2
    assert idle(client, daemon)
    assert client.put(namespace, HASHES[2:4], blocks[2:]).stored == 2


def test_without_memory_for_an_answer_it_is_a_miss(client, namespace, monkeypatch):
    assert client.put(namespace, HASHES[:1], [b"x" * 100]).stored == 1

    def fails(_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(verbs, "outcome", fails)
        patch.setattr(verbs, "outcomes", fails)
        assert client.lookup(namespace, HASHES[:1]).prefix_blocks == 0
        assert client.contains(namespace, HASHES[:1]) == [Outcome.MISS]
        with pytest.raises(Unavailable, match="no memory"):
            client.call(*_failing_request())
    assert client.lookup(namespace, HASHES[:1]).prefix_blocks == 1
    assert not client._core.connection.pending


def _failing_request():
    class Request:
        def SerializeToString(self):
            raise MemoryError

    return pb.OPERATION_STATUS, Request(), pb.StatusReply


@pytest.mark.parametrize("error", [MemoryError, OSError(12, "Cannot allocate memory")])
def test_a_session_that_could_not_take_what_arrived_has_ended(client, namespace, monkeypatch, error):
    connection = client._core.connection

    def fails(*_):
        raise error

    monkeypatch.setattr(connection, "_take", fails)
    assert client.lookup(namespace, HASHES).prefix_blocks == 0
    assert "receiving" in str(connection.error)
    assert client.put(namespace, HASHES[:1], [b"x" * 100]).stored == 1, "the next session is well"


def test_who_interrupts_a_call_ends_the_session_and_gets_through(client, namespace, monkeypatch):
    connection = client._core.connection

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(connection, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.lookup(namespace, HASHES)
    assert "interrupted" in str(connection.error)
    assert not connection.pending


def test_a_message_for_which_there_is_no_memory_ends_the_session_and_raises_nothing(client, namespace, monkeypatch):
    connection = client._core.connection
    connection.post(*_failing_request()[:2])
    assert "no memory" in str(connection.error)

    assert client.put(namespace, HASHES[:1], [b"x" * 100]).stored == 1
    connection = client._core.connection

    class Socket:
        def send(self, *_):
            raise MemoryError

    monkeypatch.setattr(connection._outbox, "_sock", Socket())
    connection.post(pb.OPERATION_RELEASE, pb.ReleaseRequest(lease_ids=[1]))
    assert "no memory" in str(connection.error)


def test_a_late_answer_that_makes_no_sense_ends_the_session_and_raises_nothing(client, namespace):
    connection = client._core.connection
    ticket = connection.start(pb.OPERATION_STATUS, pb.StatusRequest(), late=pb.GetReply.FromString)
    connection.result(ticket, PATIENCE_S)
    ticket.body = b"\xff"
    connection.abandon(ticket)
    assert "late answer" in str(connection.error)


@pytest.mark.parametrize("verb", ["get", "put"])
def test_an_answer_that_nobody_began_to_wait_for_is_given_back(client, namespace, daemon, monkeypatch, verb):
    assert client.put(namespace, HASHES[:1], [b"x" * 100]).stored == 1

    def fails(_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(client._driver, "_finish", fails)
        if verb == "get":
            assert client.get_into(namespace, HASHES[:1], [bytearray(100)]) == 0
        else:
            assert client.put(namespace, HASHES[1:2], [b"x" * 100]).refused == 1
    client.status()  # who waits reads what was late
    assert idle(client, daemon)


@pytest.mark.parametrize("way", ["wait", "poke"])
def test_who_is_interrupted_as_it_hands_on_the_lead_has_let_go_of_it(client, monkeypatch, way):
    connection = client._core.connection

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(connection, "_wake_one", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.status() if way == "wait" else connection.poke()
    assert not connection._lead.locked()
    assert client.status() is not None


# ---- descriptors ----


def test_without_descriptors_nothing_connects_and_nothing_raises(daemon, tmp_path):
    with no_descriptors():
        client = Client(daemon.address, **PATIENT)
        assert "Too many open files" in str(client.connect_error)
        remote = Client(f"grpc:unix:{tmp_path}/none", **PATIENT)
        assert "Too many open files" in str(remote.connect_error)
        remote.close()
    namespace = client.namespace(SPEC)
    due(client)
    assert client.put(namespace, HASHES[:1], [b"x" * 100]).stored == 1
    client.close()


def test_a_segment_that_came_without_its_descriptor_is_a_miss_and_asked_for_again(daemon):
    with Client(daemon.address, **PATIENT) as client:
        namespace = client.namespace(SPEC)
        assert client.put(namespace, HASHES[:1], [b"x" * 100]).stored == 1
        buffer = bytearray(100)
        with no_descriptors():
            assert client.get_into(namespace, HASHES[:1], [buffer]) == 0
        due(client)
        assert client.get_into(namespace, HASHES[:1], [buffer]) == 1
        assert bytes(buffer) == b"x" * 100


async def test_a_loop_that_can_watch_no_more_sockets_is_no_daemon(daemon, monkeypatch):
    loop, client, dial, made = asyncio.get_running_loop(), AsyncClient(daemon.address, **PATIENT), dialing.dial, []

    def refused(*_):
        raise OSError(28, "No space left on device")

    def dialed(*arguments):
        made.append(dial(*arguments))
        return made[-1]

    monkeypatch.setattr(dialing, "dial", dialed)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "add_reader", refused)
        assert (await client.lookup(client.namespace(SPEC), HASHES)).prefix_blocks == 0
    assert [sock.fileno() for sock, _ in made] == [-1]
    await client.close()


async def test_what_a_thread_posts_while_its_loop_closes_raises_nothing(daemon):
    class Closing:
        def is_closed(self):
            return False

        def call_soon_threadsafe(self, *_):
            raise RuntimeError("Event loop is closed")

    async with AsyncClient(daemon.address, **PATIENT) as client:
        connection = client._core.connection
        loop, connection._loop = connection._loop, Closing()
        connection.want_write()
        connection._loop = loop
