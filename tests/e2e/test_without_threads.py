"""Clients over gRPC and the vLLM connector's halves, where their process runs out of threads: with a real daemon."""

import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from kvstored_client import Client, NamespaceSpec, PagedKV
from kvstored_client.bridge import Bridge
from kvstored_client.engines.vllm.adapters import Adapters
from kvstored_client.engines.vllm.counts import Counts
from kvstored_client.engines.vllm.loader import Loader
from kvstored_client.engines.vllm.orders import Load, Run, Save
from kvstored_client.engines.vllm.saver import Saver
from kvstored_client.engines.vllm.tier_jobs import Jobs
from kvstored_proto import frames

from kvstored.testing.contract_layers import eventually
from kvstored.testing.contract_paged import hashes_of
from kvstored.testing.daemon_process import DaemonProcess
from tests.descriptors import descriptors
from tests.shortages import no_threads

BLOCKS, BLOCK_BYTES = 16, 4096
HASHES = hashes_of(1, BLOCKS)


@pytest.fixture(scope="module")
def daemon():
    with DaemonProcess({"dram.capacity_bytes": "64MiB"}) as running:
        yield running


@pytest.fixture
def client(daemon):
    with Client(daemon.address) as made:
        yield made


@pytest.fixture
def pool():
    return np.random.default_rng(1).integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8)


# ---- gRPC ----


def test_without_a_thread_there_is_no_session_over_grpc_and_nothing_is_left_of_it(daemon):
    address = f"grpc:{daemon.grpc_target}"
    with Client(address):
        pass  # what gRPC opens once
    before = descriptors()
    with no_threads():
        client = Client(address)
        assert "can't start new thread" in str(client.connect_error)
    eventually(lambda: descriptors() <= before, "all is closed")
    eventually(lambda: client.status() is not None, "it connects when there are threads")
    client.close()


def test_a_call_over_grpc_that_gets_no_thread_is_a_miss(daemon):
    with Client(f"grpc:{daemon.grpc_target}") as client:
        namespace = client.namespace(NamespaceSpec(model="grpc", extra="threads"))
        assert client.put(namespace, HASHES[:1], [b"x" * 100]).stored == 1
        buffer = bytearray(100)
        with no_threads():
            assert client.put(namespace, HASHES[1:2], [b"x" * 100]).refused == 1
            assert client.get_into(namespace, HASHES[:1], [buffer]) == 0
            assert client.lookup(namespace, HASHES[:1]).prefix_blocks == 0
        eventually(lambda: client.get_into(namespace, HASHES[:1], [buffer]) == 1, "it is there again")
        assert bytes(buffer) == b"x" * 100


def test_a_stream_of_blocks_on_a_channel_that_was_closed_is_unavailable(daemon):
    """By a close in another thread."""
    with Client(f"grpc:{daemon.grpc_target}") as client:
        namespace = client.namespace(NamespaceSpec(model="grpc", extra="closed"))
        assert client.put(namespace, HASHES[:1], [b"x" * 100]).stored == 1
        carrier = client._core.connection.carrier
        assert isinstance(carrier, Bridge)
        carrier._channel.close()
        assert client.get_into(namespace, HASHES[:1], [bytearray(100)]) == 0
        eventually(lambda: client.put(namespace, HASHES[1:2], [b"x" * 100]).stored == 1, "in the next session")


def test_a_client_that_takes_no_answers_loses_its_session_not_a_part_of_a_frame():
    bridge = Bridge.__new__(Bridge)  # without a thread and a daemon
    bridge.ours, bridge._theirs = socket.socketpair()
    bridge._sending = threading.Lock()
    with bridge.ours, bridge._theirs:
        bridge.ours.setblocking(False)
        bridge._theirs.settimeout(0.001)
        for _ in range(100):  # more than the socket takes
            bridge._answer(frames.Frame(1, 0, 1, b""), bytes(1 << 16))
        while bridge.ours.recv(1 << 20):
            pass


# ---- vLLM ----


def test_a_load_that_cannot_begin_is_reported_and_its_blocks_are_never_written(client, pool):
    namespace = client.namespace(NamespaceSpec(model="loader"))
    assert client.put(namespace, HASHES, pool).stored == BLOCKS
    pages = np.zeros_like(pool)
    loader = Loader(client, [PagedKV([pages])], counts := Counts(), 60.0)
    with no_threads():
        loader.submit([(Load("r", [Run(0, HASHES[:4], [0, 1, 2, 3])]), [namespace])])
        assert loader.take_ended() == ({"r"}, {0, 1, 2, 3}, {"r"})
    assert counts.take()["failed_loads"] == 1
    loader.submit([(Load("s", [Run(0, HASHES[:4], [4, 5, 6, 7])]), [namespace])])
    loader.close()
    assert loader.take_ended() == ({"s"}, set(), set())
    assert not pages[:4].any(), "they are the engine's again"
    assert (pages[4:8] == pool[:4]).all()


def test_saves_without_a_thread_end_and_a_later_one_has_one(client, pool):
    namespace = client.namespace(NamespaceSpec(model="saver"))
    with no_threads():
        saver = Saver(client, [PagedKV([pool])], Counts(), 1.0)
        saver.submit([(Save(1, "r", Run(0, HASHES[:2], [0, 1]), b""), [namespace])])
        assert saver.take_ended() == {1: 0}
        assert saver.requests() == set()
    saver.submit([(Save(2, "r", Run(0, HASHES[:2], [0, 1]), b""), [namespace])])
    saver.close()
    assert saver.take_ended() == {2: 3}
    with no_threads():
        Saver(client, [PagedKV([pool])], Counts(), 1.0).close()


def test_jobs_of_the_tier_that_cannot_begin_have_ended(client, pool):
    namespace = client.namespace(NamespaceSpec(model="tier"))
    jobs = Jobs(client, namespace, PagedKV([pool]), 60.0)
    with no_threads():
        jobs.store(1, HASHES[:2], [0, 1])
        jobs.load(2, HASHES[:2], [2, 3])
        jobs.drain()
    assert [(ended.job_id, ended.done, ended.is_load) for ended in jobs.take_ended()] == [(1, 0, False), (2, 0, True)]
    jobs.store(3, HASHES[:2], [0, 1])
    jobs.close()
    assert [(ended.job_id, ended.done) for ended in jobs.take_ended()] == [(3, 2)]


def test_an_adapter_that_nobody_can_read_now_is_not_known_and_asked_for_again(tmp_path):
    lora = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path=str(tmp_path), load_inplace=True)
    request, adapters = SimpleNamespace(lora_request=lora), Adapters(60.0)
    with no_threads():
        assert adapters.settled(request)
    assert adapters.identity(request) is None
    eventually(lambda: adapters.settled(request) and adapters._known, "it is read")
    adapters.close()
