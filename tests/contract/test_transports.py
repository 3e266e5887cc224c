"""The contract of the data operations over every way to the store, and over none."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.rpc import inline
from kvstored.store.outcomes import HIT, NOT_DURABLE
from kvstored.testing.contract import SETTINGS, TransportContract
from kvstored.testing.contract_client import ACME, chain, hashes_of, lookup, open_namespace
from kvstored.testing.contract_transports import DirectClient, GrpcClient, SocketClient, opening_request
from kvstored.testing.daemon_in_loop import check_nothing_held, eventually, serving
from tests.contract.certificates import Authority


class Harness:
    """Connects clients of one kind to one daemon, and ends those that a test left open."""

    def __init__(self, daemon, connect):
        self._daemon = daemon
        self._connect = connect
        self._clients = []

    async def connect(self, tenant=ACME, **opening):
        client = await self._connect(self._daemon, opening_request(tenant, **opening))
        self._clients.append(client)
        return client

    @property
    def lower_tier(self):
        return self._daemon.context.store.parts.below.tier

    @property
    def holds(self):
        spaces = self._daemon.context.store.parts.catalog.spaces.values()
        return sum(entry.holds for space in spaces for entry in space.entries.values())

    async def close(self):
        for client in self._clients:
            await client.end()
        check_nothing_held(self._daemon)


class Contract(TransportContract):
    @pytest.fixture(autouse=True)
    def _patient(self, monkeypatch):
        monkeypatch.setattr(inline, "PUT_WAIT_S", 60.0)  # room comes as fast as the disk writes

    @pytest.fixture
    async def transport(self, tmp_path):
        async with self.harness(tmp_path) as harness:
            yield harness

    @pytest.fixture
    async def deep_transport(self, tmp_path):
        async with self.harness(tmp_path, nvme=True) as harness:
            yield harness

    @asynccontextmanager
    async def harness(self, directory, nvme=False):
        async with serving(directory, {**SETTINGS, **self.settings(directory)}, nvme=nvme) as daemon:
            harness = Harness(daemon, self.connect)
            yield harness
            await harness.close()

    def settings(self, directory):
        return {}

    async def test_a_tier_that_takes_no_blocks_acknowledges_none_as_durable(self, deep_transport, monkeypatch):
        async def full(tenant, stores):
            return [False] * len(stores)

        client = await deep_transport.connect()
        namespace = await open_namespace(client, pb.DURABILITY_NVME)
        blocks = chain("nowhere to go", 4)
        with monkeypatch.context() as patch:
            patch.setattr(deep_transport.lower_tier, "store", full)
            assert await client.put(namespace, blocks) == bytes([NOT_DURABLE] * 4)
        assert await client.read(namespace, hashes_of(blocks)) == [b.data for b in blocks]
        assert await client.put(namespace, blocks) == bytes([HIT] * 4)

    async def test_a_client_that_leaves_while_its_durable_put_waits_leaves_nothing_held(
        self, deep_transport, monkeypatch
    ):
        waits, go_on, store = asyncio.Event(), asyncio.Event(), deep_transport.lower_tier.store

        async def slow(tenant, stores):
            waits.set()
            await go_on.wait()
            return await store(tenant, stores)

        monkeypatch.setattr(deep_transport.lower_tier, "store", slow)
        client = await deep_transport.connect()
        namespace = await open_namespace(client, pb.DURABILITY_NVME)
        putting = asyncio.create_task(client.put(namespace, chain("left behind", 4)))
        await asyncio.wait_for(waits.wait(), 60)
        putting.cancel()
        ending = asyncio.create_task(client.end())
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([putting, ending])
        await ending
        await eventually(lambda: not deep_transport.holds)
        another = await deep_transport.connect()
        found = await lookup(another, [await open_namespace(another)], chain("left behind", 4))
        assert found.ready_blocks, "what was copied is kept"


class TestStoreWithoutTransport(Contract):
    async def connect(self, daemon, request):
        return await DirectClient.connect(daemon.context, request)


class TestSessionSocket(Contract):
    async def connect(self, daemon, request):
        return await SocketClient.connect(str(daemon.config.server.session_socket), request)


class TestGrpcOnUnixSocket(Contract):
    async def connect(self, daemon, request):
        return await GrpcClient.connect(grpc.aio.insecure_channel(f"unix:{daemon.config.server.grpc_socket}"), request)


class TestGrpcOnTcp(Contract):
    authority = Authority("kvstored test CA")
    pair = authority.issue("localhost")

    def settings(self, directory):
        return {"server": self.pair.server_settings(directory)}

    async def connect(self, daemon, request):
        credentials = grpc.ssl_channel_credentials(self.authority.certificate)
        return await GrpcClient.connect(grpc.aio.secure_channel(f"localhost:{daemon.tcp_port}", credentials), request)
