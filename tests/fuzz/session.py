"""The session socket: frames whole, cut, changed and made up, with descriptors that nobody asked for."""

import asyncio
import os
import socket

from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.rpc.operations import number_of
from kvstored.testing.contract_client import ACME
from tests.contract.test_isolation_walk import FRAMES, STREAMS
from tests.contract.walk import METHODS
from tests.fuzz.choices import NUMBERS, mutated
from tests.fuzz.service import BELOW, OWN, Both, opening, templates

STEPS_MAX = 32
SILENCE_S = 50.0
NAMES = sorted(set(METHODS) - STREAMS - {"OpenSession", "CloseSession"})
TEMPLATES = templates(NAMES)
LENGTHS = [frames.MAX_BODY_BYTES, frames.MAX_BODY_BYTES + 1, (1 << 31) - 1, (1 << 32) - 1]
LAST = (1 << 60) + 1  # request id of the question whether the daemon still answers


def make():
    """The target, over a daemon without NVMe and one with it."""
    return Both(_program)


async def _program(service, choices):
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(service.path)
    sock.setblocking(False)
    reading = asyncio.ensure_future(_read(loop, sock))
    try:
        if choices.byte() % 8:
            await loop.sock_sendall(sock, _opening())
            handle = frames.encode(pb.OPERATION_OPEN_NAMESPACE, 2, TEMPLATES["OpenNamespace"][0].SerializeToString())
            await asyncio.sleep(0)
            await loop.sock_sendall(sock, handle)
        whole = True
        for number in range(STEPS_MAX):
            if not choices.left:
                break
            data, whole_now, fds = _piece(choices, number)
            whole &= whole_now
            if fds:
                _send_with_descriptors(sock, data, fds)
            else:
                await loop.sock_sendall(sock, data)
        if whole:
            await loop.sock_sendall(sock, frames.encode(pb.OPERATION_KEEP_ALIVE, LAST, b""))
        else:
            sock.shutdown(socket.SHUT_WR)
        await asyncio.wait_for(reading, SILENCE_S)
    except (ConnectionError, BlockingIOError):
        pass
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        sock.close()


def _opening():
    return frames.encode(pb.OPERATION_OPEN_SESSION, 1, opening(ACME).SerializeToString())


async def _read(loop, sock):
    """Until the last question is answered or the daemon hangs up. What it sends must be frames."""
    reader = frames.FrameReader()
    try:
        while await _read_some(loop, sock, reader):
            pass
    finally:
        reader.close()


async def _read_some(loop, sock, reader):
    await _readable(loop, sock)
    try:
        data, fds, _, _ = socket.recv_fds(sock, 1 << 18, 4 * frames.MAX_FDS_PER_FRAME)
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    ended = not data
    for frame in reader.feed(data, fds):
        for fd in frame.fds:
            os.close(fd)
        if frame.flags & frames.ERROR:
            assert pb.Error.FromString(frame.body).code != 13, "an error that nobody thought of"
        ended |= frame.request_id == LAST
    return not ended


async def _readable(loop, sock):
    ready = asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock.fileno())


def _piece(choices, number):
    """Bytes to send, whether they are whole frames, and descriptors beside them."""
    kind = choices.byte() % 8
    if kind < 4:
        name = choices.of(NAMES)
        body = mutated(choices, choices.of(TEMPLATES[name])).SerializeToString()
        return _frame(choices, number_of(name), number, body), True, 0
    if kind == 4:
        operation = choices.of([*FRAMES, 0, 99, 199, 255, 65535])
        body = FRAMES[operation](OWN).SerializeToString() if operation in FRAMES else b""
        return _frame(choices, operation, number, choices.of([body, body[:-1], choices.bytes(64)])), True, 0
    if kind == 5:
        header = frames.HEADER.pack(choices.of([*NUMBERS[:8], *LENGTHS]), choices.byte(), choices.byte(), 0, number)
        return header + choices.bytes(512), False, 0
    if kind == 6:
        return choices.bytes(1024) or b"\0", False, 0
    return _frame(choices, pb.OPERATION_KEEP_ALIVE, number, b""), True, choices.of([1, 2, 16, 250])


def _frame(choices, operation, number, body):
    flags = choices.of([0, 0, 0, frames.ONE_WAY, frames.REPLY, frames.ERROR, 255])
    return frames.encode(operation, 10 + number, body, flags)


def _send_with_descriptors(sock, data, count):
    null = os.open("/dev/null", os.O_RDONLY)
    try:
        socket.send_fds(sock, [data], [null] * count)
    finally:
        os.close(null)


def seeds():
    """A session that asks for this and that."""
    asks = b"".join(bytes([0, index, 0, 0, 0, 0]) for index in range(len(NAMES)))
    odd = bytes([7, 0, 0, 4, 0, 0, 0, 4, 1, 1, 0, 0, 3, 1, 0, 0, 0])
    below = bytes([1 | BELOW])
    return [
        *(b"\1" + asks, b"\1" + odd + asks, b"\0" + asks, b"\1" + odd + bytes([5, 9, 1, 0, 4, 0]) + b"abcd"),
        *(below + asks, below + odd + asks),
    ]
