"""Calls over gRPC that meet the end of their session, and those whose client has left before the answer."""

import asyncio
from types import SimpleNamespace

import pytest
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.leases import Caller, Group, Session
from kvstored.clock import SystemClock
from kvstored.errors import Unauthenticated
from kvstored.rpc.operations import Operation
from kvstored.rpc.servicers import served
from kvstored.store.release_times import ReleaseTimes
from kvstored.testing.waiting import turns, until

UNREGISTERED = []


async def unregister(session, number):
    UNREGISTERED.append(number)


@pytest.fixture
def context():
    UNREGISTERED.clear()
    store = SimpleNamespace(
        release_times=ReleaseTimes(SystemClock()), transfers=SimpleNamespace(unregister=unregister), released=[]
    )
    store.release_times.observe = lambda cause, seconds: store.released.append(cause)
    return SimpleNamespace(store=store)


@pytest.fixture
def session():
    return Session(b"id", Caller("alice", "tenant", "grpc", "test"), Group("alice", b""), 0.0)


async def test_a_call_that_was_let_in_is_not_served_once_its_session_has_ended(context, session):
    asked, left = [], []
    operation = Operation("KeepAlive", pb.KeepAliveRequest, lambda *_: asked.append(1) or pb.KeepAliveReply())
    call = asyncio.ensure_future(served(context, session, operation, pb.KeepAliveRequest(), left.append))
    session.ended = True
    with pytest.raises(Unauthenticated):
        await call
    assert (asked, left) == ([], [session])


async def test_memory_that_was_registered_for_a_client_that_left_is_let_go_of(context, session):
    """It was never told the number, by which alone it could do so itself."""
    opened = asyncio.Event()

    async def register(*_):
        await opened.wait()
        return pb.RegisterMemoryReply(registration_id=7)

    operation = Operation("RegisterMemory", pb.RegisterMemoryRequest, register)
    call = asyncio.ensure_future(served(context, session, operation, pb.RegisterMemoryRequest(), lambda session: None))
    await turns()
    call.cancel()
    await asyncio.wait([call])
    assert UNREGISTERED == []
    opened.set()
    await until(lambda: UNREGISTERED == [7])
    assert context.store.released == ["cancel"]
