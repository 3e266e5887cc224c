"""Every operation through the real handlers and store: sequences of requests, some changed, some at the same time."""

import asyncio

from google.protobuf.message import Message
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.leases import Caller
from kvstored.errors import KVStoredError
from kvstored.rpc import roles
from kvstored.rpc.opening import open_session
from kvstored.rpc.operations import OPERATIONS, number_of
from kvstored.testing.contract_client import ACME, ROOT
from tests.fuzz.choices import mutated
from tests.fuzz.service import Target, opening, templates

STEPS_MAX = 40
# What an admin may do to a daemon that is to serve on.
HARMLESS = {"Verify", "Flush", "Drain"}
NAMES = sorted(operation.name for operation in OPERATIONS.values())
TEMPLATES = templates(NAMES)


def make():
    """The target, over a daemon without NVMe: what is dropped there is dropped at once."""
    return Target(_program)


async def _program(service, choices):
    context = service.daemon.context
    who = ACME if choices.byte() % 4 else ROOT
    caller = Caller(who, "admin" if who == ROOT else "tenant", "session", "fuzz")
    session, _ = await open_session(context, caller, opening(who))
    running = []
    try:
        await _step(context, session, "OpenNamespace", TEMPLATES["OpenNamespace"][0])
        for _ in range(STEPS_MAX):
            if not choices.left or session.ended:
                break
            name = choices.of(NAMES)
            if roles.NEEDED[name] == roles.ADMIN and who == ROOT and name not in HARMLESS:
                continue
            request = mutated(choices, choices.of(TEMPLATES[name]))
            task = asyncio.ensure_future(_step(context, session, name, request))
            running.append(task)
            if choices.byte() % 4:
                await asyncio.wait([task])
        for done in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(done, BaseException):
                raise done
    finally:
        context.store.end_session(session)
        context.store.drains.end()
        context.state = "serving"


async def _step(context, session, name, request):
    try:
        reply = OPERATIONS[number_of(name)].serve(context, session, request)
        message = reply if isinstance(reply, Message) else await reply
        assert message.boot_id == context.boot_id
        message.SerializeToString()
        if isinstance(message, pb.GetReply) and not session.ended:
            context.store.expose(session, [session.lease(i.lease_id) for i in message.leases])
    except KVStoredError:
        pass


def seeds():
    """A put and a get; then whatever comes."""
    put = [NAMES.index(name) for name in ("Reserve", "Commit", "Get", "Attach", "Release", "Lookup")]
    steps = b"".join(bytes([index, 0, 0, 0, 1]) for index in put)
    everything = b"".join(bytes([index, 1, 1, 3, 7, 0, 2]) for index in range(len(NAMES)))
    return [b"\1" + steps, b"\1" + everything, b"\0" + everything]
