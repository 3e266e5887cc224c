"""Streamed puts against a real daemon: every byte arrives, and whatever happens in the middle, nothing stays held."""

import asyncio
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from kvstored_client import AsyncClient, Client, NamespaceSpec, Outcome
from kvstored_client.paged import PagedKV
from kvstored_client.streaming import Stream
from kvstored_proto import progress

from kvstored.device import memory
from kvstored.purge.holders import Holders
from kvstored.testing.daemon_in_loop import serving
from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.waiting import until
from tests.e2e.raw_client import eventually

pytestmark = pytest.mark.skipif(not progress.AVAILABLE, reason="no futex is known here")
MIB = 1 << 20
COUNT = 96
BLOCK_BYTES = MIB // 2


@pytest.fixture(scope="module")
def daemon():
    with DaemonProcess({"dram.capacity_bytes": "512MiB"}) as running:
        yield running


@pytest.fixture
def client(daemon):
    with Client(daemon.address, timeout_s=60.0, connect_timeout_s=60.0) as made:
        yield made


@pytest.fixture
def hasty(daemon):
    with Client(daemon.address, timeout_s=0.3, connect_timeout_s=60.0) as made:
        yield made


def chain_of(client, name, count=COUNT, size=BLOCK_BYTES):
    namespace = client.namespace(NamespaceSpec(model=f"streamed {name}", block_tokens=1))
    data = np.random.default_rng(count).integers(0, 256, (count, size), np.uint8)
    return namespace, namespace.chain(range(count)), data


@pytest.fixture
def in_the_middle(monkeypatch):
    """Have something happen once, when some blocks are filled."""

    def have(action):
        room, happened = Stream._room, []

        def roomy(stream, needed, patience_s):
            if stream.filled > COUNT // 2 and not happened:
                happened.append(True)
                action()
            return room(stream, needed, patience_s)

        monkeypatch.setattr(Stream, "_room", roomy)
        return happened

    return have


def check_all_given_back(client):
    def so():
        sessions = client.status().sessions
        return all(not s.leases and not s.reservations for s in sessions)

    eventually(so, "nothing is reserved")
    ring = client._core.connection.staging
    eventually(lambda: ring.free_bytes == ring.size_bytes, "the places are free")


def check_stored(client, namespace, hashes, data):
    copy = np.zeros_like(data)
    assert client.get_into(namespace, hashes, copy) == len(data)
    assert (copy == data).all()


def check_serves(client, name):
    namespace, hashes, data = chain_of(client, name)
    assert client.put(namespace, hashes, data, wait_s=60.0).stored == COUNT
    check_stored(client, namespace, hashes, data)
    client.delete(namespace, hashes)


@pytest.mark.parametrize(("count", "size"), [(96, 512 << 10), (1500, 10_000), (20, 2 * MIB), (17, 777_777)])
def test_every_byte_arrives(client, in_the_middle, count, size):
    streamed = in_the_middle(lambda: None)
    namespace, hashes, data = chain_of(client, f"bytes {size}", count, size)
    assert client.put(namespace, hashes, data, wait_s=60.0).stored == count
    assert bool(streamed) == (count > COUNT // 2), "it was streamed"
    check_stored(client, namespace, hashes, data)
    check_all_given_back(client)
    client.delete(namespace, hashes)


def test_only_what_is_not_stored_yet_is_filled(client):
    namespace, hashes, data = chain_of(client, "known")
    assert client.put(namespace, hashes[:10], data[:10], wait_s=60.0).stored == 10
    result = client.put(namespace, hashes, data, wait_s=60.0)
    assert (result.stored, result.existing) == (COUNT - 10, 10)
    check_stored(client, namespace, hashes, data)
    check_all_given_back(client)
    client.delete(namespace, hashes)


def test_exactly_what_was_filled_on_a_guess_is_stored_without_a_wait(client):
    namespace, hashes, data = chain_of(client, "exact", 48)
    assert client.put(namespace, hashes[16:], data[16:], parent=hashes[15], wait_s=60.0).stored == 32
    result = client.put(namespace, hashes, data, wait_s=60.0)
    assert (result.stored, result.existing, result.error) == (16, 32, None)
    check_all_given_back(client)
    client.delete(namespace, hashes)


def test_blocks_of_a_paged_memory_of_any_size_are_streamed(client):
    namespace, hashes, data = chain_of(client, "paged", 300, 84 << 10)
    kv = PagedKV([data.copy()])
    assert client.put(namespace, hashes, kv.at(range(300)), wait_s=60.0).stored == 300
    check_stored(client, namespace, hashes, data)
    client.delete(namespace, hashes)


async def test_what_was_filled_on_a_guess_is_filled_anew_where_the_ring_was_wiped(tmp_path, monkeypatch):
    mib = {"huge_pages": "never", "lock": "never", "segment_bytes": 8 * MIB}
    settings = {"dram": {"capacity_bytes": 64 * MIB, **mib}, "limits": {"staging_bytes_per_session": 32 * MIB}}
    async with serving(tmp_path, settings, nvme=True) as daemon:
        store = daemon.context.store
        address = f"unix:{daemon.config.server.session_socket}"
        async with AsyncClient(address, staging_bytes=32 * MIB, timeout_s=60.0, connect_timeout_s=60.0) as client:
            namespace, hashes, data = chain_of(client, "wiped", 32)
            await client.open(namespace)
            asked, wiped, records = asyncio.Event(), asyncio.Event(), type(store.parts.below).records

            async def slowly(below, space, wanted):
                asked.set()
                await wiped.wait()
                return await records(below, space, wanted)

            monkeypatch.setattr(type(store.parts.below), "records", slowly)
            putting = asyncio.ensure_future(client.put(namespace, hashes, data, wait_s=60.0))
            await asked.wait()
            (session,) = [each for each in store.parts.sessions if each.staging]
            progressed = memory.view(session.staging.address_of(0, 8), 8)
            await until(lambda: any(progressed))  # the guess is being filled
            progressed.release()
            await Holders(store, SimpleNamespace(staging_zeroed_bytes=0)).wipe_staging([session])
            wiped.set()
            assert (await putting).stored == 32
            copy = np.zeros_like(data)
            assert await client.get_into(namespace, hashes, copy, wait_s=60.0) == 32
            assert (copy == data).all()


async def test_the_asyncio_client_streams_too(daemon, in_the_middle):
    streamed = in_the_middle(lambda: None)
    async with AsyncClient(daemon.address, timeout_s=60.0, connect_timeout_s=60.0) as client:
        namespace, hashes, data = chain_of(client, "asyncio")
        assert (await client.put(namespace, hashes, data, wait_s=60.0)).stored == COUNT
        assert streamed
        copy = np.zeros_like(data)
        assert await client.get_into(namespace, hashes, copy) == COUNT
        assert (copy == data).all()
        await client.delete(namespace, hashes)


async def test_a_put_that_is_cancelled_in_the_middle_holds_nothing(daemon, client, in_the_middle):
    async with AsyncClient(daemon.address, timeout_s=60.0, connect_timeout_s=60.0) as other:
        namespace, hashes, data = chain_of(other, "cancelled")
        loop = asyncio.get_running_loop()
        happened = in_the_middle(lambda: loop.call_soon_threadsafe(putting.cancel))
        putting = asyncio.ensure_future(other.put(namespace, hashes, data, wait_s=60.0))
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert happened
        ring = other._core.connection.staging
        await until(lambda: ring.free_bytes == ring.size_bytes)
        assert (await other.put(namespace, hashes, data, wait_s=60.0)).error is None
        await other.delete(namespace, hashes)


def test_what_fails_in_the_caller_fails_there_and_holds_nothing(client, in_the_middle):
    in_the_middle(lambda: 1 / 0)
    namespace, hashes, data = chain_of(client, "fails")
    with pytest.raises(ZeroDivisionError):
        client.put(namespace, hashes, data, wait_s=60.0)
    check_all_given_back(client)
    check_serves(client, "after a failure")


def test_a_daemon_that_hangs_in_the_middle_costs_its_time_and_nothing_else(daemon, hasty, client, in_the_middle):
    in_the_middle(lambda: os.kill(daemon.pid, signal.SIGSTOP))
    namespace, hashes, data = chain_of(hasty, "hangs")
    try:
        result = hasty.put(namespace, hashes, data, wait_s=60.0)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert result.error is not None
    assert Outcome.RESERVED not in result.outcomes
    check_all_given_back(client)
    ring = hasty._core.connection.staging

    def free():
        hasty.lookup(namespace, hashes)  # who reads the late answer
        return hasty._core.connection.staging is not ring or ring.free_bytes == ring.size_bytes

    eventually(free, "the places are free")
    client.delete(client.namespace(namespace.spec), hashes)
    check_serves(client, "after a hang")


def test_a_daemon_that_dies_in_the_middle_is_a_miss():
    with (
        DaemonProcess({"dram.capacity_bytes": "256MiB"}) as daemon,
        Client(daemon.address, timeout_s=60.0, connect_timeout_s=60.0) as client,
        pytest.MonkeyPatch.context() as patched,
    ):
        room = Stream._room

        def roomy(stream, needed, patience_s):
            if stream.filled == COUNT // 2:
                daemon.kill()
            return room(stream, needed, patience_s)

        patched.setattr(Stream, "_room", roomy)
        namespace, hashes, data = chain_of(client, "dies")
        result = client.put(namespace, hashes, data, wait_s=60.0)
        assert result.error is not None
        assert result.stored == 0
