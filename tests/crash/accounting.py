"""Whether a daemon's account of its bytes is exact: status beside what is listed, and beside the files."""

import time
from collections import Counter

from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

from bench.common import progress
from kvstored.keys import slot_bytes
from tests.churn_audit import list_blocks

QUIET_S = 120.0


def errors(client, block_bytes_of, dead):
    """Sums that differ, as lines. `block_bytes_of` gives the one block size of a namespace, from its fields.

    `dead` has, by tenant and name of the sum, what deleted blocks that are still leased may add to it.
    """
    status, blocks, spaces = quiet(client)
    found = compare(status, blocks, spaces, block_bytes_of, dead)
    if found:
        counters = {name: n for name, n in status.counters.items() if n and name.startswith(("held", "quarantined"))}
        found.append(f"at that moment: {counters}, allowed {dict(dead)}")
    return found


def compare(status, blocks, spaces, block_bytes_of, dead):
    """Status beside the listings."""
    sizes = {space.digest: slot_bytes(block_bytes_of(space.fields)) for space in spaces}
    owners = {space.digest: space.tenant for space in spaces}
    listed = Counter()
    for block in blocks:
        if "dram" in block.tiers:
            listed[owners[block.namespace_digest], "dram_blocks"] += 1
            listed[owners[block.namespace_digest], "dram_bytes"] += slot_bytes(block.size_bytes)
    for space in spaces:
        listed[space.tenant, "nvme_blocks"] += space.nvme_blocks
        listed[space.tenant, "nvme_bytes"] += space.nvme_blocks * sizes[space.digest]
    return [*_of_tenants(status, listed, dead), *_of_tiers(status)]


def quiet(client):
    """Status, blocks and namespaces of one moment: nothing moved while they were asked for."""
    deadline = time.monotonic() + QUIET_S
    while True:
        before = client.call(pb.OPERATION_STATUS, pb.StatusRequest(), pb.StatusReply)
        blocks = list_blocks(client)
        request = admin_pb2.ListNamespacesRequest()
        spaces = client.call(pb.OPERATION_LIST_NAMESPACES, request, admin_pb2.ListNamespacesReply).namespaces
        after = client.call(pb.OPERATION_STATUS, pb.StatusRequest(), pb.StatusReply)
        still = _moment(before) == _moment(after) and all(block.state == "ready" for block in blocks)
        if still or time.monotonic() > deadline:
            return after, blocks, spaces
        time.sleep(0.02)


def _moment(status):
    moving = [status.counters[name] for name in ("mover_queued", "mover_inflight")]
    used = [(tier.used_bytes, tier.dead_bytes, tier.retired_bytes, tier.blocks) for tier in status.tiers]
    tenants = [(t.dram_bytes, t.nvme_bytes, t.dram_blocks, t.nvme_blocks) for t in status.tenants]
    return any(moving), used, tenants


def _of_tenants(status, listed, dead):
    for tenant in status.tenants:
        for name in ("dram_blocks", "dram_bytes", "nvme_blocks", "nvme_bytes"):
            says, found = getattr(tenant, name), listed[tenant.name, name]
            if not found <= says <= found + dead[tenant.name, name]:
                yield f"{tenant.name}: {name} is {says} in status, {found} as listed"


def _of_tiers(status):
    for tier in status.tiers:
        parts = tier.used_bytes + tier.dead_bytes + tier.retired_bytes + tier.free_bytes
        if parts != tier.capacity_bytes:
            yield f"{tier.name}: used, dead, retired and free make {parts} of {tier.capacity_bytes}"
        for name in ("bytes", "blocks"):
            whole = tier.used_bytes if name == "bytes" else tier.blocks
            tenants = sum(getattr(tenant, f"{tier.name}_{name}") for tenant in status.tenants)
            if whole != tenants:
                yield f"{tier.name}: {name} are {whole} in the tier, {tenants} of its tenants"


def disk_errors(path, capacity_bytes, extent_bytes):
    """Extents on disk beyond the capacity: one more may be there for a moment, never two."""
    extents = sum(_size(file) >= extent_bytes for file in path.rglob("*"))
    allowed = capacity_bytes // extent_bytes
    return [f"{extents} extents on disk, {allowed} fit"] if extents > allowed else []


def _size(path):
    """Bytes of a file; 0 where it is gone since it was listed, or is none."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def report(found):
    """Say what is wrong; returns how many things."""
    for line in found:
        progress(f"accounting: {line}")
    return len(found)
