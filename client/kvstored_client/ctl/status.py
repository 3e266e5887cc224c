"""`kvstorectl status` and `kvstorectl health`."""

from __future__ import annotations

from typing import Any, Final

import typer
from kvstored_proto.v1.kvstored_pb2 import OPERATION_STATUS, LoadCosts, StatusReply, StatusRequest

from kvstored_client import Client
from kvstored_client.ctl.connection import Exit, connected, options_of
from kvstored_client.ctl.output import ago, as_dict, duration, print_json, print_table, share, size

_PREFETCH_ENDS: Final = ("useful", "late", "wasted", "dropped")
_RATES: Final = (("lookup_hit_rate", "blocks_found", "blocks_looked_up"), ("hit_rate", "blocks_hit", "blocks_asked"))


def status(context: typer.Context) -> None:
    """Show tiers, tenants, hit rates, sessions.

    Warnings say what the daemon runs without: locked memory, huge pages, direct I/O.
    """
    options = options_of(context)
    with connected(options, "getting status") as client:
        reply = read_status(client)
    if options.output == "json":
        print_json(_document(reply))
    else:
        _print_status(reply)


def health(context: typer.Context) -> None:
    """Say in one line whether it serves.

    For probes: exit 0 where the daemon serves, 1 where it answers and does not, 4 where it does not answer.
    """
    options = options_of(context)
    with connected(options, "getting health") as client:
        reply = read_status(client)
    serving = reply.state == "serving"
    if options.output == "json":
        print_json({"serving": serving, "state": reply.state})
    else:
        print(reply.state)
    raise typer.Exit(Exit.OK if serving else Exit.NO)


def read_status(client: Client) -> StatusReply:
    """The daemon's status; raises what `Client.call` does, where `Client.status` would fail open."""
    return client.call(OPERATION_STATUS, StatusRequest(), StatusReply)


def _document(reply: StatusReply) -> dict[str, Any]:
    document = as_dict(reply)
    for tenant in document["tenants"]:
        for rate, part, whole in _RATES:
            tenant[rate] = tenant[part] / tenant[whole] if tenant[whole] else None
    return document


def _print_status(reply: StatusReply) -> None:
    print(f"kvstored {reply.version}  {reply.state}  up {duration(reply.uptime_s)}  pid {reply.pid}")
    for warning in reply.warnings:
        print(f"warning: {warning}")
    print()
    _print_tiers(reply)
    _print_paths(reply)
    _print_load_costs(reply.load_costs)
    _print_gpus(reply)
    print()
    _print_tenants(reply)
    _print_quotas(reply)
    _print_misses(reply)
    _print_prefetches(reply)
    if reply.sessions:
        print()
        _print_sessions(reply)


def _print_tiers(reply: StatusReply) -> None:
    rows = (
        (
            *(tier.name, tier.health, size(tier.capacity_bytes), share(tier.used_bytes, tier.capacity_bytes)),
            *(size(tier.used_bytes), size(tier.dead_bytes), size(tier.retired_bytes), size(tier.free_bytes)),
            *(str(tier.blocks), " ".join(f"{key}={tier.properties[key]}" for key in sorted(tier.properties))),
        )
        for tier in reply.tiers
    )
    columns = ("tier", "health", "capacity ", "full ", "used ", "dead ", "retired ", "free ", "blocks ", "properties")
    print_table(columns, rows)


def _print_paths(reply: StatusReply) -> None:
    rows = [
        (
            *(path.path, path.health, ago(path.since_s), f"{path.retry_in_s:.0f} s" if path.retry_in_s else "-"),
            *(size(path.scrubbed_bytes), str(path.scrub_corrupt_blocks), ago(path.scrub_passed_s), path.reason or "-"),
        )
        for tier in reply.tiers
        for path in tier.paths
    ]
    if rows:
        print()
        print_table(("path", "health", "since ", "retry ", "scrubbed ", "corrupt ", "scrub ended ", "reason"), rows)


def _print_load_costs(costs: LoadCosts) -> None:
    """What estimates go by; nothing where the caller may not see it."""
    if not costs.copy_bytes_per_s:
        return
    line = f"loads: copies {size(int(costs.copy_bytes_per_s))}/s{_assumed(costs.copies)}"
    if costs.read_bytes_per_s:
        line += f", reads {size(int(costs.read_bytes_per_s))}/s after {costs.read_latency_s * 1e3:.1f} ms"
        line += f"{_assumed(costs.reads)}, {size(costs.ahead_bytes)} ahead"
    print(f"\n{line}")


def _assumed(samples: int) -> str:
    return "" if samples else " (assumed)"


def _print_gpus(reply: StatusReply) -> None:
    if reply.gpus:
        print()
        print_table(("gpu", "what its device worker does"), [(name, reply.gpus[name]) for name in sorted(reply.gpus)])


def _print_tenants(reply: StatusReply) -> None:
    rows = (
        (
            *(tenant.name, size(tenant.dram_bytes), str(tenant.dram_blocks)),
            *(size(tenant.nvme_bytes), str(tenant.nvme_blocks), str(tenant.blocks_put), str(tenant.lookups)),
            *(str(tenant.blocks_looked_up), share(tenant.blocks_found, tenant.blocks_looked_up)),
            *(str(tenant.blocks_asked), share(tenant.blocks_hit, tenant.blocks_asked)),
        )
        for tenant in reply.tenants
    )
    columns = (
        *("tenant", "dram ", "blocks ", "nvme ", "blocks ", "put "),
        *("lookups ", "looked up ", "found ", "asked by gets ", "got "),
    )
    print_table(columns, rows)


def _print_quotas(reply: StatusReply) -> None:
    """Of tenants that have any, or were throttled."""
    rows = [
        (
            *(tenant.name, size(tenant.dram_bytes), _promised(tenant.dram_guaranteed_bytes)),
            *(_limit(tenant.dram_limited, tenant.dram_limit_bytes), size(tenant.nvme_bytes)),
            *(_promised(tenant.nvme_guaranteed_bytes), _limit(tenant.nvme_limited, tenant.nvme_limit_bytes)),
            *(f"{tenant.weight:g}", str(tenant.puts_throttled), str(tenant.puts_over_rate), str(tenant.gets_throttled)),
        )
        for tenant in reply.tenants
        if tenant.dram_limited
        or tenant.nvme_limited
        or tenant.dram_guaranteed_bytes
        or tenant.nvme_guaranteed_bytes
        or tenant.puts_throttled
        or tenant.puts_over_rate
        or tenant.gets_throttled
    ]
    columns = (
        *("tenant", "dram used ", "guaranteed ", "limit ", "nvme used ", "guaranteed ", "limit ", "weight "),
        *("puts throttled ", "over rate ", "gets throttled "),
    )
    if rows:
        print()
        print_table(columns, rows)


def _promised(size_bytes: int) -> str:
    return size(size_bytes) if size_bytes else "-"


def _limit(limited: bool, size_bytes: int) -> str:
    return size(size_bytes) if limited else "-"


def _print_misses(reply: StatusReply) -> None:
    rows = [
        (tenant.name, ", ".join(f"{reason} {tenant.miss_reasons[reason]}" for reason in sorted(tenant.miss_reasons)))
        for tenant in reply.tenants
        if tenant.miss_reasons
    ]
    if rows:
        print()
        print_table(("tenant", "misses by reason (`kvstorectl explain`)"), rows)


def _print_prefetches(reply: StatusReply) -> None:
    """What came of reads ahead of time, by who wanted them."""
    rows = []
    for source in ("lookup", "explicit", "predicted"):
        begun = reply.counters.get(f"prefetch_{source}_bytes", 0)
        ends = [reply.counters.get(f"prefetch_{source}_{end}_bytes", 0) for end in _PREFETCH_ENDS]
        if begun:
            rows.append((source, size(begun), *map(size, ends), size(max(0, begun - sum(ends)))))
    if rows:
        print()
        print_table(("prefetch", "begun ", *(f"{end} " for end in _PREFETCH_ENDS), "unused yet "), rows)


def _print_sessions(reply: StatusReply) -> None:
    rows = (
        (
            *(session.id, session.tenant, session.client or "-", session.transport, str(session.pid), str(session.uid)),
            *(str(session.leases), str(session.reservations), size(session.leased_bytes), size(session.staging_bytes)),
            *(duration(session.age_s), session.isolation),
        )
        for session in reply.sessions
    )
    columns = (
        *(
            "session",
            "tenant",
            "client",
            "transport",
            "pid ",
            "uid ",
            "leases ",
            "reservations ",
            "leased ",
            "staging ",
        ),
        *("age ", "isolation"),
    )
    print_table(columns, rows)
