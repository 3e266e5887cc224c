"""Paged transfers, gets and puts over gRPC, with the blocks inside of messages: the contract, and what differs."""

import numpy as np
import pytest
from kvstored_client import AsyncClient, Client, NamespaceSpec, Outcome, PagedKV

from kvstored.testing.async_bench import InLoop, LoopThread
from kvstored.testing.contract_layers import LayersContract
from kvstored.testing.contract_paged import SHAPES, PagedContract, Registered, arrays_of, hashes_of, stored
from kvstored.testing.daemon_process import DaemonProcess
from tests.e2e.raw_client import eventually


@pytest.fixture(scope="module")
def daemon():
    with DaemonProcess({"dram.capacity_bytes": "256MiB"}) as running:
        yield running


@pytest.fixture
def client(daemon):
    with Client(f"grpc:{daemon.grpc_target}") as made:
        yield made


class TestInline(PagedContract, LayersContract):
    @pytest.fixture
    def transfers(self, client, request):
        namespace = client.namespace(NamespaceSpec(model="paged", block_tokens=16, extra=request.node.nodeid))
        made = []

        def make(arrays, axis):
            made.append(Registered(client, namespace, [array.copy(order="K") for array in arrays], axis))
            assert made[-1].transfers.backend == "inline"
            return made[-1]

        yield make
        for memory in made:
            memory.transfers.close()


class TestInlineInALoop(PagedContract, LayersContract):
    """The same by `AsyncClient`."""

    @pytest.fixture
    def transfers(self, daemon, client, request):
        namespace = client.namespace(NamespaceSpec(model="paged", block_tokens=16, extra=request.node.nodeid))
        loop = LoopThread()
        mover = loop.client(f"grpc:{daemon.grpc_target}")
        yield lambda arrays, axis: InLoop(
            loop, mover, client, namespace, [array.copy(order="K") for array in arrays], axis
        )
        loop.run(mover.close())
        loop.close()


def test_blocks_of_several_messages_and_what_is_not_there(client):
    namespace, hashes = client.namespace(NamespaceSpec(model="large")), hashes_of(1, 3)
    blocks = [np.random.default_rng(i).bytes(2_500_000) for i in range(2)]
    assert client.put(namespace, hashes[:2], blocks).stored == 2
    buffers = [bytearray(2_500_000) for _ in hashes]
    assert client.get_into(namespace, hashes, buffers) == 2
    assert [bytes(buffer) for buffer in buffers[:2]] == blocks
    with pytest.raises(ValueError, match="block 0 has 2500000 bytes"):
        client.get_into(namespace, hashes[:1], [bytearray(100)])
    with client.get(namespace, hashes) as held:
        assert len(held) == 0, "there is no shared memory to hold them in"
    assert client.contains(namespace, hashes) == [Outcome.HIT, Outcome.HIT, Outcome.MISS]
    assert client.lookup(namespace, hashes).prefix_blocks == 2
    assert client.delete(namespace, hashes) == 2
    assert client.stats.timeouts == 0


def test_of_several_namespaces_what_all_have_comes(client):
    shards = [client.namespace(NamespaceSpec(model="shards", tp_rank=rank, tp_size=2)) for rank in range(2)]
    hashes, data = hashes_of(2, 3), [bytes([rank]) * 300 for rank in range(2)]
    client.put(shards[0], hashes, data[0])
    client.put(shards[1], hashes[:2], data[1][:200])
    buffers = [[bytearray(100) for _ in hashes] for _ in shards]
    assert client.get_into(shards, hashes, buffers) == 2
    assert [bytes(b[1]) for b in buffers] == [bytes(100), b"\1" * 100]


async def test_the_same_in_asyncio(daemon):
    arrays = arrays_of(SHAPES["kv first"], 22)
    async with AsyncClient(f"grpc:{daemon.grpc_target}") as client:
        namespace, transfers = client.namespace(NamespaceSpec(model="aio")), client.register(PagedKV(arrays, 1))
        assert (await transfers.store(namespace, hashes_of(22, 5), [4, 3, 2, 1, 0])).stored == 5
        assert await transfers.load(namespace, hashes_of(22, 5), range(10, 15)) == 5
        assert transfers.backend == "inline"
        assert stored(arrays, 1, 10) == stored(arrays, 1, 4)
        await transfers.close()


def test_a_session_is_made_anew_after_the_daemon_restarts():
    settings = {
        "dram.capacity_bytes": "64MiB",
        "server.idle_timeout_s": "3600",
    }  # so that it is not idleness that ends it
    with DaemonProcess(settings) as daemon:
        with Client(f"grpc:{daemon.grpc_target}") as client:
            namespace = client.namespace(NamespaceSpec(model="again"))
            assert client.put(namespace, hashes_of(3, 1), b"x" * 100).stored == 1
            daemon.restart()

            def works():
                return client.put(namespace, hashes_of(4, 1), b"y" * 100).outcomes == [Outcome.HIT]

            eventually(works, "it works again")
            assert client.stats.reconnects >= 1
            sessions = [each.transport for each in client.status().sessions]
            assert sessions.count("grpc") == 1
        with Client(daemon.address) as other:
            eventually(lambda: "grpc" not in {s.transport for s in other.status().sessions}, "it ends with the client")


def test_without_a_daemon_it_is_a_miss(tmp_path):
    with Client(f"grpc:unix:{tmp_path}/nobody", timeout_s=1.0) as client:
        namespace = client.namespace(NamespaceSpec(model="none"))
        assert client.get_into(namespace, [b"h" * 16], [bytearray(8)]) == 0
        assert client.put(namespace, [b"h" * 16], b"12345678").refused == 1
