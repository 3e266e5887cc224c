"""What `status` tells: tiers, tenants, sessions, counters, and what the daemon runs without."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.leases import Session
from kvstored.config.tenants import Tenant
from kvstored.explain import misses
from kvstored.rpc.context import Context
from kvstored.rpc.paging import ANSWER_BYTES_MAX, fitting
from kvstored.store.parts import Parts
from kvstored.tiers.base import Health, Usage

LOW_HITS_MAX: Final = 8  # warnings in one answer
LIST_BYTES_MAX: Final = ANSWER_BYTES_MAX // 3  # of tenants, and of sessions
WARNINGS_MAX: Final = 256
WARNING_CHARS_MAX: Final = 500


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
        warnings=[
            *context.warnings,
            *tenant_warnings(context, session),
            *parts.dram.warnings,
            *_below_warnings(context, sees_all),
            *(context.keys.warnings(tenant) if context.keys is not None else ()),
            *_low_hits(parts, tenant),
            *filter(None, [context.audit.warning if sees_all else ""]),
        ],
    )
    if sees_all:
        reply.load_costs.CopyFrom(_load_costs(parts))
        reply.tiers.extend(_tiers(context))
        for name, said in _gpus(context).items():
            reply.gpus[name] = said
        for name, count in _counters(context).items():
            reply.counters[name] = count
    if session is not None:
        _shorten(reply)
    return reply


def _gpus(context: Context) -> dict[str, str]:
    """What device workers do, and what engines copy by themselves."""
    transfers = context.store.transfers
    if transfers is None:
        return {"state": "off (gpu.enabled)"}
    return {**transfers.gpus.status(), **transfers.registrations.by_engines.status()}


def _shorten(reply: pb.StatusReply) -> None:
    """Make it fit into a frame, however many there are: whoever asks whether the daemon lives is to have an answer."""
    hidden = len(reply.warnings) - WARNINGS_MAX
    if hidden > 0:
        del reply.warnings[WARNINGS_MAX:]
        reply.warnings.append(f"and {hidden} more warnings")
    reply.warnings[:] = [warning[:WARNING_CHARS_MAX] for warning in reply.warnings]
    lists: list[tuple[str, Any]] = [("tenants", reply.tenants), ("sessions", reply.sessions)]
    for name, listed in lists:
        kept = len(fitting(listed, LIST_BYTES_MAX))
        if kept < len(listed):
            reply.warnings.append(f"of {len(listed)} {name} only the first {kept} are listed")
            del listed[kept:]


def _low_hits(parts: Parts, only: str | None) -> list[str]:
    names = sorted(parts.stats) if only is None else [only]
    return [warning for name in names for warning in misses.warnings(parts, name, LOW_HITS_MAX)][:LOW_HITS_MAX]


def tenant_warnings(context: Context, session: Session | None = None) -> list[str]:
    """What is to be said of the tenants as they are, to an admin or to the daemon itself."""
    if session is not None and session.caller.role != "admin":
        return []
    tenants, server = context.store.parts.tenants, context.config.server
    warnings = list(tenants.warnings)
    if server.tcp_address is not None and server.tls_client_ca is None and not context.identity.has_tokens:
        warnings.append(f"nobody can log in over {server.tcp_address}: no tenant has a token (kvstorectl token add)")
    if not any(tenant.role == "admin" for tenant in tenants):
        warnings.append("no tenant has the role admin: nobody may verify, flush, drain or change tenants")
    return warnings


def _below_warnings(context: Context, sees_all: bool) -> list[str]:
    """What is wrong below; directories and their errors are the host's, and for admins alone."""
    below = context.store.parts.below
    if below is None:
        return []
    troubled = [path for path in below.tier.paths() if path.health is not Health.OK]
    warnings = [f"nvme: {p.path} is {p.health}: {p.reason}" for p in troubled] if sees_all else []
    worn = [path for path in below.tier.wear() if path.total_bytes >= path.endurance_bytes > 0] if sees_all else []
    warnings += [
        f"nvme: {p.path} was written {p.total_bytes / p.endurance_bytes:.0%} of its endurance_tbw" for p in worn
    ]
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


def _load_costs(parts: Parts) -> pb.LoadCosts:
    costs = pb.LoadCosts(copy_bytes_per_s=parts.copies.bytes_per_s, copies=parts.copies.samples)
    if parts.below is not None:
        promoter = parts.below.promoter
        costs.read_bytes_per_s, costs.read_latency_s = promoter.reads.bytes_per_s, promoter.reads.latency_s
        costs.ahead_bytes, costs.reads = promoter.queue.ahead_bytes, promoter.reads.samples
    return costs


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
    names = sorted({*dram, *nvme, *parts.tenants.names}) if only is None else [only]
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
                blocks_looked_up=stats.blocks_looked_up,
                blocks_found=stats.blocks_found,
                puts_throttled=stats.puts_throttled,
                puts_over_rate=stats.puts_over_rate,
                gets_throttled=stats.gets_throttled,
                **_quota(parts.tenants.get(name)),
                miss_reasons={str(reason): count for reason, count in stats.misses.items()},
            )
        )
    return listed


def _quota(tenant: Tenant | None) -> dict[str, Any]:
    """What a tenant may use, as fields of its `TenantStatus`; nothing is promised to one that is configured no more."""
    if tenant is None:
        return {}
    return {
        "dram_limit_bytes": tenant.dram_limit_bytes or 0,
        "dram_limited": tenant.dram_limit_bytes is not None,
        "dram_guaranteed_bytes": tenant.dram_guaranteed_bytes,
        "nvme_limit_bytes": tenant.nvme_limit_bytes or 0,
        "nvme_limited": tenant.nvme_limit_bytes is not None,
        "nvme_guaranteed_bytes": tenant.nvme_guaranteed_bytes,
        "weight": tenant.weight,
    }


def _session(context: Context, session: Session) -> pb.SessionStatus:
    caller = session.caller
    return pb.SessionStatus(
        id=session.name,
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
    counters = {
        **context.metrics.counters,
        **context.audit.counters,
        **{f"held_{k}": v for k, v in context.store.held().items()},
    }
    counters["quarantined_leases"] = context.store.quarantine.leases
    counters["quarantined_dead_blocks"] = context.store.quarantine.dead_blocks()
    if parts.gpus is not None:
        counters.update(parts.gpus.counters())
    if parts.below is not None:
        counters.update({f"nvme_{name}": value for name, value in parts.below.tier.counters().items()})
        budget = parts.below.tier.write_budget()
        if budget is not None:
            counters["nvme_write_budget_left_bytes"] = max(0, budget[0])
            counters["nvme_write_budget_overdrawn_bytes"] = max(0, -budget[0])
        counters["mover_queued"] = parts.below.promoter.queued_blocks
        counters["mover_inflight"] = parts.below.mover.moving_blocks + parts.below.promoter.inflight_bytes
        counters["mover_idle"] = int(parts.below.mover.idle)
    return counters
