"""Every operation through the real handlers and store: sequences of requests, some changed, some at the same time.

Some are given up half-way, as gRPC does it when a client leaves. The first byte says who asks, whether there are two
sessions of it, and whether the daemon has NVMe and lets so little of its DRAM be filled that blocks move.
"""

import asyncio

from kvstored_proto.progress import ENDED, PROGRESS_BYTES, Filler
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.leases import Caller
from kvstored.errors import KVStoredError
from kvstored.rpc import roles, uncancelled
from kvstored.rpc.opening import open_session
from kvstored.rpc.operations import OPERATIONS, number_of
from kvstored.rpc.servicers import served
from kvstored.store import streams
from kvstored.store.outcomes import RESERVED
from kvstored.testing.contract_client import ACME, ROOT
from tests.fuzz.choices import mutated
from tests.fuzz.service import BELOW, BLOCK_BYTES, LIMIT_BYTES, STAGING_BYTES, Both, opening, templates

STEPS_MAX = 40
FLUSH_S = 1.0
PROGRESS_OFFSET = STAGING_BYTES - 4096
TWO = 8  # bit of the first byte, beside BELOW
# What an admin may do to a daemon that is to serve on.
HARMLESS = {"Verify", "Flush", "Drain"}
NAMES = sorted(operation.name for operation in OPERATIONS.values())
TEMPLATES = templates(NAMES)
PUT, SINK, LIMIT = STEPS = ["put", "sink", "limit"]  # beside the operations
LIMITS = [LIMIT_BYTES, 4 * BLOCK_BYTES, 2 * BLOCK_BYTES]  # the first is the one that holds between programs


def make():
    """The target, over a daemon without NVMe (what is dropped there is dropped at once), and one with it."""
    streams.IDLE_MAX_S = 0.002  # nobody fills what is streamed by chance
    return Both(_program)


async def _program(service, choices):
    context = service.daemon.context
    first = choices.byte()
    who = ACME if first % 4 else ROOT
    caller = Caller(who, "admin" if who == ROOT else "tenant", "session", "fuzz")
    request = opening(who)
    request.create_group = bool(first & TWO)
    sessions = [(await open_session(context, caller, request))[0]]
    if first & TWO:
        request.join_group, request.create_group = sessions[0].group.group_id, False
        sessions.append((await open_session(context, caller, request))[0])
    running, beside = [], set()
    try:
        for session in sessions:
            await _step(context, session, "OpenNamespace", TEMPLATES["OpenNamespace"][0])
        for _ in range(STEPS_MAX):
            if not choices.left or all(session.ended for session in sessions):
                break
            name = choices.of([*NAMES, *STEPS])
            if name in STEPS:
                beside.add(name)
                await _beside(context, sessions[0], name, choices)
                continue
            if roles.NEEDED[name] == roles.ADMIN and who == ROOT and name not in HARMLESS:
                continue
            request = mutated(choices, choices.of(TEMPLATES[name]))
            how = choices.byte()
            task = asyncio.ensure_future(_step(context, sessions[(how >> 2) % len(sessions)], name, request))
            running.append(task)
            if how >> 4 & 3 == 3:
                await _given_up(task, how >> 6)
            elif how % 4:
                await asyncio.wait([task])
        for done in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(done, BaseException) and not isinstance(done, asyncio.CancelledError):
                raise done
    finally:
        for session in sessions:
            context.store.end_session(session)
        while uncancelled._left_alone:
            await asyncio.wait(set(uncancelled._left_alone))
        context.store.drains.end()
        context.state = "serving"
        if LIMIT in beside:
            await _limit(context, LIMITS[0])


async def _limit(context, size_bytes):
    await context.changes.set(ACME, {"dram_limit_bytes": str(size_bytes)})


async def _beside(context, session, name, choices):
    """What random requests seldom come to: a whole put, blocks that leave DRAM, a tenant's limit that changes."""
    if name == PUT:
        reserve = choices.of(TEMPLATES["Reserve"])
        reserved = await _step(context, session, "Reserve", reserve)
        if reserved is None:
            return
        indices = [index for index, outcome in enumerate(reserved.outcomes) if outcome == RESERVED]
        for chosen in [indices] if choices.byte() % 2 else [indices[:1], indices[1:]]:
            offsets = [index * BLOCK_BYTES for index in chosen]
            commit = pb.CommitRequest(reservation_id=reserved.reservation_id, indices=chosen, staging_offsets=offsets)
            if choices.byte() % 2 and session.staging is not None and not session.ended:
                commit.streamed, commit.progress_offset = True, PROGRESS_OFFSET
                progress = Filler(session.staging.address_of(PROGRESS_OFFSET, PROGRESS_BYTES))
                progress.fill(choices.of([len(chosen), ENDED, 1, 1 << 63]))
            await _step(context, session, "Commit", commit)
    elif name == SINK:
        parts = context.store.parts
        if parts.below is not None:
            await parts.below.mover.flush(FLUSH_S)
        spaces = list(parts.catalog.spaces.values())
        parts.room.evict([entry for space in spaces for entry in space.entries.values() if not entry.holds], "fuzz")
    else:
        await _limit(context, choices.of(LIMITS))


async def _given_up(task, turns):
    """Its client leaves: at once, or so many turns of the loop later."""
    for _ in range(1 + turns):
        await asyncio.sleep(0)
    task.cancel()


async def _step(context, session, name, request):
    try:
        message = await served(context, session, OPERATIONS[number_of(name)], request, lambda session: None)
        assert message.boot_id == context.boot_id
        message.SerializeToString()
        if isinstance(message, pb.GetReply) and not session.ended:
            context.store.expose(session, [session.lease(i.lease_id) for i in message.leases])
        return message
    except KVStoredError:
        return None


def seeds():
    """A put and a get; then whatever comes."""
    put = [NAMES.index(name) for name in ("Reserve", "Commit", "Get", "Attach", "Release", "Lookup")]
    steps = b"".join(bytes([index, 0, 0, 0, 1]) for index in put)
    everything = b"".join(bytes([index, 1, 1, 3, 7, 0, 2]) for index in range(len(NAMES)))
    left = b"".join(bytes([index, 0, 0, 0, how]) for how in (48, 112, 60) for index in [*put, *range(len(NAMES))])
    both = bytes([1 | BELOW | TWO])
    at = len(NAMES)
    moved = bytes([at, 0, 1, at + 1]) + steps[10:] + bytes([at, 1, 0, at + 1, at + 2, 0, at, 0, 1, at + 2, 2]) + left
    return [
        *(b"\1" + steps, b"\1" + everything, b"\0" + everything, b"\1" + left),
        *(both + steps + left, both + moved, both + everything),
    ]
