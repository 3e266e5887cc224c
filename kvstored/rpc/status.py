"""What `status` tells: tiers, tenants, sessions, counters, and what the daemon runs without."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.leases import Session
from kvstored.rpc.context import Context
from kvstored.tiers.base import Health, Usage


def report(context: Context, session: Session | None = None) -> pb.StatusReply:
    """The daemon as the session may see it: its own tenant, or all for an admin (and for None, the daemon itself)."""
    sees_all = session is None or session.caller.role == "admin"
    tenant = None if sees_all or session is None else session.caller.tenant
    parts = context.store.parts
    context.store.releases.take_all()
    reply = pb.StatusReply(
        boot_id=context.boot_id,
        version=context.version,
        state=context.state,
        uptime_s=context.clock.monotonic() - context.started_s,
        pid=os.getpid(),
        tenants=_tenants(context, tenant),
        sessions=[_session(context, s) for s in parts.sessions if tenant in (None, s.caller.tenant)],
        warnings=[*context.warnings, *parts.dram.warnings, *_below_warnings(context)],
    )
    if sees_all:
        reply.tiers.extend(_tiers(context))
        for name, count in _counters(context).items():
            reply.counters[name] = count
    return reply


def _below_warnings(context: Context) -> list[str]:
    below = context.store.parts.below
    if below is None:
        return []
    warnings = [f"nvme: {p.path} is {p.health}: {p.reason}" for p in below.tier.paths() if p.health is not Health.OK]
    if below.tier.health is not Health.OK:
        warnings.append(f"nvme: {below.tier.health}: new blocks are kept in DRAM only")
    return warnings


def _tiers(context: Context) -> list[pb.TierStatus]:
    parts = context.store.parts
    tiers = [_tier("dram", "ok", parts.dram.usage(), parts.dram.properties())]
    if parts.below is not None:
        below = parts.below.tier
        nvme = _tier("nvme", str(below.health), below.usage(), below.properties())
        nvme.paths.extend(pb.PathStatus(**msgspec.structs.asdict(path)) for path in below.paths())
        tiers.append(nvme)
    return tiers


def _tier(name: str, health: str, usage: Usage, properties: Mapping[str, str]) -> pb.TierStatus:
    return pb.TierStatus(
        name=name,
        health=health,
        capacity_bytes=usage.capacity_bytes,
        used_bytes=usage.used_bytes,
        dead_bytes=usage.dead_bytes,
        retired_bytes=usage.retired_bytes,
        free_bytes=usage.free_bytes,
        blocks=usage.blocks,
        properties=properties,
    )


def _tenants(context: Context, only: str | None) -> list[pb.TenantStatus]:
    parts = context.store.parts
    dram = parts.dram.tenant_usage()
    nvme = parts.below.tier.tenant_usage() if parts.below is not None else {}
    names = sorted({*dram, *nvme, *context.identity.tenants}) if only is None else [only]
    listed = []
    for name in names:
        stats = parts.stats[name]
        dram_bytes, dram_blocks = dram.get(name, (0, 0))
        nvme_bytes, nvme_blocks = nvme.get(name, (0, 0))
        listed.append(
            pb.TenantStatus(
                name=name,
                dram_bytes=dram_bytes,
                dram_blocks=dram_blocks,
                nvme_bytes=nvme_bytes,
                nvme_blocks=nvme_blocks,
                lookups=stats.lookups,
                blocks_asked=stats.blocks_asked,
                blocks_hit=stats.blocks_hit,
                blocks_put=stats.blocks_put,
            )
        )
    return listed


def _session(context: Context, session: Session) -> pb.SessionStatus:
    caller = session.caller
    return pb.SessionStatus(
        id=session.session_id.hex()[:8],
        tenant=caller.tenant,
        client=caller.client,
        transport=caller.transport,
        pid=caller.pid,
        uid=max(caller.uid, 0),
        leases=len(session.group.leases),
        reservations=len(session.reservations),
        leased_bytes=session.group.leased_bytes,
        staging_bytes=session.staging_bytes,
        age_s=context.clock.monotonic() - session.opened_s,
        isolation=caller.isolation,
    )


def _counters(context: Context) -> dict[str, int]:
    parts = context.store.parts
    counters = {**context.metrics.counters, **{f"held_{k}": v for k, v in context.store.held().items()}}
    counters["quarantined_leases"] = context.store.quarantine.leases
    counters["quarantined_dead_blocks"] = context.store.quarantine.dead_blocks()
    if parts.below is not None:
        counters.update({f"nvme_{name}": value for name, value in parts.below.tier.counters().items()})
        counters["mover_queued"] = parts.below.promoter.queued_blocks
        counters["mover_inflight"] = parts.below.mover.moving_blocks + parts.below.promoter.inflight_bytes
        counters["mover_idle"] = int(parts.below.mover.idle)
    return counters
