"""Every operation of the schema, asked by those who may not know, for everything that another tenant has.

Two daemons are alike but for one tenant that the other one has never heard of. Whoever is not that
tenant gets the same answers from both, byte for byte, but for what is a random number or a time.
"""

import asyncio
import itertools
import os
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import NamedTuple

import grpc
import pytest
from kvstored_proto import frames, page
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.reporting.metrics_export import DaemonCollector
from kvstored.rpc import roles, status
from kvstored.rpc.operations import number_of
from kvstored.rpc.remote_sessions import SESSION_METADATA
from kvstored.store.outcomes import HIT
from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import (
    ACME,
    RIVAL,
    ROOT,
    VIEWER,
    CallFailed,
    Client,
    chain,
    get,
    hashes_of,
    open_namespace,
    packed,
    reserve,
)
from kvstored.testing.contract_transports import GrpcClient, SocketClient, inline_requests, opening_request
from kvstored.testing.daemon_in_loop import check_nothing_held, eventually, serving, token_of
from kvstored.testing.frames_client import FramesClient
from tests.contract.certificates import Authority
from tests.contract.walk import METHODS, OWN_HANDLE, comparable, requests_of

AUTHORITY = Authority("kvstored test CA")
SERVER = AUTHORITY.issue("localhost")
DENIED, UNAUTHENTICATED = 7, 16
# Streams of bytes, which are on gRPC alone.
STREAMS = {"PutInline", "GetInline"}
# Frames that are no requests of the services, by number: what one that names the victim's things says.
FRAMES = {
    pb.OPERATION_SEGMENTS_DROPPED: lambda victim: pb.SegmentIds(ids=victim.segment_ids),
    pb.OPERATION_SEGMENTS_RETIRED: lambda victim: pb.SegmentIds(ids=victim.segment_ids),
    pb.OPERATION_SEGMENTS: lambda victim: pb.Segments(segments=[pb.Segment(id=i) for i in victim.segment_ids]),
    pb.OPERATION_OFFER_DESCRIPTORS: lambda victim: pb.OfferDescriptors(memory_number=1),
}
SECRET = chain("secret", 6)
OPEN, DELETED = chain("being written", 2), chain("deleted", 2)
SPECS = [{}, {"adapter": "secret adapter"}]
# Nothing is on the list that two tenants would have to share: it is large enough for both.
ALIKE = {"dram": {"capacity_bytes": 32 << 20, "segment_bytes": 1 << 20, "huge_pages": "never", "lock": "never"}}


def settings(directory, *, without=()):
    tenants = [tenant for tenant in SETTINGS["tenants"] if tenant["name"] not in without]
    server = {**SERVER.server_settings(directory), "idle_timeout_s": 3600}  # the victim says nothing while others walk
    return {**SETTINGS, **ALIKE, "tenants": tenants, "server": server}


# ---- the tenant that others ask about ----


async def victim_in(daemon):
    """One of everything, of a tenant that goes on using it."""
    path = str(daemon.config.server.session_socket)
    resume = pb.Resume(client_id=b"secret client id")
    opening = {"create_group": True, "resume": resume, "features": [page.FEATURE], "client_name": "secret engine"}
    leader = await SocketClient.connect(path, opening_request(ACME, **opening))
    handles = [await open_namespace(leader, **fields) for fields in SPECS]
    for blocks in (SECRET, DELETED):
        assert await leader.put(handles[0], blocks) == bytes([HIT] * len(blocks))
    await flush(daemon)
    space = daemon.context.store.parts.catalog.tenant_spaces(ACME)[0]
    evicted = [space.entries[block.hash] for block in SECRET[3:]]
    daemon.context.store.parts.room.evict(evicted, "for the test")
    await leader.call("Delete", pb.DeleteRequest(namespace_id=handles[0], **packed(DELETED)))
    lease = (await get(leader, handles[:1], SECRET[:2])).leases[0]
    reserved = await reserve(leader, handles[0], OPEN)
    prefetch = await leader.call("Prefetch", pb.PrefetchRequest(namespace_ids=handles[:1], **packed(SECRET)))
    assert prefetch.prefetch_id
    remote = [await GrpcClient.connect(channel, opening_request(ACME)) for channel in channels_of(daemon)]
    listed = await leader.call("ListBlocks", admin.ListBlocksRequest(limit=1))
    namespaces = (await leader.call("ListNamespaces", admin.ListNamespacesRequest())).namespaces
    root = await SocketClient.connect(path, opening_request(ROOT))
    token = await root.call("AddToken", admin.AddTokenRequest(tenant=ACME))
    purged = await leader.call("Purge", admin.PurgeRequest(model="of nobody", deadline_ms=3_600_000))
    await root.end()
    return SimpleNamespace(
        leader=leader,
        tenant=ACME,
        token_id=token.info.id,
        purge_id=purged.receipt.purge_id,
        remote=remote,
        lease=lease,
        handles=handles,
        digests=[info.digest for info in namespaces],
        hashes=hashes_of(SECRET),
        gone=hashes_of(DELETED),
        lease_ids=[lease.lease_id],
        reservation_ids=[reserved.reservation_id],
        prefetch_ids=[prefetch.prefetch_id],
        group_id=leader.opened.group_id,
        client_id=resume.client_id,
        cursors=[listed.cursor, b"n" + bytes(4) + b"\0" + namespaces[0].digest],
        segment_ids=list(leader._wire.segments),
        session_ids=[leader.opened.session_id, *(client.opened.session_id for client in remote)],
        spec_fields=SPECS,
    )


async def flush(daemon):
    root = await SocketClient.connect(str(daemon.config.server.session_socket), opening_request(ROOT))
    await root.call("Flush", admin.FlushRequest(wait_ms=60_000))
    await root.end()


async def seen_by(victim):
    """What the victim itself sees of all that it has."""
    requests = {
        "Status": pb.StatusRequest(),
        "ListNamespaces": admin.ListNamespacesRequest(),
        "ListBlocks": admin.ListBlocksRequest(),
        "Contains": pb.ContainsRequest(namespace_id=1, **packed([*SECRET, *OPEN, *DELETED])),
        "Attach": pb.AttachRequest(lease_id=victim.lease_ids[0]),
    }
    return [comparable(await victim.leader.call(name, request)) for name, request in requests.items()]


async def end_victim(victim):
    """It has lost nothing: what it held it still holds, and may use."""
    indices = range(len(OPEN))
    committed = pb.CommitRequest(
        reservation_id=victim.reservation_ids[0], indices=indices, staging_offsets=[i << 16 for i in indices]
    )
    for index, block in enumerate(OPEN):
        victim.leader.stage(index << 16, block.data)
    assert (await victim.leader.call("Commit", committed)).outcomes == bytes([HIT] * len(OPEN))
    polled = pb.PollPrefetchRequest(prefetch_id=victim.prefetch_ids[0], wait_ms=60_000)
    assert (await victim.leader.call("PollPrefetch", polled)).done
    assert await victim.leader.read(1, hashes_of(SECRET)) == [block.data for block in SECRET]
    release = pb.ReleaseRequest(lease_ids=victim.lease_ids)
    assert (await victim.leader.call("Release", release)).released == 1
    for client in (victim.leader, *victim.remote):
        await client.call("KeepAlive", pb.KeepAliveRequest())
        await client.end()


def channels_of(daemon):
    local = grpc.aio.insecure_channel(f"unix:{daemon.config.server.grpc_socket}")
    credentials = grpc.ssl_channel_credentials(AUTHORITY.certificate)
    return local, grpc.aio.secure_channel(f"localhost:{daemon.tcp_port}", credentials)


@asynccontextmanager
async def twins(directory):
    """The daemon with the victim, its twin without, and the victim; it is whole in the end."""
    for name in ("with", "without"):
        (directory / name).mkdir()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(serving(directory / "with", settings(directory / "with"), nvme=True))
        other = settings(directory / "without", without=[ACME])
        two = await stack.enter_async_context(serving(directory / "without", other, nvme=True))
        victim = await victim_in(one)
        await eventually(lambda: at_rest(one))
        before = await seen_by(victim)
        yield one, two, victim
        await eventually(lambda: at_rest(one))
        assert await seen_by(victim) == before
        await end_victim(victim)
        for daemon in (one, two):
            await eventually(lambda daemon=daemon: not any(daemon.context.store.held().values()))
            check_nothing_held(daemon)


def at_rest(daemon):
    """Nothing is moved between the tiers, and the victim's purge has come to where it waits for what is reserved."""
    parts = daemon.context.store.parts
    moving = parts.below.promoter.queued_blocks + parts.below.promoter.inflight_bytes
    phases = [receipt.phase for receipt in daemon.context.purges.receipts.all()]
    return parts.below.mover.idle and not moving and phases[-1:] == ["waiting for who uses it"]


# ---- who walks ----


class Refusal(NamedTuple):
    """Instead of a reply."""

    code: int
    message: str


async def connect(daemon, transport, who, **opening):
    if transport == "session":
        return await SocketClient.connect(str(daemon.config.server.session_socket), opening_request(who, **opening))
    local, tls = channels_of(daemon)
    channel, unused = (local, tls) if transport == "unix" else (tls, local)
    await unused.close()
    return await GrpcClient.connect(channel, opening_request(who, **opening))


async def settle(client: Client):
    """What a walker has of its own: the namespace that the victim has too, and, where it may write, blocks."""
    assert await open_namespace(client) == OWN_HANDLE
    if client.opened.role != "reader":
        own = chain("own", 3)
        await client.put(OWN_HANDLE, own)
        await get(client, [OWN_HANDLE], own)


async def answer(client, name, request):
    """A reply as it can be compared, or a refusal."""
    try:
        if name == "OpenSession":
            return comparable(await opened_anew(client, request))
        if name == "PutInline":
            stream = iter([request]) if request.WhichOneof("part") == "chunk" else header_and_bytes(request)
            return comparable(await client._run(name, stream))
        if name == "GetInline":
            return [comparable(part) async for part in client.method(name)(request, metadata=client._metadata)]
        return comparable(await client.call(name, request))
    except CallFailed as failed:
        return Refusal(failed.code, failed.message)
    except grpc.aio.AioRpcError as error:
        return Refusal(error.code().value[0], error.details())


def header_and_bytes(request):
    yield request
    yield pb.PutInlineRequest(chunk=bytes(request.header.size_bytes))


async def opened_anew(client, request):
    """A second session with what the request asks for, by the walker's own token."""
    request.token = token_of(client.opened.tenant)
    if isinstance(client, GrpcClient):
        reply = await client.method("OpenSession")(request)
        metadata = ((SESSION_METADATA, reply.session_id),)
        await client.method("CloseSession")(pb.CloseSessionRequest(), metadata=metadata)
        return reply
    second = await SocketClient.connect(client.path, request)
    await second.end()
    return second.opened


async def walk(daemon, transport, who, name, victim):
    client = await connect(daemon, transport, who)
    client.path = str(daemon.config.server.session_socket)
    await settle(client)
    answers = [await answer(client, name, request) for request in requests_of(METHODS[name], victim)]
    client._ended = name == "CloseSession"  # gRPC's alone
    await client.end()
    return answers


def test_every_number_of_a_frame_is_walked():
    asked = {number_of(name) for name in METHODS if name not in STREAMS}
    assert set(pb.Operation.values()) - {0} == asked | set(FRAMES)


@pytest.mark.parametrize("transport", ["session", "unix", "tls"])
async def test_answers_to_others_are_those_of_a_daemon_that_never_had_the_tenant(tmp_path, transport):
    async with twins(tmp_path) as (one, two, victim):
        for who in (RIVAL, VIEWER):
            for name in METHODS:
                if transport == "session" and name in STREAMS:
                    continue
                ours, theirs = [await walk(daemon, transport, who, name, victim) for daemon in (one, two)]
                assert ours == theirs, f"{name} tells {who} of another tenant"
                assert ours
                needed = roles.NEEDED[name]
                if needed == roles.ADMIN or (needed == roles.TENANT and who == VIEWER):
                    assert {each.code for each in ours} == {DENIED}, f"{name} is not for {who}"
                    assert f"needs the role {needed}" in ours[0].message
                else:
                    denied = any(each.code == DENIED for each in ours if isinstance(each, Refusal))
                    # To name a tenant is an admin's, in a call that is for others too.
                    assert not denied or "tenant" in METHODS[name].input_type.fields_by_name, name


async def test_frames_that_nobody_asks_for_and_a_page_that_names_anothers_leases(tmp_path):
    async with twins(tmp_path) as (one, two, victim):
        heard = []
        for daemon in (one, two):
            client = await connect(daemon, "session", RIVAL, features=[page.FEATURE])
            await settle(client)
            said = heard_here = []
            heard.append(said)
            for number, body in FRAMES.items():
                data = body(victim).SerializeToString()
                await client._wire.send(frames.encode(number, 0, data, frames.ONE_WAY))
                try:
                    said.append(await client._wire.call(number, data) and "answered")
                except CallFailed as failed:
                    said.append((failed.code, failed.message))
            with memoryview(client._wire.page) as memory:
                poster = page.Poster(memory)
                assert poster.post(victim.lease_ids)
                poster._words.release()
            await client.call("KeepAlive", pb.KeepAliveRequest())
            for number in set(range(256)) - set(pb.Operation.values()):
                with pytest.raises(CallFailed) as failed:
                    await client._wire.call(number, b"")
                heard_here.append((failed.value.code, failed.value.message))
            await client.end()
        assert heard[0] == heard[1]


# ---- who is nobody ----


async def refused_frames(daemon, victim):
    """Every operation as the first thing that an unknown peer says, without a token and with one that is unknown."""
    said = []
    for number in sorted(pb.Operation.values()):
        name = next((name for name in METHODS if name not in STREAMS and number_of(name) == number), None)
        bodies = [request.SerializeToString() for request in requests_of(METHODS[name], victim)[:4]] if name else [b""]
        if name == "OpenSession":
            bodies.append(opening_request("nobody").SerializeToString())
        wire = FramesClient(str(daemon.config.server.session_socket))
        for body in bodies:
            with pytest.raises(CallFailed) as failed:
                await wire.call(number, body)
            said.append((number, failed.value.code, failed.value.message))
        await wire.close()
    return said


async def refused_calls(daemon, victim):
    """Every method without a session, with one that is not there, and with the victim's where it is not good."""
    said = []
    local, tls = channels_of(daemon)
    on_socket, on_unix, on_tls = victim.session_ids
    beside = [("authorization", f"Bearer {token_of(RIVAL)}")]
    unknown = [("authorization", "Bearer nobody's")]
    ids = {
        local: [([], b""), ([], bytes(16)), ([], on_socket), ([], on_tls), (beside, on_unix), (unknown, on_unix)],
        tls: [([], b""), ([], bytes(16)), ([], on_socket), ([], on_unix), (beside, on_tls), (unknown, on_tls)],
    }
    for channel, tried in ids.items():
        client = GrpcClient(channel)
        for name, method in METHODS.items():
            request = requests_of(method, victim)[-1]
            if name == "OpenSession":
                for token in ("", "nobody's", token_of("nobody")):
                    request.token = token
                    said.append((name, await answer_of_nobody(client, name, request, ())))
                continue
            for more, session_id in tried:
                metadata = (*more, (SESSION_METADATA, session_id))
                said.append((name, await answer_of_nobody(client, name, request, metadata)))
        await channel.close()
    return said


async def answer_of_nobody(client, name, request, metadata):
    try:
        if name == "GetInline":
            return await client.method(name)(request, metadata=metadata).read()
        argument = inline_requests(1, SECRET[:1]) if name == "PutInline" else request
        return await client.method(name)(argument, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code().value[0], error.details()


async def test_an_unknown_peer_is_told_the_same_whoever_is_known(tmp_path):
    async with twins(tmp_path) as (one, two, victim):
        for refused in (refused_frames, refused_calls):
            ours, theirs = [await refused(daemon, victim) for daemon in (one, two)]
            assert ours == theirs
            codes = {each[1] if isinstance(each[1], int) else each[1][0] for each in ours}
            assert codes == {UNAUTHENTICATED}


async def refused_tokens(daemon):
    """A token that has expired and one that was revoked, on every way in."""
    root = await connect(daemon, "session", ROOT)
    expired = await root.call("AddToken", admin.AddTokenRequest(tenant=RIVAL, expires_in_s=0.05))
    revoked = await root.call("AddToken", admin.AddTokenRequest(tenant=RIVAL))
    await root.call("RevokeToken", admin.RevokeTokenRequest(token_id=revoked.info.id))
    await asyncio.sleep(0.1)
    said = []
    for transport in ("session", "unix", "tls"):
        for text in (expired.token, revoked.token):
            with pytest.raises(CallFailed) as failed:
                await connect(daemon, transport, RIVAL, token=text)
            said.append(Refusal(failed.value.code, failed.value.message))
    await root.end()
    return said


async def test_a_token_that_is_no_good_any_more_opens_nothing(tmp_path):
    async with twins(tmp_path) as (one, two, _):
        ours, theirs = [await refused_tokens(daemon) for daemon in (one, two)]
        assert ours == theirs
        assert {refusal.code for refusal in ours} == {UNAUTHENTICATED}
        assert {"expired" in refusal.message for refusal in ours[::2]} == {True}


# ---- what is not an answer ----


class Seeing(FramesClient):
    """Notes which file each segment that it was ever given is."""

    def __init__(self, path):
        self.files = {}
        super().__init__(path)

    def _map(self, message, fds):
        if not message.staging and not message.session_page:
            for segment, fd in zip(message.segments, fds, strict=True):
                status = os.fstat(fd)
                self.files[status.st_dev, status.st_ino] = (segment.id, os.dup(fd))
        super()._map(message, fds)


async def seeing(daemon, who):
    client = SocketClient(Seeing(str(daemon.config.server.session_socket)))
    body = await client._wire.call(pb.OPERATION_OPEN_SESSION, opening_request(who).SerializeToString())
    client.opened = pb.OpenSessionReply.FromString(body)
    return client


async def test_a_file_of_memory_is_given_to_one_tenant_alone(tmp_path):
    tenants = (ACME, RIVAL, ROOT)
    async with serving(tmp_path, SETTINGS) as daemon:
        clients = {who: await seeing(daemon, who) for who in tenants}
        handles = {who: await open_namespace(client) for who, client in clients.items()}
        for turn in range(4):  # DRAM changes hands again and again: each fills all of it
            for who, client in clients.items():
                for part in range(8):
                    blocks = chain(f"{who} {turn} {part}", 16)
                    await client.put(handles[who], blocks)
                    reply = await get(client, [handles[who]], blocks)
                    leases = [lease.lease_id for lease in reply.leases]
                    await client.call("Release", pb.ReleaseRequest(lease_ids=leases))
        seen = {who: client._wire.files for who, client in clients.items()}
        # Whose it is at what time depends on who is above its share; more files were seen than there is memory at once.
        in_use = int(daemon.context.store.parts.dram.properties()["segments"])
        assert sum(len(files) for files in seen.values()) > in_use, "memory did change hands"
        assert all(seen.values()), "everybody had some"
        for one, other in itertools.combinations(tenants, 2):
            assert not set(seen[one]) & set(seen[other])
            assert not {i for i, _ in seen[one].values()} & {i for i, _ in seen[other].values()}
        for files in seen.values():
            for _, fd in files.values():
                os.close(fd)
        for client in clients.values():
            await client.end()


# The labels that metrics may have: none of them is a client's text.
LABELS = {"cause", "le", "operation", "state", "tenant", "transport", "version"}


async def test_metrics_show_nothing_of_a_tenant_but_its_name(tmp_path):
    async with twins(tmp_path) as (one, _, victim):
        collector = DaemonCollector(one.context.metrics, lambda: status.report(one.context))
        families = list(collector.collect())
        labels = {name for family in families for sample in family.samples for name in sample.labels}
        assert labels - {"path"} <= LABELS
        text = repr([sample for family in families for sample in family.samples])
        secrets = [*victim.digests, *victim.hashes, *victim.session_ids, victim.group_id, victim.client_id]
        for secret in secrets:
            assert secret.hex() not in text
            assert repr(secret)[2:-1] not in text
        assert not any(word in text for word in ("secret", token_of(ACME)))
