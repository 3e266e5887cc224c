"""A daemon in a thread, just large enough to go wrong in the ways that a client must survive.

It keeps blocks of up to one slot in one memfd segment, answers at once unless told to be
silent, and remembers what it was asked. Policies, tiers and limits are the real daemon's.
"""

import array
import dataclasses
import mmap
import os
import socket
import struct
import threading
from collections import Counter
from pathlib import Path

from kvstored_proto import frames, namespace
from kvstored_proto.v1 import kvstored_pb2 as pb

PATIENT = {"timeout_s": 60.0, "connect_timeout_s": 60.0}  # a client's settings: a busy machine is no absent daemon
SPEC = pb.NamespaceSpec(model="m", block_tokens=4)
STAGING_BYTES = 1 << 20  # of the client that the tests have
SLOT_BYTES = 4096
SLOTS = 256
REQUESTS = {
    pb.OPERATION_OPEN_SESSION: pb.OpenSessionRequest,
    pb.OPERATION_OPEN_NAMESPACE: pb.OpenNamespaceRequest,
    pb.OPERATION_LOOKUP: pb.LookupRequest,
    pb.OPERATION_CONTAINS: pb.ContainsRequest,
    pb.OPERATION_GET: pb.GetRequest,
    pb.OPERATION_RELEASE: pb.ReleaseRequest,
    pb.OPERATION_RESERVE: pb.ReserveRequest,
    pb.OPERATION_COMMIT: pb.CommitRequest,
    pb.OPERATION_ABORT: pb.AbortRequest,
    pb.OPERATION_PREFETCH: pb.PrefetchRequest,
    pb.OPERATION_POLL_PREFETCH: pb.PollPrefetchRequest,
    pb.OPERATION_CANCEL_PREFETCH: pb.CancelPrefetchRequest,
    pb.OPERATION_TOUCH: pb.TouchRequest,
    pb.OPERATION_HINT: pb.HintRequest,
    pb.OPERATION_DELETE: pb.DeleteRequest,
    pb.OPERATION_STATUS: pb.StatusRequest,
    pb.OPERATION_SEGMENTS_DROPPED: pb.SegmentIds,
}


def answer_within(client, timeout_s):
    """From here on the client waits for an answer for so long."""
    client._core.settings = dataclasses.replace(client._core.settings, timeout_s=timeout_s)


def due(client):
    """As after the breaker's period: the client may try again."""
    client._core.breaker._retry_at_s = 0.0


class Peer:
    """One client's connection, as the daemon sees it."""

    def __init__(self, daemon: "FakeDaemon", sock: socket.socket):
        self.daemon = daemon
        self.sock = sock
        self.sending = threading.Lock()
        self.staging = b""
        self.segment_sent = False
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.begun = threading.Event()
        daemon.peers.append(self)
        self.thread.start()
        self.begun.set()

    def serve(self):
        reader = frames.FrameReader()
        try:
            while data := self.sock.recv(1 << 16):
                for frame in reader.feed(data):
                    self.daemon.handle(self, frame)
        except OSError:
            pass

    def send(self, operation, request_id, message, flags=frames.REPLY, fds=()):
        data = frames.encode(operation, request_id, message.SerializeToString(), flags, len(fds))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with self.sending:
                sent = self.sock.sendmsg([data], ancillary)
                self.sock.sendall(data[sent:])
        except OSError:
            pass

    def send_segment(self, segment_id, fd, size_bytes, staging=False):
        message = pb.Segments(segments=[pb.Segment(id=segment_id, size_bytes=size_bytes)], staging=staging)
        self.send(pb.OPERATION_SEGMENTS, 0, message, 0, (fd,))

    def hang_up(self):
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.begun.wait()
        self.thread.join(60)
        self.sock.close()


class FakeDaemon:
    """Listens on `path`; `address` is what a client connects to."""

    def __init__(self, directory: Path):
        self.path = str(directory / "s")
        self.address = f"unix:{self.path}"
        self.boot_id = 0
        self.silent: set[int] = set()  # operations that get no answer until `answer_held`
        self.refuse: dict[int, tuple[int, str]] = {}  # operation -> error
        self.throttle_reserves = 0  # so many more reserve calls are throttled
        self.protocol = 1
        self.features: list[str] = []
        self.before_reply = {}  # operation -> called with the peer
        self.held = []
        self.peers: list[Peer] = []
        self.asked: list[tuple[int, object]] = []
        self.counts: Counter[int] = Counter()
        self.blocks: dict[bytes, int] = {}  # hash -> slot
        self.sizes: dict[bytes, int] = {}
        self.leases: set[int] = set()
        self.reservations: dict[int, dict[int, tuple[bytes, int]]] = {}
        self.next_id = 1
        self.next_slot = 0
        self.segment_id = 7
        self.segment_fd = self._memfd(SLOTS * SLOT_BYTES)
        self.memory = mmap.mmap(self.segment_fd, SLOTS * SLOT_BYTES)
        self.lock = threading.RLock()
        self.start()

    @staticmethod
    def _memfd(size_bytes: int) -> int:
        fd = os.memfd_create("fake", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        return fd

    # ---- life ----

    def start(self):
        self.boot_id += 1
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen(16)
        self.accepting = threading.Thread(target=self._accept, daemon=True)
        self.accepting.start()

    def _accept(self):
        listener = self.listener
        try:
            while True:
                sock, _ = listener.accept()
                Peer(self, sock)
        except OSError:
            pass

    def stop(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.accepting.join(60)
        self.listener.close()
        os.unlink(self.path)
        self.hang_up()

    def hang_up(self):
        """End every session, as a restart does."""
        while self.peers:
            self.peers.pop().hang_up()
        with self.lock:
            self.leases.clear()
            self.reservations.clear()

    def close(self):
        if os.path.exists(self.path):
            self.stop()
        self.memory.close()
        os.close(self.segment_fd)

    # ---- serving ----

    def handle(self, peer, frame):
        request = REQUESTS[frame.operation].FromString(frame.body)
        with self.lock:
            self.asked.append((frame.operation, request))
            self.counts[frame.operation] += 1
            if frame.operation in self.silent:
                self.held.append((peer, frame, request))
                return
        self.answer(peer, frame, request)

    def answer_held(self):
        with self.lock:
            held, self.held = self.held, []
        for peer, frame, request in held:
            self.answer(peer, frame, request)

    def answer(self, peer, frame, request):
        if frame.operation in self.refuse:
            code, text = self.refuse[frame.operation]
            error = pb.Error(code=code, message=text)
            peer.send(frame.operation, frame.request_id, error, frames.REPLY | frames.ERROR)
            return
        with self.lock:
            name = pb.Operation.Name(frame.operation).removeprefix("OPERATION_").lower()
            reply = getattr(self, name)(peer, request)
        if frame.operation in self.before_reply:
            self.before_reply[frame.operation](peer)
        if not frame.flags & frames.ONE_WAY:
            peer.send(frame.operation, frame.request_id, reply)

    def asked_for(self, operation):
        return [request for kind, request in self.asked if kind == operation]

    def open_session(self, peer, request):
        if request.staging_bytes:
            fd = self._memfd(request.staging_bytes)
            peer.staging = mmap.mmap(fd, request.staging_bytes)
            peer.send_segment(0, fd, request.staging_bytes, staging=True)
            os.close(fd)
        return pb.OpenSessionReply(
            boot_id=self.boot_id,
            protocol=self.protocol,
            features=self.features,
            tenant="default",
            staging_bytes=request.staging_bytes,
            group_id=b"g" * 16 if request.create_group else request.join_group,
            limits=pb.Limits(max_blocks_per_call=64),
        )

    def open_namespace(self, peer, request):
        digest = namespace.digest("default", request.spec)
        seed = namespace.chain_seed("default", request.spec)
        return pb.OpenNamespaceReply(boot_id=self.boot_id, namespace_id=1, digest=digest, chain_seed=seed)

    @staticmethod
    def split(request):
        size = request.hash_bytes
        return [request.hashes[i : i + size] for i in range(0, len(request.hashes), size)]

    def run(self, request):
        found = []
        for hash_ in self.split(request):
            if hash_ not in self.blocks:
                break
            found.append(hash_)
        return found

    def lookup(self, peer, request):
        n = len(self.run(request))
        ended = pb.OUTCOME_HIT if n == len(self.split(request)) else pb.OUTCOME_MISS
        reply = pb.LookupReply(prefix_blocks=n, ready_blocks=n, dram_blocks=n, next=ended)
        if request.prefill_tokens_per_s:
            reply.load_s, reply.recompute_s = 1.0, n * 4 / request.prefill_tokens_per_s
            reply.paying_blocks = n // 2
        if request.prefetch:
            reply.prefetch_id, reply.queued_blocks = self.number(), n
        return reply

    def contains(self, peer, request):
        return pb.ContainsReply(outcomes=bytes(int(h in self.blocks) for h in self.split(request)))

    def hint(self, peer, request):
        found = sum(h in self.blocks for h in self.split(request))
        return pb.HintReply(blocks=found, applied_blocks=found, hard_pinned_bytes=7)

    def touch(self, peer, request):
        return pb.TouchReply(touched=sum(h in self.blocks for h in self.split(request)))

    def delete(self, peer, request):
        return pb.DeleteReply(deleted=sum(self.blocks.pop(h, None) is not None for h in self.split(request)))

    def get(self, peer, request):
        found = self.run(request)
        ended = pb.OUTCOME_HIT if len(found) == len(self.split(request)) else pb.OUTCOME_MISS
        if not found:
            return pb.GetReply(boot_id=self.boot_id, next=ended)
        if not peer.segment_sent:
            peer.segment_sent = True
            peer.send_segment(self.segment_id, self.segment_fd, SLOTS * SLOT_BYTES)
        leases = [self.lease(i, found) for i in request.namespace_ids]
        return pb.GetReply(boot_id=self.boot_id, blocks=len(found), next=ended, leases=leases)

    def lease(self, namespace_id, found):
        lease_id = self.number()
        self.leases.add(lease_id)
        slots = [self.segment_id << frames.SLOT_INDEX_BITS | self.blocks[h] for h in found]
        heads = [frames.HEAD.pack(2, 0, self.sizes[h], h[:16].ljust(16, b"\0")) for h in found]
        packed = struct.pack(f"<{len(slots)}Q", *slots)
        return pb.Lease(lease_id=lease_id, namespace_id=namespace_id, slots=packed, heads=b"".join(heads))

    def release(self, peer, request):
        self.leases -= set(request.lease_ids)
        return pb.ReleaseReply(released=len(request.lease_ids))

    def number(self):
        self.next_id += 1
        return self.next_id

    def reserve(self, peer, request):
        hashes = self.split(request)
        if self.throttle_reserves:
            self.throttle_reserves -= 1
            return pb.ReserveReply(outcomes=bytes([pb.OUTCOME_THROTTLED]) * len(hashes), retry_after_ms=1)
        sizes = list(request.sizes_bytes) or [request.block_bytes] * len(hashes)
        outcomes = bytes(pb.OUTCOME_HIT if h in self.blocks else pb.OUTCOME_RESERVED for h in hashes)
        opened = {i: (h, sizes[i]) for i, h in enumerate(hashes) if h not in self.blocks}
        if not opened:
            return pb.ReserveReply(outcomes=outcomes)
        reservation_id = self.number()
        self.reservations[reservation_id] = opened
        return pb.ReserveReply(boot_id=self.boot_id, reservation_id=reservation_id, outcomes=outcomes)

    def commit(self, peer, request):
        opened = self.reservations[request.reservation_id]
        for index, offset in zip(request.indices, request.staging_offsets, strict=True):
            hash_, size = opened.pop(index)
            slot, self.next_slot = self.next_slot, self.next_slot + 1
            start = slot * SLOT_BYTES
            self.memory[start : start + size] = peer.staging[offset : offset + size]
            self.blocks[hash_], self.sizes[hash_] = slot, size
        if not opened:
            del self.reservations[request.reservation_id]
        return pb.CommitReply(boot_id=self.boot_id, outcomes=bytes([pb.OUTCOME_HIT]) * len(request.indices))

    def abort(self, peer, request):
        opened = self.reservations.get(request.reservation_id, {})
        for index in list(request.indices) or list(opened):
            opened.pop(index, None)
        if not opened:
            self.reservations.pop(request.reservation_id, None)
        return pb.AbortReply(boot_id=self.boot_id)

    def prefetch(self, peer, request):
        n = len(self.split(request))
        return pb.PrefetchReply(prefetch_id=self.number(), outcome=pb.OUTCOME_PENDING, queued_blocks=n)

    def poll_prefetch(self, peer, request):
        return pb.PollPrefetchReply(done=True, ready_blocks=3, total_blocks=3)

    cancel_prefetch = poll_prefetch

    def status(self, peer, request):
        return pb.StatusReply(boot_id=self.boot_id, state="serving")

    def segments_dropped(self, peer, request):
        return pb.StatusReply()
