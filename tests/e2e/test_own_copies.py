"""Paged transfers that the client copies itself: stores by layers in the staging ring, and deadlines."""

import asyncio
import gc
import threading

import numpy as np
import pytest
from kvstored_client import (
    AsyncClient,
    Client,
    NamespaceSpec,
    Outcome,
    PagedKV,
    Unavailable,
    deadline,
    own_loads,
    own_stores,
)
from kvstored_client.paged import PagedPlace

from kvstored.testing.contract_layers import eventually
from kvstored.testing.contract_paged import hashes_of
from kvstored.testing.daemon_process import DaemonProcess

BLOCKS, LAYER_BYTES, LAYERS = 128, 16 << 10, 4
BLOCK_BYTES = LAYER_BYTES * LAYERS  # 8 MiB in all
STAGING_BYTES = 2 << 20


@pytest.fixture(scope="module")
def daemon():
    with DaemonProcess({"dram.capacity_bytes": "128MiB"}) as running:
        yield running


class Engine:
    def __init__(self, daemon, name):
        rng = np.random.default_rng(1)
        self.layers = [rng.integers(0, 256, (BLOCKS, LAYER_BYTES), np.uint8) for _ in range(LAYERS)]
        self.client = Client(daemon.address, staging_bytes=STAGING_BYTES)
        self.namespace = self.client.namespace(NamespaceSpec(model="own", extra=name))
        self.transfers = self.client.register(PagedKV(self.layers))

    def block(self, number):
        return b"".join(layer[number].tobytes() for layer in self.layers)

    def right(self, hashes, ids):
        with self.client.get(self.namespace, hashes) as blocks:
            return [bytes(block) for block in blocks] == [self.block(i) for i in ids]

    @property
    def free(self):
        """Room in the staging ring."""
        return self.client._core.connection.staging.free_bytes

    def idle(self):
        """Nothing is held, on either side."""
        status = self.client.status()
        return self.free == STAGING_BYTES and all(not s.leases and not s.reservations for s in status.sessions)


@pytest.fixture
def engine(daemon, request):
    made = Engine(daemon, request.node.name)
    with made.client:
        yield made


class Clock:
    """Instead of `time`, for deadlines."""

    def __init__(self):
        self.now_s = 1000.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def slow(monkeypatch):
    """Copies from and to the engine's blocks take a tenth of a second each, as deadlines see it; what they were."""
    done, clock = [], Clock()
    monkeypatch.setattr(deadline, "time", clock)
    for name in ("read", "write"):
        real = getattr(PagedPlace, name)

        def slowed(place, *arguments, real=real, name=name):
            clock.now_s += 0.1
            done.append(name)
            return real(place, *arguments)

        monkeypatch.setattr(PagedPlace, name, slowed)
    return done


def test_of_more_blocks_than_the_ring_holds_the_rest_is_put_at_the_end(engine):
    hashes, ids = hashes_of(1, BLOCKS), np.random.default_rng(2).permutation(BLOCKS)
    with engine.transfers.start_store(engine.namespace, hashes, ids) as storing:
        for layer in range(1, LAYERS):
            storing.ready(layer)
            eventually(lambda layer=layer: storing.copied().layers == layer, "it is copied")
        held = storing.copied().blocks
        assert held * BLOCK_BYTES == STAGING_BYTES // 2
        assert engine.free == STAGING_BYTES // 2
        found = engine.client.contains(engine.namespace, hashes)
        assert found == [Outcome.PENDING] * held + [Outcome.MISS] * (BLOCKS - held)
        storing.ready(LAYERS)
        assert storing.result().stored == BLOCKS
    assert engine.right(hashes, ids)
    assert engine.idle()


def test_puts_and_further_stores_go_on_while_one_waits_for_its_layers(engine):
    first = engine.transfers.start_store(engine.namespace, hashes_of(1, 16), range(16))
    first.ready(1)
    second = engine.transfers.start_store(engine.namespace, hashes_of(2, 16), range(16, 32))
    second.ready(2)
    eventually(lambda: first.copied() == (16, 1), "the first is copied")
    assert second.copied() == (0, 0), "there is no room for it"
    blocks = [engine.block(i) for i in range(40)]
    assert engine.client.put(engine.namespace, hashes_of(3, 40), blocks).stored == 40
    assert engine.transfers.store(engine.namespace, hashes_of(4, 40), range(40), deadline_s=60.0).stored == 40
    for storing in (second, first):
        storing.ready(LAYERS)
        assert storing.result().stored == 16
    assert engine.right(hashes_of(1, 16), range(16))
    assert engine.right(hashes_of(2, 16), range(16, 32))
    assert engine.right(hashes_of(4, 40), range(40))
    assert engine.idle()


def test_a_store_that_gets_no_further_layer_is_given_up(engine, monkeypatch):
    monkeypatch.setattr(own_stores, "LAYER_MAX_S", 0.1)
    storing = engine.transfers.start_store(engine.namespace, hashes_of(1, 8), range(8))
    storing.ready(1)
    eventually(engine.idle, "it holds nothing any more")
    assert engine.transfers.reason == "no further layer was ready in time"
    storing.ready(LAYERS)
    result = storing.result()
    assert (result.stored, result.refused, result.error) == (0, 8, None)
    assert engine.client.contains(engine.namespace, hashes_of(1, 8)) == [Outcome.MISS] * 8


def test_a_store_that_is_dropped_holds_nothing(engine):
    dropped = [engine.transfers.start_store(engine.namespace, hashes_of(1, 8), range(8))]
    dropped[0].ready(LAYERS)
    eventually(lambda: dropped[0].copied() == (8, LAYERS), "all is copied")
    assert not engine.idle()
    dropped.clear()
    gc.collect()
    eventually(engine.idle, "it holds nothing any more")
    assert engine.client.contains(engine.namespace, hashes_of(1, 8)) == [Outcome.MISS] * 8


def test_a_copy_that_fails_is_told_at_the_end(engine, monkeypatch):
    def fails(*_):
        raise Unavailable("the bus fell off")

    monkeypatch.setattr(PagedPlace, "read", fails)
    storing = engine.transfers.start_store(engine.namespace, hashes_of(1, 8), range(8))
    storing.ready(LAYERS)
    result = storing.result()
    assert (result.stored, result.refused, str(result.error)) == (0, 8, "the bus fell off")
    assert engine.idle()


def test_a_daemon_that_restarts_between_two_layers_gets_all_of_it(daemon, engine):
    storing = engine.transfers.start_store(engine.namespace, hashes_of(1, 8), range(8))
    storing.ready(1)
    daemon.restart()
    storing.ready(LAYERS)
    assert storing.result().stored == 8
    assert engine.right(hashes_of(1, 8), range(8))
    assert engine.idle()


def test_what_is_not_in_staging_by_the_deadline_is_not_stored(engine, slow):
    result = engine.transfers.store(engine.namespace, hashes_of(1, 8), range(8), deadline_s=0.05)
    assert (result.stored, result.refused, result.error) == (0, 8, None)
    assert engine.transfers.reason == "its deadline has passed"
    assert engine.client.stats.transfers_failed == 1
    assert engine.client.contains(engine.namespace, hashes_of(1, 8)) == [Outcome.MISS] * 8
    assert engine.idle()
    # In pieces of half of the ring, each of which is stored whole or not at all; each copy is of half of that.
    result = engine.transfers.store(engine.namespace, hashes_of(2, BLOCKS), range(BLOCKS), deadline_s=0.45)
    half = STAGING_BYTES // 2 // BLOCK_BYTES
    assert result.stored == 2 * half, "of five copies the last is half of the third piece"
    assert engine.right(hashes_of(2, result.stored), range(result.stored))
    assert engine.idle()


def test_what_has_not_come_by_the_deadline_is_not_loaded(engine, slow, monkeypatch):
    hashes = hashes_of(1, 64)
    assert engine.transfers.store(engine.namespace, hashes, range(64)).stored == 64
    assert engine.transfers.load(engine.namespace, hashes, range(64, 128)) == 64
    monkeypatch.setattr(own_loads, "PIECE_BYTES", 8 * BLOCK_BYTES)
    for layer in engine.layers:
        layer[64:] = 0
    came = engine.transfers.load(engine.namespace, hashes, range(64, 128), deadline_s=0.25)
    assert came == 3 * 8
    assert engine.transfers.reason == "its deadline has passed"
    for layer in engine.layers:
        assert (layer[64 : 64 + came] == layer[:came]).all()
        assert not layer[64 + came :].any(), "nothing is begun after it"
    assert engine.idle()


def test_a_load_by_layers_is_given_up_between_two_layers(engine, slow):
    hashes = hashes_of(1, 8)
    assert engine.transfers.store(engine.namespace, hashes, range(8)).stored == 8
    del slow[:]
    loading = engine.transfers.start_load(engine.namespace, hashes, range(8, 16), by_layer=True, deadline_s=0.15)
    assert loading.result() == 0
    assert loading.arrived() == (0, 0)
    assert engine.transfers.reason == "its deadline has passed"
    assert slow == ["write"] * 2
    assert engine.idle()


def test_a_load_does_not_wait_past_its_deadline(engine):
    """For a block that somebody else is writing."""
    with engine.client.stage(engine.namespace, hashes_of(1, 1), BLOCK_BYTES):
        for by_layer in (False, True):
            loading = engine.transfers.start_load(
                engine.namespace, hashes_of(1, 1), [0], wait_s=15.0, by_layer=by_layer, deadline_s=0.1
            )
            assert loading.result() == 0
            assert engine.transfers.reason == "its deadline has passed"


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_deadline_that_is_none_is_refused(engine, seconds):
    with pytest.raises(ValueError, match="deadline_s"):
        engine.transfers.load(engine.namespace, hashes_of(1, 1), [0], deadline_s=seconds)
    with pytest.raises(ValueError, match="deadline_s"):
        engine.transfers.start_store(engine.namespace, hashes_of(1, 1), [0], deadline_s=seconds)


def test_blocks_that_are_not_sent_inside_of_messages_by_the_deadline_are_not_stored(daemon, slow):
    with Client(f"grpc:{daemon.grpc_target}") as client:
        array = np.random.default_rng(1).integers(0, 256, (16, 4096), np.uint8)
        namespace = client.namespace(NamespaceSpec(model="own", extra="inline"))
        transfers, hashes = client.register(PagedKV(array)), hashes_of(1, 16)
        result = transfers.store(namespace, hashes, range(16), deadline_s=0.35)
        assert result.stored == 4
        assert transfers.reason == "its deadline has passed"
        found = [Outcome.HIT] * result.stored + [Outcome.MISS] * (16 - result.stored)
        assert result.outcomes == found == client.contains(namespace, hashes)


@pytest.mark.parametrize("to_engine", [False, True])
def test_when_a_registration_is_ended_no_thread_copies_any_more(engine, monkeypatch, to_engine):
    hashes = hashes_of(1, 8)
    assert engine.transfers.store(engine.namespace, hashes, range(8)).stored == 8
    name, copying, go_on = "write" if to_engine else "read", threading.Event(), threading.Event()
    real, began, ended = getattr(PagedPlace, name), [], []

    def held(place, *arguments):
        began.append(place)
        if len(began) == 2 or not to_engine:  # the first layer of a load is there when it has begun
            copying.set()
            go_on.wait(60.0)
        real(place, *arguments)
        ended.append(place)

    monkeypatch.setattr(PagedPlace, name, held)
    if to_engine:
        begun = engine.transfers.start_load(engine.namespace, hashes, range(8, 16), by_layer=True)
    else:
        begun = engine.transfers.start_store(engine.namespace, hashes_of(2, 8), range(8))
        begun.ready(1)
    assert copying.wait(60.0)
    closing = threading.Thread(target=engine.transfers.close)
    closing.start()
    stopped = begun._begun
    eventually(lambda: stopped._stopped, "it is told")
    assert closing.is_alive()
    go_on.set()
    closing.join(60.0)
    assert len(ended) == len(began) == (2 if to_engine else 1), "no further layer"
    assert stopped._end.is_set()
    result = begun.result() if to_engine else begun.cancel().stored
    assert result == 0
    assert engine.idle()


async def test_the_same_in_asyncio_and_who_is_cancelled_waits_too(daemon, monkeypatch):
    array = np.random.default_rng(1).integers(0, 256, (16, LAYER_BYTES), np.uint8)
    copying, go_on, real = threading.Event(), threading.Event(), PagedPlace.read

    def held(place, *arguments):
        copying.set()
        go_on.wait(60.0)
        real(place, *arguments)

    monkeypatch.setattr(PagedPlace, "read", held)
    async with AsyncClient(daemon.address) as client:
        transfers = client.register(PagedKV([array, array]))
        namespace = client.namespace(NamespaceSpec(model="own", extra="asyncio"))
        storing = await transfers.start_store(namespace, hashes_of(1, 8), range(8))
        storing.ready(1)
        assert await asyncio.to_thread(copying.wait, 60.0)
        closing = asyncio.create_task(transfers.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        assert not closing.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert storing._begun._end.is_set()
        assert (await storing.cancel()).stored == 0
