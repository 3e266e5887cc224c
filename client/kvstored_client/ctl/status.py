"""`kvstorectl status` and `kvstorectl health`."""

from __future__ import annotations

from typing import Any

import typer
from kvstored_proto.v1.kvstored_pb2 import OPERATION_STATUS, StatusReply, StatusRequest

from kvstored_client import Client
from kvstored_client.ctl.connection import Exit, connected, options_of
from kvstored_client.ctl.output import ago, as_dict, duration, print_json, print_table, share, size


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
        asked = tenant["blocks_asked"]
        tenant["hit_rate"] = tenant["blocks_hit"] / asked if asked else None
    return document


def _print_status(reply: StatusReply) -> None:
    print(f"kvstored {reply.version}  {reply.state}  up {duration(reply.uptime_s)}  pid {reply.pid}")
    for warning in reply.warnings:
        print(f"warning: {warning}")
    print()
    _print_tiers(reply)
    _print_paths(reply)
    print()
    _print_tenants(reply)
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


def _print_tenants(reply: StatusReply) -> None:
    rows = (
        (
            *(tenant.name, size(tenant.dram_bytes), str(tenant.dram_blocks)),
            *(size(tenant.nvme_bytes), str(tenant.nvme_blocks), str(tenant.blocks_put), str(tenant.lookups)),
            *(str(tenant.blocks_asked), share(tenant.blocks_hit, tenant.blocks_asked)),
        )
        for tenant in reply.tenants
    )
    columns = ("tenant", "dram ", "blocks ", "nvme ", "blocks ", "put ", "lookups ", "asked ", "hit rate ")
    print_table(columns, rows)


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
