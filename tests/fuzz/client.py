"""The client against a daemon that lies: replies changed and made up, descriptors too many, too small and of no use.

Nothing of it may reach the engine but an answer or a KVStoredClientError, and nobody waits for ever.
"""

import os
import socket
from contextlib import suppress

from google.protobuf import message_factory
from kvstored_client.effects import finish
from kvstored_client.errors import KVStoredClientError
from kvstored_client.slots import KnownSlots
from kvstored_client.waiting import ThreadedConnection
from kvstored_proto import frames, page
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.rpc.operations import number_of
from tests.contract.walk import METHODS
from tests.fuzz.choices import LARGE, NUMBERS, Choices, mutated
from tests.fuzz.targets import seeds as light_seeds

STEPS_MAX = 24
ASKED = ["OpenSession", "OpenNamespace", "Lookup", "Contains", "Reserve", "Commit", "Get", "Prefetch", "Status"]
FD_GROWTH_MAX = 32
SIZES = [0, 1, 4096, 65_536]
LEASE = pb.Lease.FromString(light_seeds()["lease_slots"][0])
REPLIES = {
    "OpenSession": pb.OpenSessionReply(protocol=1, session_id=b"s" * 16, staging_bytes=4096, features=[page.FEATURE]),
    "OpenNamespace": pb.OpenNamespaceReply(namespace_id=1, digest=bytes(16), chain_seed=bytes(16)),
    "Get": pb.GetReply(blocks=4, next=pb.OUTCOME_HIT, leases=[LEASE]),
    "Reserve": pb.ReserveReply(reservation_id=1, outcomes=b"\5\5\1"),
}


def make():
    """The target."""
    fds = []

    def run(data):
        _program(Choices(data))
        count = len(os.listdir("/proc/self/fd"))
        fds.append(count)
        del fds[1:-1]
        assert count <= fds[0] + FD_GROWTH_MAX, f"{count} descriptors, {fds[0]} in the beginning"

    return run


def _program(choices):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for sock in (ours, theirs):
        sock.setblocking(False)
    connection = ThreadedConnection(ours)
    tickets = []
    try:
        for name in ASKED:
            request = message_factory.GetMessageClass(METHODS[name].input_type)()
            tickets.append((name, connection.start(number_of(name), request)))
        for _ in range(STEPS_MAX):
            if not choices.left:
                break
            with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                _say(choices, theirs, [ticket.request_id for _, ticket in tickets])
            connection.receive()
        theirs.close()
        connection.receive()
        _believe(connection, tickets)
    finally:
        theirs.close()
        connection.close()


def _believe(connection, tickets):
    """What comes of each call, as the verbs take it."""
    for name, ticket in tickets:
        assert ticket.done, f"{name} would be waited for until its time is out"
        reply_type = message_factory.GetMessageClass(METHODS[name].output_type)
        with suppress(KVStoredClientError):
            reply = _taken(connection, ticket, reply_type)
            for lease in getattr(reply, "leases", ()):
                for run in KnownSlots().of(lease).runs:
                    _read(connection, run)
    if connection.page is not None:
        connection.page.post([1, 2, 3])
    if connection.staging is not None:
        with suppress(KVStoredClientError):
            connection.staging.mapping  # noqa: B018 - mapped at first use


def _taken(connection, ticket, reply_type):
    """The reply by the client's own way from bytes to message."""
    waiting = finish(connection, ticket, reply_type, 1.0)
    next(waiting)
    try:
        waiting.send(ticket.result())
    except StopIteration as stop:
        return stop.value
    raise AssertionError("one wait for one reply")


def _read(connection, run):
    mapping = connection.segments.get(run.segment_id)
    with suppress(ValueError):  # past the end of what was mapped
        bytes(mapping.view(run.offset, min(run.size_bytes, 4096))[:16])


# ---- the daemon ----


def _say(choices, sock, request_ids):
    kind = choices.byte() % 8
    if kind < 4:
        index = choices.byte() % len(ASKED)
        name = ASKED[index]
        reply = REPLIES.get(name) or message_factory.GetMessageClass(METHODS[name].output_type)()
        body = mutated(choices, reply).SerializeToString()
        flags = choices.of([frames.REPLY, frames.REPLY, frames.REPLY | frames.ERROR, 255])
        number = choices.of([request_ids[index], request_ids[index], request_ids[0], 0, 1 << 40])
        sock.send(frames.encode(number_of(name), number, choices.of([body, body, body[:-1]]), flags))
    elif kind == 4:
        body = pb.SegmentIds(ids=[choices.of([0, 1, 7, 8])] * (choices.byte() % 3)).SerializeToString()
        sock.send(frames.encode(pb.OPERATION_SEGMENTS_RETIRED, 0, body))
    elif kind == 5:
        sock.send(choices.bytes(512) or b"\0")
    elif kind == 6:
        error = choices.of([pb.Error(code=5, message="no").SerializeToString(), choices.bytes(32)])
        sock.send(frames.encode(choices.byte(), choices.of(request_ids), error, frames.REPLY | frames.ERROR))
    else:
        _hand_out(choices, sock)


def _hand_out(choices, sock):
    """Descriptors, as many as announced or not, of memory as large as said or not, or of something else."""
    sizes = [choices.of([*SIZES, *NUMBERS, *LARGE]) for _ in range(choices.byte() % 3)]
    segments = [pb.Segment(id=choices.of([0, 7, 8, (1 << 32) - 1]), size_bytes=size) for size in sizes]
    body = pb.Segments(segments=segments, staging=choices.byte() % 4 == 0, session_page=choices.byte() % 4 == 1)
    fds = [_descriptor(choices) for _ in range(len(sizes) + choices.of([0, 0, 0, 1]))]
    announced = choices.of([len(fds), len(fds), len(fds), 0, 255])
    data = frames.encode(pb.OPERATION_SEGMENTS, 0, body.SerializeToString(), 0, announced)
    try:
        socket.send_fds(sock, [data], fds)
    finally:
        for fd in fds:
            os.close(fd)


def _descriptor(choices):
    if choices.byte() % 4 == 0:
        return os.open(choices.of(["/dev/null", "/", "/proc/self/status"]), os.O_RDONLY)
    fd = os.memfd_create("lie", os.MFD_CLOEXEC)
    os.ftruncate(fd, choices.of(SIZES))
    return fd


def seeds():
    """Right answers to all that is asked, and memory."""
    answers = b"".join(bytes([0, index, 0, 0, 0, 0, 0]) for index in range(len(ASKED)))
    memory = bytes([7, 1, 2, 1, 1, 2, 1, 2, 0, 0])
    return [answers, memory + answers, answers + bytes([6, 5, 0, 0]) + memory * 3, bytes([4, 1, 1]) + memory]
