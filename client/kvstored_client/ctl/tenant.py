"""`kvstorectl tenant`: who may use the daemon, changed while it serves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from kvstored_proto.v1 import admin_pb2 as pb
from kvstored_proto.v1.kvstored_pb2 import (
    OPERATION_ADD_TENANT,
    OPERATION_LIST_TENANTS,
    OPERATION_REKEY_TENANT,
    OPERATION_REMOVE_TENANT,
    OPERATION_SET_TENANT,
)

from kvstored_client.ctl.connection import Exit, Failure, connected, options_of
from kvstored_client.ctl.output import as_dict, print_json, print_table
from kvstored_client.ctl.pages import all_pages
from kvstored_client.ctl.token import print_tokens

app = typer.Typer(
    help="Who may use the daemon. Changes hold at once and are kept; they need the role admin.", no_args_is_help=True
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")]
FieldsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings, as in the configuration; lists as a,b or JSON."),
]
ResetOption = Annotated[
    list[str] | None,
    typer.Option("--reset", metavar="KEY", help="Back to the configuration or the default; may be repeated."),
]


@app.command()
def add(context: typer.Context, name: NameArgument, fields: FieldsArgument = None) -> None:
    """Add a tenant: `tenant add search uids=1001,1002 dram_limit_bytes=8GiB`.

    Without uids or certificates it needs a token: `kvstorectl token add NAME`.
    """
    request = pb.AddTenantRequest(name=name, fields=_parsed(fields or ()))
    options = options_of(context)
    with connected(options, f"adding tenant {name}") as client:
        reply = client.call(OPERATION_ADD_TENANT, request, pb.TenantReply)
    _print_changed(options.output, "added", reply.tenant)


@app.command("set")
def set_(context: typer.Context, name: NameArgument, fields: FieldsArgument = None, reset: ResetOption = None) -> None:
    """Change settings of a tenant. Sessions whose identity or role is taken away end."""
    request = pb.SetTenantRequest(name=name, fields=_parsed(fields or ()), reset=reset or ())
    options = options_of(context)
    with connected(options, f"changing tenant {name}") as client:
        reply = client.call(OPERATION_SET_TENANT, request, pb.TenantReply)
    _print_changed(options.output, "changed", reply.tenant)


@app.command()
def rm(context: typer.Context, name: NameArgument) -> None:
    """Remove a tenant: nobody is it any more, its sessions end, its blocks are taken away in the background."""
    options = options_of(context)
    with connected(options, f"removing tenant {name}") as client:
        reply = client.call(OPERATION_REMOVE_TENANT, pb.RemoveTenantRequest(name=name), pb.RemoveTenantReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        print(f"removed: {name}; {reply.sessions_ended} sessions ended; its blocks are being taken away")


@app.command()
def rekey(context: typer.Context, name: NameArgument) -> None:
    """Read a tenant's master key again: encrypted blocks that were locked are read, data keys wrapped with it.

    After a master key was replaced at its source the old one is needed until this has ended well.
    """
    options = options_of(context)
    with connected(options, f"reading the key of tenant {name}", wait_s=600) as client:
        reply = client.call(OPERATION_REKEY_TENANT, pb.RekeyTenantRequest(tenant=name), pb.RekeyTenantReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        print(f"{name}: {reply.keys} data keys are wrapped with the present master key")


@app.command()
def ls(context: typer.Context) -> None:
    """List tenants."""
    options = options_of(context)
    tenants = _listed(context, "")
    if options.output == "json":
        print_json({"tenants": [_plain(info) for info in tenants]})
        return
    print_table(("tenant", "state", "role", "sessions ", "tokens ", "uids", "certificates"), map(_row, tenants))


@app.command()
def show(context: typer.Context, name: NameArgument) -> None:
    """Show one tenant: every setting, and where it comes from."""
    options = options_of(context)
    (info,) = _listed(context, name)
    if options.output == "json":
        print_json(_plain(info))
        return
    print(f"{info.name}: {info.state}, {info.sessions} sessions")
    rows = [(key, info.fields[key], info.origins[key]) for key in sorted(info.fields)]
    print_table(("setting", "value", "from"), rows)
    print_tokens(info.tokens)


def _listed(context: typer.Context, name: str) -> list[pb.TenantInfo]:
    with connected(options_of(context), "listing tenants") as client:
        request = pb.ListTenantsRequest(name=name)
        return all_pages(client, OPERATION_LIST_TENANTS, request, pb.ListTenantsReply, "tenants")


def _parsed(pairs: Sequence[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise Failure(f"{pair!r}: must be KEY=VALUE, such as dram_limit_bytes=8GiB", Exit.USAGE)
        fields[key] = value
    return fields


def _print_changed(output: str, what: str, info: pb.TenantInfo) -> None:
    if output == "json":
        print_json(_plain(info))
    else:
        print(f"{what}: {info.name}, role {json.loads(info.fields['role'])}; see `kvstorectl tenant show {info.name}`")


def _plain(info: pb.TenantInfo) -> dict[str, object]:
    """As JSON types, its settings too."""
    return as_dict(info) | {"fields": {key: json.loads(info.fields[key]) for key in sorted(info.fields)}}


def _row(info: pb.TenantInfo) -> tuple[str, ...]:
    fields = {key: json.loads(info.fields[key]) for key in info.fields}
    lists = (",".join(map(str, fields.get(key, []))) or "-" for key in ("uids", "certificates"))
    tokens = len(info.tokens) + len(fields.get("tokens_sha256", []))
    return (info.name, info.state, fields.get("role", "-"), str(info.sessions), str(tokens), *lists)
