"""The asyncio client and a device worker on the fake driver: what is cancelled, and what goes on."""

import asyncio
import dataclasses
from functools import partial

import numpy as np
import pytest
from kvstored_client import AsyncClient, NamespaceSpec, Outcome, PagedKV, Unavailable, loop

from kvstored.testing.contract_paged import hashes_of
from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.device_arrays import DeviceArray
from kvstored.testing.waiting import PATIENCE_S
from tests import fakecuda

pytestmark = pytest.mark.skipif(bool(fakecuda.MISSING), reason=fakecuda.MISSING)
BLOCKS, BLOCK_BYTES = 64, 64 << 10
HALF = BLOCKS // 2


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return fakecuda.FaultFile(tmp_path_factory.mktemp("faults") / "faults")


@pytest.fixture(scope="module")
def daemon(driver, faults):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKECUDA_FAULT_FILE", str(faults.path))
        with DaemonProcess({"dram.capacity_bytes": "128MiB", "gpu.silence_max_s": "60"}) as running:
            yield running


async def until(look):
    """Wait until it is so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await look():
                return
            await asyncio.sleep(0.005)


async def copied(storing, layers):
    return layers == 3 or storing.copied() == (8, layers)


class Engine:
    """A client with registered memory of the device."""

    def __init__(self, driver, daemon, faults, name):
        self.faults = faults
        self.array = DeviceArray(driver, np.random.default_rng(1).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8))
        self.client = AsyncClient(daemon.address)
        self.namespace = self.client.namespace(NamespaceSpec(model="async", extra=name))
        self.transfers = self.client.register(PagedKV([self.array]))

    async def __aenter__(self):
        assert await self.transfers.ready(), self.transfers.reason
        return self

    async def __aexit__(self, *_):
        self.copies_go_on()
        await self.transfers.close()
        await self.client.close()
        self.array.free()

    async def stored(self, seed):
        """Half of the blocks, the last first, or neighbours would be one copy."""
        hashes = hashes_of(seed, HALF)
        assert (await self.transfers.store(self.namespace, hashes, range(HALF)[::-1])).stored == HALF
        return hashes

    def holds_copies(self):
        """The next transfer does not get past its first copy, until `copies_go_on`."""
        self.faults.holds_copies()

    async def in_mid_copy(self):
        """Wait until it has come so far."""

        async def look():
            return self.faults.in_mid_copy()

        await until(look)

    def copies_go_on(self):
        self.faults.says("")

    async def held(self):
        counters = (await self.client.status()).counters
        return counters["held_leases"] + counters["held_reservations"]


@pytest.fixture
async def engine(driver, daemon, faults, request):
    async with Engine(driver, daemon, faults, request.node.name) as made:
        yield made


@pytest.mark.parametrize("to_device", [True, False])
async def test_who_is_cancelled_comes_back_when_nothing_copies_any_more(engine, to_device):
    hashes = await engine.stored(1) if to_device else hashes_of(2, HALF)
    verb = engine.transfers.load if to_device else engine.transfers.store
    engine.holds_copies()
    moving = asyncio.create_task(verb(engine.namespace, hashes, range(HALF, BLOCKS)))
    await engine.in_mid_copy()
    moving.cancel()
    done, _ = await asyncio.wait([moving], timeout=0.3)
    assert not done, "the copy runs"
    engine.copies_go_on()
    with pytest.raises(asyncio.CancelledError):
        await moving
    before = engine.array.read().copy()
    assert not await engine.held(), "nothing reads or writes the blocks"
    await asyncio.sleep(0.2)
    assert (engine.array.read() == before).all()
    if not to_device:
        assert await engine.client.contains(engine.namespace, hashes) == [Outcome.MISS] * HALF


async def test_who_is_cancelled_while_it_waits_for_a_load_may_ask_again(engine):
    hashes = await engine.stored(3)
    engine.holds_copies()
    loading = await engine.transfers.start_load(engine.namespace, hashes, range(HALF, BLOCKS))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(loading.result(), 0.05)
    assert not loading.done(), "the load goes on"
    engine.copies_go_on()
    assert await loading.result() == HALF
    assert (engine.array.read()[HALF:] == engine.array.read()[:HALF][::-1]).all()


async def test_an_engine_computes_while_layers_come_and_go(engine, driver):
    """Of two memories of one session, one loads while the other stores."""
    layers = [DeviceArray(driver, np.full((BLOCKS, 4096), value, np.uint8)) for value in (1, 2, 3)]
    transfers, hashes = engine.client.register(PagedKV(layers)), hashes_of(4, 8)
    async with await transfers.start_store(engine.namespace, hashes, range(8)) as storing:
        with pytest.raises(RuntimeError, match="0 of 3 layers"):
            await storing.result()
        for layer in (1, 2, 3):
            storing.ready(layer)
            await until(partial(copied, storing, layer))
        assert (await storing.result()).stored == 8
        assert (await storing.cancel()).stored == 8, "it is over"
    loading = await transfers.start_load(engine.namespace, hashes, range(8, 16), by_layer=True)
    assert await loading.result() == 8
    assert loading.arrived() == (8, 3)
    assert [int(layer.read()[15, 0]) for layer in layers] == [1, 2, 3]
    storing = await transfers.start_store(engine.namespace, hashes_of(5, 8), range(8))
    storing.ready(2)
    with pytest.raises(ZeroDivisionError):
        async with storing:
            raise ZeroDivisionError
    assert await engine.client.contains(engine.namespace, hashes_of(5, 8)) == [Outcome.MISS] * 8
    assert not await engine.held()
    await transfers.close()
    for layer in layers:
        layer.free()


def words(client):
    """How many words of the session page are free."""
    return len(client._core.connection.page._words)


async def test_who_is_cancelled_keeps_no_words_of_the_session_page(engine):
    hashes = await engine.stored(11)
    free = words(engine.client)
    engine.holds_copies()
    loading = asyncio.create_task(engine.transfers.load(engine.namespace, hashes, range(HALF, BLOCKS)))
    await engine.in_mid_copy()
    assert words(engine.client) == free - 1
    loading.cancel()
    engine.copies_go_on()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert words(engine.client) == free


async def test_who_is_cancelled_while_it_gives_up_comes_back_when_nothing_copies_any_more(engine):
    """The call has taken longer than it may, and then its caller is cancelled."""
    hashes = await engine.stored(12)
    settings = engine.client._core.settings
    engine.client._core.settings = dataclasses.replace(settings, timeout_s=0.05)
    engine.holds_copies()
    loading = asyncio.create_task(engine.transfers.load(engine.namespace, hashes, range(HALF, BLOCKS)))
    await until(timed_out(engine.client))
    engine.client._core.settings = settings
    loading.cancel()
    engine.copies_go_on()
    with pytest.raises(asyncio.CancelledError):
        await loading
    before = engine.array.read().copy()
    assert not await engine.held(), "nothing reads or writes the blocks"
    assert (engine.array.read() == before).all()


def timed_out(client):
    async def look():
        return client.stats.timeouts

    return look


async def test_who_is_cancelled_while_it_ends_a_registration_comes_back_when_it_is_ended(engine):
    hashes = await engine.stored(13)
    engine.holds_copies()
    loading = await engine.transfers.start_load(engine.namespace, hashes, range(HALF, BLOCKS))
    await engine.in_mid_copy()
    closing = asyncio.create_task(engine.transfers.close())
    await asyncio.sleep(0)  # it has asked
    closing.cancel()
    engine.copies_go_on()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert loading.done()
    assert not (await engine.client.status()).counters["held_registrations"]
    await loading.result()


async def test_a_connection_that_is_lost_while_a_caller_is_cancelled_is_given_its_pause(engine, monkeypatch):
    paused = []

    async def pause(seconds):
        paused.append(seconds)

    monkeypatch.setattr(loop, "_whole", pause)
    hashes = await engine.stored(14)
    engine.holds_copies()
    loading = asyncio.create_task(engine.transfers.load(engine.namespace, hashes, range(HALF, BLOCKS)))
    await engine.in_mid_copy()
    loading.cancel()
    await asyncio.sleep(0)
    engine.client._core.connection.fail(Unavailable("lost"))
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert paused == [loop.LOST_PAUSE_S]
