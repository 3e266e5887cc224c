"""What a daemon still holds when every client is gone: sessions, leases, slots, descriptors."""

import time
from collections import Counter

from kvstored_client import Client
from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

from bench.replay import wait_mover_idle
from kvstored.keys import slot_bytes
from kvstored.testing.daemon_process import status

SETTLE_S = 60.0
TIER_MEMORY = ("/memfd:kvstored-dram", "/memfd:kvstored-slots")


def descriptors(daemon):
    """Open descriptors by what they are, without those of the tiers themselves: extents and segments.

    Segments and their slot tables come into being with use, at most three descriptors each.
    """
    own = (str(daemon.nvme_path), *TIER_MEMORY)
    return Counter(link.split(":[")[0] for link in daemon.descriptors() if not link.startswith(own))


def descriptors_at_rest(daemon):
    """The same once nothing changes any more: the connection that asked whether it serves is gone, too."""
    found = descriptors(daemon)
    while True:
        time.sleep(0.1)
        before, found = found, descriptors(daemon)
        if found == before:
            return found


def segment_descriptors(daemon):
    """How many descriptors the DRAM tier has of its segments and their slot tables."""
    return sum(link.startswith(TIER_MEMORY) for link in daemon.descriptors())


def extra_descriptors(daemon, before):
    """Descriptors beyond those before the first client, once they had time to go."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        extra = descriptors(daemon) - before
        if not extra or time.monotonic() > deadline:
            return extra
        time.sleep(0.05)


def sessions_left(daemon):
    """Sessions of churn clients that the daemon still has, once they had time to end."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        left = [s for s in status(daemon.session_socket).sessions if s.client.startswith("churn")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def audit(daemon, before, segments):
    """Counts of everything that leaked, all zero in a daemon that leaks nothing; and the descriptors left.

    Looks again for a while: what is listed and what status says are not of one moment.
    """
    deadline = time.monotonic() + SETTLE_S
    while True:
        leaks, extra = _look(daemon, before, segments)
        if not any(leaks.values()) or time.monotonic() > deadline:
            return leaks, extra
        time.sleep(0.05)


def _look(daemon, before, segments):
    sessions = sessions_left(daemon)
    with Client(daemon.address, name="audit", timeout_s=60.0, connect_timeout_s=60.0) as client:
        wait_mover_idle(client)
        blocks = list_blocks(client)
        reply = client.status()
    dram = next(tier for tier in reply.tiers if tier.name == "dram")
    resident = sum(slot_bytes(block.size_bytes) for block in blocks if "dram" in block.tiers)
    extra = extra_descriptors(daemon, before)
    extra_segments = max(0, segment_descriptors(daemon) - 3 * segments)
    return {
        "leaked_sessions": len(sessions),
        "leaked_leases": sum(session.leases for session in reply.sessions),
        "leaked_reservations": sum(session.reservations for session in reply.sessions),
        "leaked_staging_bytes": sum(s.staging_bytes for s in reply.sessions if s.client != "audit"),
        "leaked_holds": sum(block.holds for block in blocks),
        "leaked_unfinished_blocks": sum(block.state != "ready" for block in blocks),
        "leaked_slot_bytes": abs(dram.used_bytes - resident),
        "leaked_descriptors": sum(extra.values()) + extra_segments,
    }, extra


def list_blocks(client):
    """Every block of the tenant, in both tiers."""
    blocks, cursor = [], b""
    while True:
        request = admin_pb2.ListBlocksRequest(limit=1000, cursor=cursor)
        reply = client.call(pb.OPERATION_LIST_BLOCKS, request, admin_pb2.ListBlocksReply)
        blocks += reply.blocks
        cursor = reply.cursor
        if not cursor:
            return blocks
