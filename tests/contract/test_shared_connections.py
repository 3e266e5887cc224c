"""Connections and calls that all share: one tenant, user or peer does not keep the others out."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvstored_proto.v1 import kvstored_pb2 as pb
from kvstored_proto.v1 import kvstored_pb2_grpc

from kvstored.rpc import listener, session
from kvstored.store.outcomes import HIT, THROTTLED
from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import ACME, RIVAL, CallFailed, open_namespace
from kvstored.testing.contract_transports import GrpcClient, opening_request
from kvstored.testing.daemon_in_loop import eventually, serving, tenant
from kvstored.testing.frames_client import FramesClient

FEW = {**SETTINGS, "server": {"max_sessions": 4}}
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def channel_to(daemon):
    return grpc.aio.insecure_channel(f"unix:{daemon.config.server.grpc_socket}")


async def test_connections_of_one_user_that_open_no_session_make_way_for_another_user(tmp_path, monkeypatch):
    uid = 1000
    for module in (listener, session):
        monkeypatch.setattr(module, "peer_credentials", lambda sock: (1, uid))
    async with serving(tmp_path, FEW) as daemon:
        path, clients = str(daemon.config.server.session_socket), []

        async def connect(fits=True):
            clients.append(FramesClient(path))
            before = set(daemon._sessions.connections)
            await (eventually(lambda: daemon._sessions.connections != before) if fits else clients[-1].ended)

        await connect()
        await clients[0].call(pb.OPERATION_OPEN_SESSION, opening_request(ACME).SerializeToString())
        for _ in range(7):
            await connect()
        await connect(fits=False)  # one more of the same user
        uid = 2000
        for oldest in (1, 2, 3):
            await connect()
            await clients[oldest].ended
        await clients[-1].call(pb.OPERATION_OPEN_SESSION, opening_request(RIVAL).SerializeToString())
        await clients[0].call(pb.OPERATION_STATUS)  # whose session is open stays
        for client in clients:
            await client.close()


async def test_calls_of_one_tenant_that_stay_open_leave_room_for_anothers(tmp_path):
    async with serving(tmp_path, FEW) as daemon:
        acme, rival = [await GrpcClient.connect(channel_to(daemon), opening_request(who)) for who in (ACME, RIVAL)]
        channel = channel_to(daemon)
        stub = kvstored_pb2_grpc.KVStoreStub(channel)
        held = [stub.PutInline(metadata=acme._metadata) for _ in range(8)]  # half of 16
        await eventually(lambda: sum(daemon._grpc._sessions._calls.values()) == 8)
        refused = stub.PutInline(metadata=acme._metadata)
        assert await refused.code() is EXHAUSTED
        assert "of this tenant" in await refused.details()
        with pytest.raises(CallFailed):
            await acme.call("Status", pb.StatusRequest())
        await rival.call("Status", pb.StatusRequest())
        for call in held:
            await call.done_writing()
            await call
        await acme.call("Status", pb.StatusRequest())
        assert not daemon._grpc._sessions._share._taken
        for client in (acme, rival):
            await client.end()
        await channel.close()


async def test_blocks_that_one_tenant_sends_and_does_not_finish_leave_memory_for_anothers(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstored.rpc.inline.MEMORY_BYTES_MAX", 4 << 16)
    async with serving(tmp_path, FEW) as daemon:
        acme, rival = [await GrpcClient.connect(channel_to(daemon), opening_request(who)) for who in (ACME, RIVAL)]
        channel = channel_to(daemon)
        stub = kvstored_pb2_grpc.KVStoreStub(channel)
        spaces = [await open_namespace(client) for client in (acme, rival)]

        async def sent(client, namespace, hash_, whole=True):
            call = stub.PutInline(metadata=client._metadata)
            header = pb.PutInlineHeader(namespace_id=namespace, hash=hash_, size_bytes=1 << 16)
            await call.write(pb.PutInlineRequest(header=header))
            await call.write(pb.PutInlineRequest(chunk=bytes(1 << 16 if whole else 1)))
            return call

        async def outcome(call):
            await call.done_writing()
            return (await call).outcomes[0]

        held = [await sent(acme, spaces[0], bytes([n]) * 16, whole=False) for n in range(2)]
        await eventually(lambda: len(daemon._grpc._sessions._calls) == 1)
        assert await outcome(await sent(acme, spaces[0], b"c" * 16)) == THROTTLED
        assert await outcome(await sent(rival, spaces[1], b"c" * 16)) == HIT
        for call in held:
            call.cancel()
        await eventually(lambda: not daemon._grpc._sessions._calls)
        assert await outcome(await sent(acme, spaces[0], b"c" * 16)) == HIT
        for client in (acme, rival):
            await client.end()
        await channel.close()


async def test_a_tenant_that_is_alone_may_have_all_calls(tmp_path):
    async with serving(tmp_path, {**FEW, "tenants": [tenant(ACME, role="admin")]}) as daemon:
        acme = await GrpcClient.connect(channel_to(daemon), opening_request(ACME))
        channel = channel_to(daemon)
        stub = kvstored_pb2_grpc.KVStoreStub(channel)
        held = [stub.PutInline(metadata=acme._metadata) for _ in range(16)]
        await eventually(lambda: sum(daemon._grpc._sessions._calls.values()) == 16)
        for call in held:
            await call.done_writing()
            await call
        await acme.end()
        await channel.close()


async def test_public_streams_that_stay_open_keep_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstored.rpc.service.STREAMS_MAX", 4)
    async with serving(tmp_path, FEW) as daemon:
        channel = channel_to(daemon)
        health = health_pb2_grpc.HealthStub(channel)
        watching = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for call in watching:
            assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        more = health.Watch(health_pb2.HealthCheckRequest())
        assert await more.code() is EXHAUSTED
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        assert await reflected.code() is EXHAUSTED
        await health.Check(health_pb2.HealthCheckRequest())
        for call in watching:
            call.cancel()
        await eventually(lambda: not daemon._grpc._streams._taken)
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        assert (await reflected.read()).list_services_response.service
        acme = await GrpcClient.connect(channel_to(daemon), opening_request(ACME))
        await acme.end()
        await channel.close()
