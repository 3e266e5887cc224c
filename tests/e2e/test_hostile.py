"""Clients that break every rule. The daemon lives, holds nothing of theirs, and an honest client goes on."""

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import random
import signal
import socket
import threading
import time

import pytest
from kvstored_proto import frames
from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.leases import ADMIN_SESSIONS
from kvstored.testing.daemon_process import DaemonProcess, status
from kvstored.testing.waiting import PATIENCE_S
from tests.e2e.checks import BLOCK_BYTES, NOBODY, Bystander, Level, check_balance, dies_of, fill, in_fork, rss_bytes
from tests.e2e.raw_client import (
    HIT,
    RESERVED,
    THROTTLED,
    Ended,
    RawClient,
    Refused,
    blocks_of,
    hashes_of,
    payload,
)

MIB = 1 << 20
MAX_SESSIONS = 24
GROWTH_MAX_BYTES = 48 * MIB  # of the daemon's own memory, whatever its clients do
MADV_REMOVE = 9
GONE = (Ended, ConnectionError)

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")


@pytest.fixture(scope="module")
def daemon():
    settings = {
        "dram.capacity_bytes": str(64 * MIB),
        "dram.segment_bytes": str(8 * MIB),
        "nvme.capacity_bytes": str(128 * MIB),
        "nvme.extent_bytes": str(32 * MIB),
        "server.max_sessions": str(MAX_SESSIONS),
        "server.socket_mode": "0666",
        "tenants": json.dumps([{"name": "t", "uids": sorted({os.getuid(), NOBODY}), "role": "admin"}]),
    }
    running = DaemonProcess(settings, nvme=True)
    running.directory.chmod(0o711)  # another uid reaches the socket
    with running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def silent(daemon):
    """Connects first and says nothing; the last test looks what became of it."""
    with RawClient(daemon.session_socket, open_session=False) as client:
        yield client


@pytest.fixture
def level(daemon):
    """The test's attack stands between an honest client and the check that nothing is held afterwards."""
    with Bystander(daemon.session_socket) as bystander:
        before = Level(daemon)
        yield bystander
        bystander.wait_rounds(1)
        before.check()
    check_balance(daemon.session_socket)


def attacker(daemon, **opening):
    return RawClient(daemon.session_socket, name="attacker", **opening)


def ends(client):
    """Whether the daemon closes the connection."""
    try:
        while True:
            client.receive()
    except GONE:
        return True


# ---- bytes that are no frames ----


def test_garbage_ends_the_connection_or_is_refused(daemon, level):
    rng = random.Random(1)
    for _ in range(40):
        with attacker(daemon) as client, contextlib.suppress(*GONE):
            client.send_bytes(rng.randbytes(rng.randint(1, 3000)))
            client.sock.shutdown(socket.SHUT_WR)
            assert ends(client)
    assert "Traceback" not in daemon.log_tail()


@pytest.mark.parametrize("length", [frames.MAX_BODY_BYTES + 1, 1 << 31, (1 << 32) - 1])
def test_a_huge_length_ends_the_connection(daemon, level, length):
    for opened in (True, False):
        with attacker(daemon, open_session=opened) as client:
            client.send_bytes(frames.HEADER.pack(length, pb.OPERATION_LOOKUP, 0, 0, 1))
            assert ends(client)


def test_truncated_and_random_messages_are_refused_one_by_one(daemon, level):
    rng = random.Random(2)
    with attacker(daemon) as client:
        namespace = client.namespace()
        operations = [n for n in pb.Operation.values() if n not in (pb.OPERATION_OPEN_SESSION, pb.OPERATION_DRAIN)]
        whole = pb.ReserveRequest(namespace_id=namespace, hashes=b"".join(hashes_of("x", 3)), hash_bytes=32)
        for operation in operations:
            bodies = [whole.SerializeToString()[: rng.randint(1, 90)], rng.randbytes(60), b"\xff" * 11, b"\x0a\xff"]
            for body in bodies:
                if operation == pb.OPERATION_CLOSE_SESSION:
                    continue
                with contextlib.suppress(Refused):
                    client.result(client.send(operation, body), pb.KeepAliveReply)
        assert client.call(pb.OPERATION_KEEP_ALIVE, b"", pb.KeepAliveReply).boot_id
    assert "Traceback" not in daemon.log_tail()


@pytest.mark.parametrize("operation", [0, 20, 99, 106, 200, 201, 65535])
def test_an_unknown_operation_is_refused_and_the_session_goes_on(daemon, level, operation):
    with attacker(daemon) as client:
        with pytest.raises(Refused, match="3: "):
            client.result(client.send(operation, b"abc"), pb.KeepAliveReply)
        assert client.namespace()


def test_nothing_but_an_opening_is_answered_before_it(daemon, level):
    with attacker(daemon, open_session=False) as client:
        for operation in (pb.OPERATION_STATUS, pb.OPERATION_GET, pb.OPERATION_SEGMENTS_DROPPED, 77):
            with pytest.raises(Refused, match="16: "):
                client.result(client.send(operation, b""), pb.KeepAliveReply)
        with pytest.raises(Refused, match="3: "):
            client.result(client.send(pb.OPERATION_OPEN_SESSION, b"\xff" * 9), pb.KeepAliveReply)
        with pytest.raises(Refused, match="9: "):
            client.call(pb.OPERATION_OPEN_SESSION, pb.OpenSessionRequest(protocol_min=7, protocol_max=9), pb.Error)
    assert "Traceback" not in daemon.log_tail()


def test_a_session_that_was_closed_can_hold_nothing(daemon, level):
    with attacker(daemon, staging_bytes=MIB) as client:
        namespace = client.namespace()
        hashes = hashes_of("closed", 4)
        client.put(namespace, hashes, [payload(h, BLOCK_BYTES) for h in hashes])
        get = pb.GetRequest(namespace_ids=[namespace], hashes=b"".join(hashes), hash_bytes=32)
        reserve = pb.ReserveRequest(
            namespace_id=namespace, hashes=b"".join(hashes_of("never", 2)), hash_bytes=32, block_bytes=4096
        )
        client.send(pb.OPERATION_CLOSE_SESSION, pb.CloseSessionRequest())
        with contextlib.suppress(*GONE):
            for _ in range(20):
                client.send(pb.OPERATION_GET, get)
                client.send(pb.OPERATION_RESERVE, reserve)
        assert ends(client)


def test_long_names_are_refused(daemon, level):
    name = "n" * 900_000
    with pytest.raises(Refused, match="3: "):
        RawClient(daemon.session_socket, name=name)
    with attacker(daemon) as client, pytest.raises(Refused, match="3: "):
        client.namespace(model=name)


# ---- descriptors ----


@pytest.mark.parametrize("count", [1, 16, 250, 253])
def test_descriptors_that_a_client_sends_are_closed(daemon, level, count):
    fds = [os.open("/dev/null", os.O_RDONLY)] * count
    with attacker(daemon) as client:
        for _ in range(20):
            client.send(pb.OPERATION_KEEP_ALIVE, b"", fds=fds)
        with attacker(daemon) as other:  # announced, and none came
            other.send_bytes(frames.encode(pb.OPERATION_KEEP_ALIVE, 1, b"", fd_count=3))
            assert ends(other)
        client.call(pb.OPERATION_KEEP_ALIVE, b"", pb.KeepAliveReply)
        sent = [link for link in daemon.descriptors() if link == "/dev/null"]
        assert len(sent) <= 3, "its own standard input at most"
    os.close(fds[0])


def test_a_session_is_sent_a_segment_once_whatever_it_says(daemon, level):
    with attacker(daemon, staging_bytes=MIB) as client:
        namespace = client.namespace()
        hashes = hashes_of("again", 4)
        client.put(namespace, hashes, [payload(h, BLOCK_BYTES) for h in hashes])
        for _ in range(200):
            lease = client.get(namespace, hashes).leases[0]
            ids = {block.segment_id for block in blocks_of(lease)}
            client.send(pb.OPERATION_SEGMENTS_DROPPED, pb.SegmentIds(ids=ids), frames.ONE_WAY)
            client.release([lease.lease_id])  # `RawClient` asserts that nothing is sent twice
        assert client.read(namespace, hashes) == [payload(h, BLOCK_BYTES) for h in hashes]


# ---- handles, offsets, indices ----


def test_handles_that_are_not_the_clients_are_refused(daemon, level):
    with attacker(daemon, staging_bytes=MIB) as client:
        hashes = hashes_of("wrong", 2)
        calls = [
            lambda: client.lookup(99, hashes),
            lambda: client.get([1, 2**32 - 1], hashes),
            lambda: client.get([], hashes),
            lambda: client.reserve(0, hashes, 4096),
            lambda: client.commit(2**63, [0], [0]),
            lambda: client.abort(1),
            lambda: client.prefetch(7, hashes),
            lambda: client.delete(7, hashes),
            lambda: client.call(pb.OPERATION_ATTACH, pb.AttachRequest(lease_id=1), pb.GetReply),
            lambda: client.call(
                pb.OPERATION_POLL_PREFETCH, pb.PollPrefetchRequest(prefetch_id=1), pb.PollPrefetchReply
            ),
            lambda: client.call(
                pb.OPERATION_CANCEL_PREFETCH, pb.CancelPrefetchRequest(prefetch_id=1), pb.PollPrefetchReply
            ),
        ]
        for call in calls:
            with pytest.raises(Refused, match=r"(3|5): "):
                call()
        assert client.release([0, 1, 2**63, 2**64 - 1]) == 0


def test_commits_that_make_no_sense_change_nothing(daemon, level):
    with attacker(daemon, staging_bytes=MIB) as client:
        namespace = client.namespace("commits")
        hashes = hashes_of("sense", 4)
        reserved = client.reserve(namespace, hashes, BLOCK_BYTES)
        assert list(reserved.outcomes) == [RESERVED] * 4
        wrong = [
            ([0], [MIB]),
            ([0], [MIB - BLOCK_BYTES + 1]),
            ([0], [2**64 - 1]),
            ([0], [2**63]),
            ([0, 1], [0, 2**40]),
            ([4], [0]),
            ([2**32 - 1], [0]),
            ([0, 0], [0, 0]),
            ([0, 1], [0]),
            ([], []),
            (list(range(4)) * 3000, [0] * 12000),
        ]
        for indices, offsets in wrong:
            with pytest.raises(Refused, match="3: "):
                client.commit(reserved.reservation_id, indices, offsets)
        assert client.contains(namespace, hashes) == [2] * 4
        client.staging[: 2 * BLOCK_BYTES] = payload(hashes[0], BLOCK_BYTES) * 2
        assert client.commit(reserved.reservation_id, [0, 1], [0, 0]) == [HIT] * 2  # from one place: no harm
        with pytest.raises(Refused, match="3: "):
            client.commit(reserved.reservation_id, [0], [0])
        client.abort(reserved.reservation_id)
        assert client.contains(namespace, hashes) == [1, 1, 0, 0]
        assert client.read(namespace, hashes)[0] == payload(hashes[0], BLOCK_BYTES)


def test_reservations_that_make_no_sense_are_refused(daemon, level):
    with attacker(daemon, staging_bytes=MIB) as client:
        namespace = client.namespace()
        hashes = hashes_of("odd", 2)
        wrong = [
            (hashes, 0, b""),
            (hashes, 2**32 - 1, b""),
            (hashes, [4096], b""),
            (hashes, [4096, 0], b""),
            ([hashes[0]] * 2, 4096, b""),
            (hashes, 4096, b"short"),
            ([b"short"], 4096, b""),
            ([b"x" * 65], 4096, b""),
            (hashes_of("many", 8193), 4096, b""),
        ]
        for names, sizes, parent in wrong:
            with pytest.raises(Refused, match="3: "):
                client.reserve(namespace, names, sizes, parent)


def test_a_chain_that_is_its_own_parent_does_no_harm(daemon, level):
    with attacker(daemon, staging_bytes=MIB) as client:
        namespace = client.namespace("circle")
        hashes = hashes_of("circle", 3)
        blocks = [payload(h, 4096) for h in hashes]
        for _ in range(20):
            client.put(namespace, hashes, blocks, parent=hashes[2])
            client.put(namespace, hashes[:1], blocks[:1], parent=hashes[0])
            assert client.read(namespace, hashes) == blocks
            client.delete(namespace, hashes)


def test_cursors_that_the_daemon_never_gave_are_refused(daemon, level):
    with attacker(daemon) as client:
        for cursor in (b"x", b"d", b"d\xff\xff\xff\xff", b"d\0\0\0\0" + b"\xff" * 5000, b"n\0\0\0\0" + b"\xff" * 5000):
            request = admin_pb2.ListBlocksRequest(limit=10, cursor=cursor)
            with contextlib.suppress(Refused):
                client.call(pb.OPERATION_LIST_BLOCKS, request, admin_pb2.ListBlocksReply)
    assert "Traceback" not in daemon.log_tail()


# ---- memory that the daemon shares ----


@pytest.fixture
def shared(daemon):
    """A client with a committed block and its descriptor: client, block, what the block holds."""
    with attacker(daemon, staging_bytes=MIB) as client:
        namespace = client.namespace("shared")
        hashes = hashes_of("shared", 1)
        client.put(namespace, hashes, [payload(hashes[0], BLOCK_BYTES)])
        block = blocks_of(client.get(namespace, hashes).leases[0])[0]
        yield client, block, payload(hashes[0], BLOCK_BYTES)
        assert client.bytes_of(block) == payload(hashes[0], BLOCK_BYTES)


def test_shared_memory_cannot_be_resized_or_punched(level, shared):
    client, block, _ = shared
    for fd in (client.staging_fd, client.segments[block.segment_id]):
        size = os.fstat(fd).st_size
        for other in (0, size - 4096, size + 4096):
            with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
                os.ftruncate(fd, other)
        with pytest.raises(OSError, match="not permitted"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.posix_fallocate(client.segments[block.segment_id], 0, 4096)


def test_a_tier_descriptor_cannot_be_written_through(level, shared):
    client, block, _ = shared
    fd, size = client.segments[block.segment_id], client.sizes[block.segment_id]
    with pytest.raises(PermissionError):
        mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"overwritten", block.offset)
    mapped = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    libc = ctypes.CDLL(None, use_errno=True)
    address = _address_of(mapped)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE) == -1
    assert libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_REMOVE) == -1
    with mmap.mmap(client.staging_fd, MIB) as own:  # the calls as such are right
        assert libc.madvise(ctypes.c_void_p(_address_of(own)), ctypes.c_size_t(MIB), MADV_REMOVE) == 0
    mapped.close()


def test_writing_to_a_tier_mapping_kills_the_writer_alone(level, shared):
    client, block, _ = shared
    with mmap.mmap(client.segments[block.segment_id], 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        address = _address_of(mapped)
        assert dies_of(lambda: ctypes.memset(address + block.offset, 0, 16), signal.SIGSEGV)


def _address_of(mapped):
    view = memoryview(mapped)
    pointer = ctypes.c_void_p()
    size = ctypes.c_ssize_t()
    get = ctypes.pythonapi.PyObject_AsReadBuffer
    get.argtypes = (ctypes.py_object, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_ssize_t))
    get(view, ctypes.byref(pointer), ctypes.byref(size))
    return pointer.value


@as_root
def test_another_uid_cannot_open_the_tier_for_writing(daemon, level):
    def attack():
        with RawClient(daemon.session_socket, name="other uid", staging_bytes=MIB) as client:
            namespace = client.namespace("other")
            hashes = hashes_of("other", 1)
            client.put(namespace, hashes, [payload(hashes[0], BLOCK_BYTES)])
            block = blocks_of(client.get(namespace, hashes).leases[0])[0]
            fd = client.segments[block.segment_id]
            opened = 0
            for path in (f"/proc/self/fd/{fd}", f"/proc/{daemon.pid}/fd/3", f"/proc/{daemon.pid}/mem"):
                with contextlib.suppress(OSError):
                    os.close(os.open(path, os.O_RDWR))
                    opened += 1
            with contextlib.suppress(OSError):
                os.fchmod(fd, 0o666)
                opened += 1
            assert client.bytes_of(block) == payload(hashes[0], BLOCK_BYTES)
            return opened, [s.isolation for s in client.status().sessions if s.client == "other uid"]

    assert in_fork(attack, uid=NOBODY) == (0, ["ok"])


def test_status_says_that_the_same_uid_is_not_kept_out(daemon, level):
    with attacker(daemon) as client:
        found = {s.isolation for s in client.status().sessions if s.client == "attacker"}
        assert found == {"none"}


def test_staging_altered_during_a_commit_never_makes_a_block_that_differs_from_its_hash(daemon, level):
    size, count = MIB, 8
    stop = threading.Event()
    with attacker(daemon, staging_bytes=size * count) as client:
        scribbler = threading.Thread(target=_scribble, args=(client.staging, stop))
        scribbler.start()
        try:
            torn = rounds = 0
            end_s = time.monotonic() + PATIENCE_S
            while rounds < 12 or not torn:  # before a block was altered during its copy nothing is shown
                assert time.monotonic() < end_s, f"no block was altered during its copy in {rounds} rounds"
                torn += _put_and_count_torn(client, size, count, rounds)
                rounds += 1
        finally:
            stop.set()
            scribbler.join()


def _scribble(staging, stop):
    memory = (ctypes.c_char * len(staging)).from_buffer(staging)
    value = 0
    while not stop.is_set():
        value = value % 250 + 1
        ctypes.memset(ctypes.addressof(memory), value, len(memory))


def _put_and_count_torn(client, size, count, number):
    namespace = client.namespace("torn")
    hashes = hashes_of(f"torn {number}", count)
    reserved = client.reserve(namespace, hashes, size, wait_s=60)
    indices = [i for i, outcome in enumerate(reserved.outcomes) if outcome == RESERVED]
    if not indices:
        return 0
    client.commit(reserved.reservation_id, indices, [i * size for i in indices])
    found = client.read(namespace, hashes)  # compares every block with its content hash
    client.delete(namespace, hashes)
    return sum(data[:1] * size != data for data in found)


# ---- hoarding ----


def test_leases_that_are_never_released_are_capped(daemon, level):
    with attacker(daemon, staging_bytes=MIB) as client:
        namespace = client.namespace("leases")
        hashes = hashes_of("lease", 1)
        client.put(namespace, hashes, [payload(hashes[0], 4096)])
        request = pb.GetRequest(namespace_ids=[namespace], hashes=hashes[0], hash_bytes=32)
        replies = []
        for _ in range(100):
            ids = [client.send(pb.OPERATION_GET, request) for _ in range(100)]
            replies += [client.result(i, pb.GetReply) for i in ids]
        held = sum(len(reply.leases) for reply in replies)
        assert held == client.opened.limits.max_leases
        assert {reply.next for reply in replies if not reply.leases} == {THROTTLED}
        assert status(daemon.session_socket).counters["held_leases"] >= held


def test_reservations_that_are_never_committed_are_capped(daemon, level):
    with attacker(daemon) as client:
        namespace = client.namespace("hoard")
        outcomes = []
        for number in range(40):
            outcomes += list(client.reserve(namespace, hashes_of(f"hoard {number}", 32), BLOCK_BYTES).outcomes)
        assert 0 < outcomes.count(RESERVED) * BLOCK_BYTES <= 48 * MIB
    with attacker(daemon) as client:
        namespace = client.namespace("hoard")
        for number in range(client.opened.limits.max_reservations):
            assert client.reserve(namespace, hashes_of(f"small {number}", 1), 1, wait_s=60).reservation_id
        with pytest.raises(Refused, match="8: "):
            client.reserve(namespace, hashes_of("one more", 1), 1)


def test_replies_that_are_never_read_stay_bounded(daemon, level):
    with attacker(daemon, staging_bytes=4 * MIB) as client:
        namespace = client.namespace("mute")
        hashes = hashes_of("mute", 512)
        fill_blocks = [payload(h, 4096) for h in hashes]
        client.put(namespace, hashes, fill_blocks)
        before = rss_bytes(daemon.pid)
        request = pb.GetRequest(namespace_ids=[namespace], hashes=b"".join(hashes), hash_bytes=32)
        contains = pb.ContainsRequest(namespace_id=namespace, hashes=b"".join(hashes), hash_bytes=32)
        client.sock.settimeout(1.0)
        sent = 0
        with contextlib.suppress(TimeoutError):
            for _ in range(100_000):
                client.send(pb.OPERATION_GET, request)
                client.send(pb.OPERATION_CONTAINS, contains)
                sent += 1
        assert sent < 100_000, "the daemon never stopped reading"
        level.wait_rounds(3)
        assert rss_bytes(daemon.pid) - before < GROWTH_MAX_BYTES


def test_big_answers_from_small_questions_stay_bounded(daemon, level):
    with attacker(daemon, staging_bytes=4 * MIB) as client:
        namespace = client.namespace("echo")
        hashes = hashes_of("echo", 64)
        client.put(namespace, hashes, [payload(h, 4096) for h in hashes])
        before = rss_bytes(daemon.pid)
        many = b"".join(hashes) * 128
        client.sock.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            for _ in range(64):
                client.send(pb.OPERATION_GET, pb.GetRequest(namespace_ids=[namespace] * 64, hashes=many, hash_bytes=32))
        level.wait_rounds(3)
        assert rss_bytes(daemon.pid) - before < GROWTH_MAX_BYTES


def test_half_frames_that_never_end_stay_bounded(daemon, level):
    before = rss_bytes(daemon.pid)
    with contextlib.ExitStack() as stack:
        for opened in [True] * 8 + [False] * 16:
            client = stack.enter_context(attacker(daemon, open_session=opened))
            client.send_bytes(frames.HEADER.pack(frames.MAX_BODY_BYTES, pb.OPERATION_LOOKUP, 0, 0, 1))
            client.send_bytes(bytes(frames.MAX_BODY_BYTES - 1))
        level.wait_rounds(3)
        assert rss_bytes(daemon.pid) - before < GROWTH_MAX_BYTES


def test_more_connections_than_sessions_are_refused_and_the_others_go_on(daemon, level):
    clients, refused = [], 0
    try:
        for _ in range(1000):
            client = RawClient(daemon.session_socket, open_session=False)
            clients.append(client)
            try:
                client.open(client_name="crowd", staging_bytes=4096)
            except (Refused, *GONE):
                refused += 1
        assert 1000 - refused <= MAX_SESSIONS + ADMIN_SESSIONS
        level.wait_rounds(3)
    finally:
        for client in clients:
            client.close()


def test_a_client_that_connects_and_leaves_at_any_moment_leaves_nothing(daemon, level):
    opening = frames.encode(
        pb.OPERATION_OPEN_SESSION,
        1,
        pb.OpenSessionRequest(protocol_min=1, protocol_max=1, staging_bytes=8 * MIB).SerializeToString(),
    )
    for cut in (0, 1, 15, 16, len(opening) - 1, len(opening)):
        for _ in range(10):
            with RawClient(daemon.session_socket, open_session=False) as client:
                client.send_bytes(opening[:cut])


def test_a_client_that_dies_in_the_middle_of_everything_leaves_nothing(daemon, level):
    for number in range(5):
        client = attacker(daemon, staging_bytes=8 * MIB)
        namespace = client.namespace("dying")
        fill(client, namespace, f"dying {number}", 2 * MIB, wait_s=1)
        hashes = hashes_of(f"dead {number}", 64)
        reserved = client.reserve(namespace, hashes, BLOCK_BYTES, wait_s=1)
        indices = [i for i, outcome in enumerate(reserved.outcomes) if outcome == RESERVED]
        request = pb.CommitRequest(
            reservation_id=reserved.reservation_id,
            indices=indices,
            staging_offsets=[i * BLOCK_BYTES for i in indices],
        )
        client.send(pb.OPERATION_COMMIT, request)
        client.send(pb.OPERATION_GET, _waiting_get(namespace, hashes))
        client.send(pb.OPERATION_PREFETCH, pb.PrefetchRequest(**_keys(namespace, hashes_of("dying 0 0", 16))))
        client.close()


def _keys(namespace, hashes):
    return {"namespace_ids": [namespace], "hashes": b"".join(hashes), "hash_bytes": len(hashes[0])}


def _waiting_get(namespace, hashes):
    return pb.GetRequest(**_keys(namespace, hashes), wait_ms=20_000)


def test_a_connection_that_says_nothing_is_ended(silent):
    assert ends(silent)
