"""Streamed commits on the session socket: blocks are taken as they are filled, and what is not filled is given back."""

import asyncio
import ctypes

import pytest
from kvstored_proto.progress import ALIGN_BYTES, FEATURE, PROGRESS_BYTES, Filler
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.store import streams
from kvstored.store.commits import Commits
from kvstored.store.outcomes import HIT, MISS, PENDING, RESERVED
from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import (
    ACME,
    BLOCK_BYTES,
    CallFailed,
    chain,
    contains,
    hashes_of,
    open_namespace,
    packed,
)
from kvstored.testing.contract_transports import SocketClient, opening_request
from kvstored.testing.daemon_in_loop import serving
from kvstored.testing.frames_client import ConnectionEnded
from kvstored.testing.waiting import PATIENCE_S, until

STAGING_BYTES = 1 << 20
PROGRESS_OFFSET = STAGING_BYTES - 4096
PLACES = 3  # so many blocks lie in staging at a time
COUNT = 10
INVALID_ARGUMENT = 3


@pytest.fixture
def connect(connect):
    """With the feature and staging, where nothing else is asked for."""
    return lambda **fields: connect(**{"features": [FEATURE], "staging_bytes": STAGING_BYTES, **fields})


class Streamed:
    """One streamed commit of a chain, and the filling of its blocks."""

    @classmethod
    async def begun(cls, client, name="streamed", count=COUNT):
        self = cls()
        self.client, self.blocks = client, chain(name, count)
        self.namespace = await open_namespace(client)
        request = pb.ReserveRequest(namespace_id=self.namespace, block_bytes=BLOCK_BYTES, **packed(self.blocks))
        reserved = await client.call("Reserve", request)
        assert reserved.outcomes == bytes([RESERVED] * count)
        self.reservation_id = reserved.reservation_id
        anchor = ctypes.c_char.from_buffer(client._wire.staging, PROGRESS_OFFSET)
        self.filler = Filler(ctypes.addressof(anchor))
        self.filled = 0
        self.committing = asyncio.ensure_future(client.call("Commit", self.request()))
        return self

    def request(self, **fields):
        count = len(self.blocks)
        offsets = [i % PLACES * BLOCK_BYTES for i in range(count)]
        given = {"streamed": True, "progress_offset": PROGRESS_OFFSET, **fields}
        return pb.CommitRequest(
            reservation_id=self.reservation_id, indices=range(count), staging_offsets=offsets, **given
        )

    async def fill(self, count):
        while self.filled < count:
            await until(lambda: self.filler.taken() > self.filled - PLACES)
            self.client.stage(self.filled % PLACES * BLOCK_BYTES, self.blocks[self.filled].data)
            self.filled += 1
            self.filler.fill(self.filled)
        await until(lambda: self.filler.taken() == count)

    async def outcomes(self):
        return (await self.committing).outcomes


async def test_only_who_has_staging_gets_the_feature(connect):
    assert FEATURE in (await connect()).opened.features
    assert FEATURE not in (await connect(staging_bytes=0)).opened.features
    assert FEATURE not in (await connect(features=[])).opened.features


async def test_blocks_go_one_after_the_other_through_a_few_places(connect):
    client = await connect()
    streamed = await Streamed.begun(client)
    await streamed.fill(COUNT)
    assert await streamed.outcomes() == bytes([HIT] * COUNT)
    found = await client.read(streamed.namespace, hashes_of(streamed.blocks))
    assert found == [block.data for block in streamed.blocks]


async def test_what_was_taken_is_readable_while_others_are_filled(connect):
    client = await connect()
    streamed = await Streamed.begun(client)
    await streamed.fill(4)
    await eventually(client, streamed.namespace, streamed.blocks, [HIT] * 4 + [PENDING] * (COUNT - 4))
    found = await client.read(streamed.namespace, hashes_of(streamed.blocks[:4]))
    assert found == [block.data for block in streamed.blocks[:4]]
    await streamed.fill(COUNT)
    assert await streamed.outcomes() == bytes([HIT] * COUNT)


async def eventually(client, namespace, blocks, outcomes):
    found = b""
    async with asyncio.timeout(PATIENCE_S):
        while found != bytes(outcomes):
            found = await contains(client, namespace, blocks)


async def test_who_ends_a_stream_gets_the_rest_back(connect):
    client = await connect()
    streamed = await Streamed.begun(client)
    await streamed.fill(4)
    streamed.filler.end()
    assert await streamed.outcomes() == bytes([HIT] * 4 + [MISS] * (COUNT - 4))
    again = pb.ReserveRequest(namespace_id=streamed.namespace, block_bytes=BLOCK_BYTES, **packed(streamed.blocks))
    reserved = await client.call("Reserve", again)
    assert reserved.outcomes == bytes([HIT] * 4 + [RESERVED] * (COUNT - 4))


@pytest.mark.parametrize("filled", [COUNT + 1, 1, 0, 1 << 63])
async def test_a_count_that_makes_no_sense_ends_the_stream(connect, filled):
    client = await connect()
    streamed = await Streamed.begun(client)
    await streamed.fill(2)
    streamed.filler.fill(filled)
    assert await streamed.outcomes() == bytes([HIT] * 2 + [MISS] * (COUNT - 2))


async def test_a_client_that_leaves_keeps_nothing_and_what_was_taken_stays(connect):
    client, other = await connect(), await connect()
    streamed = await Streamed.begun(client)
    await streamed.fill(5)
    await client.end()
    with pytest.raises(ConnectionEnded):
        await streamed.committing
    namespace = await open_namespace(other)
    assert await other.read(namespace, hashes_of(streamed.blocks[:5])) == [b.data for b in streamed.blocks[:5]]
    await eventually(other, namespace, streamed.blocks, [HIT] * 5 + [MISS] * 5)


async def test_who_fills_nothing_for_long_loses_the_rest(connect, monkeypatch):
    monkeypatch.setattr(streams, "IDLE_MAX_S", 0.01)
    streamed = await Streamed.begun(await connect())
    assert await streamed.outcomes() == bytes([MISS] * COUNT)


async def test_a_client_that_pauses_goes_on_where_it_was(connect, daemon):
    streamed = await Streamed.begun(await connect())
    await streamed.fill(3)
    await asyncio.sleep(3 * streams.PAUSE_MAX_S)
    await streamed.fill(COUNT)
    assert await streamed.outcomes() == bytes([HIT] * COUNT)


async def test_several_at_once_share_the_threads(connect):
    begun = [await Streamed.begun(await connect(), f"several {i}") for i in range(4)]
    await asyncio.gather(*(each.fill(COUNT) for each in begun))
    assert [await each.outcomes() for each in begun] == [bytes([HIT] * COUNT)] * 4


@pytest.mark.parametrize("offset", [PROGRESS_OFFSET + 8, STAGING_BYTES, STAGING_BYTES - PROGRESS_BYTES + ALIGN_BYTES])
async def test_progress_outside_of_staging_is_refused_and_nothing_is_lost(connect, offset):
    client = await connect()
    streamed = await Streamed.begun(client)
    streamed.filler.end()
    await streamed.committing
    again = await client.call(
        "Reserve",
        pb.ReserveRequest(namespace_id=streamed.namespace, block_bytes=BLOCK_BYTES, **packed(streamed.blocks)),
    )
    streamed.reservation_id = again.reservation_id
    with pytest.raises(CallFailed) as refused:
        await client.call("Commit", streamed.request(progress_offset=offset))
    assert refused.value.code == INVALID_ARGUMENT
    reply = await client.call("Commit", streamed.request(streamed=False))
    assert reply.outcomes == bytes([HIT] * COUNT)


async def test_a_copier_that_fails_leaves_nothing_reserved(connect, daemon, monkeypatch):
    def fails(stream):
        raise MemoryError

    monkeypatch.setattr(streams.Stream, "_turn", fails)
    client = await connect()
    streamed = await Streamed.begun(client)
    with pytest.raises(CallFailed):
        await streamed.committing
    assert not daemon.context.store.held()["reservations"]
    assert await contains(client, streamed.namespace, streamed.blocks) == bytes([MISS] * COUNT)


async def test_a_piece_that_could_not_be_taken_over_is_a_miss_and_the_next_ones_have_their_own_hashes(
    connect, monkeypatch
):
    publish, failed = Commits._publish, []

    def fails_once(self, *arguments):
        if not failed:
            failed.append(True)
            raise MemoryError
        return publish(self, *arguments)

    monkeypatch.setattr(Commits, "_publish", fails_once)
    monkeypatch.setattr(streams, "PIECE_BLOCKS", 2)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    client = await connect()
    streamed = await Streamed.begun(client)
    await streamed.fill(COUNT)
    outcomes = await streamed.outcomes()
    missed = outcomes.count(MISS)
    assert missed in (1, 2)
    assert outcomes == bytes([MISS] * missed + [HIT] * (COUNT - missed))
    rest = streamed.blocks[missed:]
    assert await client.read(streamed.namespace, hashes_of(rest)) == [block.data for block in rest]


async def test_a_daemon_that_stops_waits_for_a_stream_that_pauses(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "PAUSE_MIN_S", 0.5)
    async with serving(tmp_path, SETTINGS) as daemon:
        path = str(daemon.config.server.session_socket)
        request = opening_request(ACME, features=[FEATURE], staging_bytes=STAGING_BYTES)
        client = await SocketClient.connect(path, request)
        streamed = await Streamed.begun(client)
        await streamed.fill(2)
        tasks = daemon.context.store.commits._streams.tasks
        assert tasks._tasks
    assert not tasks._tasks
    with pytest.raises(ConnectionEnded):
        await streamed.committing
