"""Quotas of a world's tenants, and what must hold of them: no limit is exceeded, no guarantee is broken by others."""

import random

from kvstored.policy.quota import Quota
from kvstored.tiers.nvme_config import EXTENT_BYTES_MIN
from tests.sim.model import Violation

SHARE = 0.5  # of the worlds have quotas beside the limit that some have
RESERVE = 3  # pieces, for two tenants: see `policy.quota.reserve_bytes`


def draw(seed, tenants, segments, segment_bytes, extents):
    """Quotas of DRAM and of NVMe, drawn apart, so that every other choice of a seed stays what it was; or None."""
    rng = random.Random(f"quotas {seed}")
    if rng.random() > SHARE:
        return None
    return _tier(rng, tenants, segments, segment_bytes), _tier(rng, tenants, extents, EXTENT_BYTES_MIN)


def _tier(rng, tenants, pieces, piece_bytes):
    left = max(0, pieces - RESERVE)
    quotas = {}
    for number, tenant in enumerate(tenants):
        guaranteed = rng.randint(0, left) if number < 2 else 0
        left -= guaranteed
        more = rng.choice((None, 0, 1, 3)) if guaranteed else rng.choice((None, 2, 4))
        limit = None if more is None else (guaranteed + more) * piece_bytes
        quotas[tenant] = Quota(limit, guaranteed * piece_bytes, rng.choice((0.5, 1.0, 3.0)))
    return quotas


def limits(world):
    """What a tenant has is within its limit, whatever it is about to write."""
    node = world.node
    for tenant, quota in world.plan.node.quotas.items():
        _within(tenant, "DRAM", node.dram.used_bytes_of(tenant), quota)
    for tenant, quota in world.plan.node.nvme_quotas.items():
        if world.device.fired.keys():
            break  # a path that was away comes back with blocks that the others have room for no more
        _within(tenant, "NVMe", node.nvme.tenants.used_bytes_of(tenant), quota)
    for tenant, pinned in node.parts.catalog.pinned.items():
        if pinned and not node.parts.catalog.leased_bytes[tenant]:
            raise Violation(f"{tenant} leases nothing, and {len(pinned)} segments count as pinned")


def _within(tenant, tier, used_bytes, quota):
    if quota.limit_bytes is not None and used_bytes > quota.limit_bytes:
        raise Violation(f"{tenant} has {used_bytes} bytes of {tier}, its limit is {quota.limit_bytes}")


def watch(world):
    """Complain wherever room is made for one tenant of what is guaranteed to another."""
    node = world.node
    _watch_dram(world, node.parts.room, node.dram, world.plan.node.quotas)
    _watch_nvme(world, node.nvme.tenants, world.plan.node.nvme_quotas)


def _watch_dram(world, room, dram, quotas):
    reclaim = room._reclaim

    def reclaimed(tenant, size):
        before = dram.used_bytes_by_tenant()
        made = reclaim(tenant, size)
        for name, quota in quotas.items():
            kept = min(before.get(name, 0), quota.guaranteed_bytes)
            if name != tenant and dram.used_bytes_of(name) < kept:
                world.complain(f"room for {tenant} was taken of what DRAM guarantees {name}")
        return made

    room._reclaim = reclaimed


def _watch_nvme(world, parts, quotas):
    choose = parts.choose

    def chosen(tenant, candidates):
        extent = choose(tenant, candidates)
        quota = quotas.get(extent.tenant) if extent is not None else None
        if tenant and quota is not None and extent.tenant != tenant and extent.live_blocks:
            tables = parts._tables()
            left = parts._lasting(tables)[extent.tenant] - extent.live_bytes
            scattered = extent in parts._scattered(tables, tenant, candidates)
            if left < quota.guaranteed_bytes and not scattered:
                world.complain(f"an extent for {tenant} was taken of what NVMe guarantees {extent.tenant}")
        return extent

    for path in world.node.nvme._paths:
        path._opener._choose = chosen
