"""A client of the session socket made of frames alone: it can also do what no proper client does.

Nothing of `kvstored_client` is used. Blocks are read with `pread` on the descriptors that the
daemon sent, so that what a test sees is what the daemon stored.
"""

import array
import contextlib
import hashlib
import mmap
import os
import socket
import struct
import time
from typing import NamedTuple

import xxhash
from kvstored_proto import frames
from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

HASH_BYTES = 32
MISS, HIT, PENDING, THROTTLED, NO_ROOM, RESERVED = range(6)
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * frames.MAX_FDS_PER_FRAME)


class Refused(Exception):
    """The daemon answered with an error."""

    def __init__(self, error):
        super().__init__(f"{error.code}: {error.message}")
        self.code = error.code


class Ended(Exception):
    """The daemon closed the connection."""


class Block(NamedTuple):
    """Where the daemon says that a block is, and what."""

    segment_id: int
    offset: int
    size_bytes: int
    content_hash: bytes


def hashes_of(name, count):
    """Block hashes of a chain with this name."""
    return [hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(count)]


def payload(hash_, size_bytes, version=0):
    """Bytes that say which block they are of, in every 32 of them."""
    seed = hashlib.sha256(hash_ + bytes([version])).digest()
    return (seed * (size_bytes // len(seed) + 1))[:size_bytes]


class RawClient:
    """One connection. Opens a session unless told not to; every wait has a time-out."""

    def __init__(self, path, *, token="", name="raw", staging_bytes=0, open_session=True, timeout_s=60.0, **opening):
        self.segments = {}  # id -> descriptor
        self.sizes = {}
        self.retired = []
        self.staging = None
        self.staging_fd = -1
        self.keep_retired = False  # True: never answer SEGMENTS_RETIRED
        self._arrived = {}
        self._reader = frames.FrameReader()
        self._last_id = 0
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(timeout_s)
        try:
            self.sock.connect(str(path))
            if open_session:
                self.opened = self.open(token=token, client_name=name, staging_bytes=staging_bytes, **opening)
        except BaseException:
            self.close()
            raise

    def open(self, **fields):
        request = pb.OpenSessionRequest(protocol_min=1, protocol_max=1, **fields)
        return self.call(pb.OPERATION_OPEN_SESSION, request, pb.OpenSessionReply)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the connection and let go of descriptors and staging."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # a fork that has the socket too must not keep the session
        self.sock.close()
        self._reader.close()
        while self.segments:
            os.close(self.segments.popitem()[1])
        if self.staging is not None:
            self.staging.close()
            self.staging = None
        if self.staging_fd >= 0:
            os.close(self.staging_fd)
            self.staging_fd = -1

    # ---- frames ----

    def send(self, operation, message=b"", flags=0, fds=()):
        """Send one frame with whatever body and descriptors; returns its request id."""
        self._last_id += 1
        body = message if isinstance(message, bytes) else message.SerializeToString()
        self.send_bytes(frames.encode(operation, self._last_id, body, flags, fd_count=0), fds)
        return self._last_id

    def send_bytes(self, data, fds=()):
        """Send bytes as they are."""
        if fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            data = data[self.sock.sendmsg([data], rights) :]
        self.sock.sendall(data)

    def receive(self):
        """Take what arrives next; raises Ended at the end."""
        data, ancillary, _, _ = self.sock.recvmsg(1 << 18, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for _level, _kind, raw in ancillary:
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
        for frame in self._reader.feed(data, fds):
            self._take(frame)
        if not data:
            raise Ended

    def _take(self, frame):
        if frame.flags & frames.REPLY:
            self._arrived[frame.request_id] = frame
        elif frame.operation == pb.OPERATION_SEGMENTS:
            self._add_segments(pb.Segments.FromString(frame.body), frame.fds)
        elif frame.operation == pb.OPERATION_SEGMENTS_RETIRED:
            ids = list(pb.SegmentIds.FromString(frame.body).ids)
            self.retired += ids
            if not self.keep_retired:
                self.drop(ids)

    def _add_segments(self, message, fds):
        for segment, fd in zip(message.segments, fds, strict=True):
            if message.staging:
                self.staging_fd, self.staging = fd, mmap.mmap(fd, segment.size_bytes)
            else:
                assert segment.id not in self.segments, "a segment is sent once"
                self.segments[segment.id], self.sizes[segment.id] = fd, segment.size_bytes

    def drop(self, ids):
        """Close segments and say so."""
        for segment_id in ids:
            if segment_id in self.segments:
                os.close(self.segments.pop(segment_id))
        self.send(pb.OPERATION_SEGMENTS_DROPPED, pb.SegmentIds(ids=ids), frames.ONE_WAY)

    def result(self, request_id, reply_type):
        """The reply to a request; raises Refused or Ended."""
        while request_id not in self._arrived:
            self.receive()
        frame = self._arrived.pop(request_id)
        if frame.flags & frames.ERROR:
            raise Refused(pb.Error.FromString(frame.body))
        return reply_type.FromString(frame.body)

    def call(self, operation, message, reply_type):
        return self.result(self.send(operation, message), reply_type)

    def drain_quietly(self):
        """Take all that has arrived, without waiting; False where the daemon has closed."""
        timeout_s = self.sock.gettimeout()
        self.sock.setblocking(False)
        try:
            while True:
                self.receive()
        except BlockingIOError:
            return True
        except (Ended, ConnectionError):
            return False
        finally:
            self.sock.settimeout(timeout_s)

    # ---- verbs ----

    def namespace(self, model="m", **fields):
        request = pb.OpenNamespaceRequest(spec=pb.NamespaceSpec(model=model, **fields))
        return self.call(pb.OPERATION_OPEN_NAMESPACE, request, pb.OpenNamespaceReply).namespace_id

    def lookup(self, namespace_id, hashes):
        request = pb.LookupRequest(namespace_ids=[namespace_id], hashes=b"".join(hashes), hash_bytes=len(hashes[0]))
        return self.call(pb.OPERATION_LOOKUP, request, pb.LookupReply)

    def contains(self, namespace_id, hashes):
        request = pb.ContainsRequest(namespace_id=namespace_id, hashes=b"".join(hashes), hash_bytes=len(hashes[0]))
        return list(self.call(pb.OPERATION_CONTAINS, request, pb.ContainsReply).outcomes)

    def reserve(self, namespace_id, hashes, size_bytes, parent=b"", wait_s=0.0):
        sizes = {"block_bytes": size_bytes} if isinstance(size_bytes, int) else {"sizes_bytes": size_bytes}
        request = pb.ReserveRequest(
            namespace_id=namespace_id,
            hashes=b"".join(hashes),
            hash_bytes=len(hashes[0]),
            parent=parent,
            wait_ms=int(wait_s * 1000),
            **sizes,
        )
        return self.call(pb.OPERATION_RESERVE, request, pb.ReserveReply)

    def commit(self, reservation_id, indices, offsets):
        request = pb.CommitRequest(reservation_id=reservation_id, indices=indices, staging_offsets=offsets)
        return list(self.call(pb.OPERATION_COMMIT, request, pb.CommitReply).outcomes)

    def abort(self, reservation_id, indices=()):
        self.call(pb.OPERATION_ABORT, pb.AbortRequest(reservation_id=reservation_id, indices=indices), pb.AbortReply)

    def put(self, namespace_id, hashes, blocks, parent=b"", wait_s=0.0):
        """Reserve, stage and commit; one outcome per block, HIT where it is stored now."""
        reserved = self.reserve(namespace_id, hashes, [len(block) for block in blocks], parent, wait_s)
        outcomes = list(reserved.outcomes)
        wanted = [index for index, outcome in enumerate(outcomes) if outcome == RESERVED]
        while wanted:
            part, offset, offsets = [], 0, []
            while wanted and offset + len(blocks[wanted[0]]) <= len(self.staging):
                index = wanted.pop(0)
                self.staging[offset : offset + len(blocks[index])] = blocks[index]
                part.append(index)
                offsets.append(offset)
                offset += len(blocks[index])
            assert part, "a block fits into staging"
            for index, outcome in zip(part, self.commit(reserved.reservation_id, part, offsets), strict=True):
                outcomes[index] = outcome
        return outcomes

    def get(self, namespace_ids, hashes, wait_s=0.0):
        """Lease the leading blocks: the reply as it came."""
        ids = [namespace_ids] if isinstance(namespace_ids, int) else namespace_ids
        request = pb.GetRequest(
            namespace_ids=ids, hashes=b"".join(hashes), hash_bytes=len(hashes[0]), wait_ms=int(wait_s * 1000)
        )
        return self.call(pb.OPERATION_GET, request, pb.GetReply)

    def read(self, namespace_id, hashes, wait_s=0.0):
        """Get, read the bytes, release; raises AssertionError where bytes and content hash differ."""
        reply = self.get(namespace_id, hashes, wait_s)
        if not reply.leases:
            return []
        try:
            return [self.bytes_of(block) for block in blocks_of(reply.leases[0])]
        finally:
            self.release([lease.lease_id for lease in reply.leases])

    def bytes_of(self, block):
        data = os.pread(self.segments[block.segment_id], block.size_bytes, block.offset)
        assert xxhash.xxh3_128_digest(data) == block.content_hash, "bytes and content hash of a leased block differ"
        return data

    def release(self, lease_ids):
        request = pb.ReleaseRequest(lease_ids=lease_ids)
        return self.call(pb.OPERATION_RELEASE, request, pb.ReleaseReply).released

    def delete(self, namespace_id, hashes):
        request = pb.DeleteRequest(namespace_id=namespace_id, hashes=b"".join(hashes), hash_bytes=len(hashes[0]))
        return self.call(pb.OPERATION_DELETE, request, pb.DeleteReply).deleted

    def prefetch(self, namespace_id, hashes, priority=0):
        request = pb.PrefetchRequest(
            namespace_ids=[namespace_id], hashes=b"".join(hashes), hash_bytes=len(hashes[0]), priority=priority
        )
        return self.call(pb.OPERATION_PREFETCH, request, pb.PrefetchReply)

    def flush(self, wait_s=30.0):
        request = admin_pb2.FlushRequest(wait_ms=int(wait_s * 1000))
        return self.call(pb.OPERATION_FLUSH, request, admin_pb2.FlushReply)

    def status(self):
        return self.call(pb.OPERATION_STATUS, pb.StatusRequest(), pb.StatusReply)

    def list_blocks(self):
        """Every block that the caller may see."""
        blocks, cursor = [], b""
        while True:
            request = admin_pb2.ListBlocksRequest(limit=1000, cursor=cursor)
            reply = self.call(pb.OPERATION_LIST_BLOCKS, request, admin_pb2.ListBlocksReply)
            blocks += reply.blocks
            cursor = reply.cursor
            if not cursor:
                return blocks


def blocks_of(lease):
    """The blocks of a lease."""
    slots = struct.unpack(f"<{len(lease.slots) // 8}Q", lease.slots)
    found = []
    for slot, (_, _, size_bytes, content_hash) in zip(slots, frames.HEAD.iter_unpack(lease.heads), strict=True):
        slot_bytes = -(-size_bytes // frames.SLOT_ALIGN_BYTES) * frames.SLOT_ALIGN_BYTES
        index = slot & ((1 << frames.SLOT_INDEX_BITS) - 1)
        found.append(Block(slot >> frames.SLOT_INDEX_BITS, index * slot_bytes, size_bytes, content_hash))
    return found


def eventually(condition, what, timeout_s=60.0):
    """Wait until `condition()` is true; raises AssertionError that says what did not come."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"within {timeout_s:g} s it did not come that {what}"
        time.sleep(0.02)
