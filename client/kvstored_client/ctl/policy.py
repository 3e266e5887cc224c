"""`kvstorectl policy`: which block goes first, and another order while the daemon serves."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from google.protobuf.message import Message
from kvstored_proto.v1.admin_pb2 import PolicyReply, PolicyRequest, SetPolicyRequest
from kvstored_proto.v1.kvstored_pb2 import OPERATION_POLICY, OPERATION_SET_POLICY

from kvstored_client.ctl.connection import connected, options_of
from kvstored_client.ctl.output import as_dict, print_json, print_table

app = typer.Typer(help="Show the eviction policy, or change it at run time.", invoke_without_command=True)

EvictionOption = Annotated[
    Literal["lru", "lfu", "heat", "s3fifo", "shelf_life"], typer.Option("--eviction", help="The order from now on.")
]


@app.callback()
def show(context: typer.Context) -> None:
    """Show the eviction policy, its parameters, the watermarks and the admission rule."""
    if context.invoked_subcommand is None:
        _print(context, OPERATION_POLICY, PolicyRequest(), "asking for the policy")


@app.command("set")
def set_policy(context: typer.Context, eviction: EvictionOption) -> None:
    """Change the order of eviction of the running daemon, for all tenants.

    It holds until the daemon restarts: set policy.eviction in its configuration to keep it. Blocks stay where they
    are and are put in the new order in the background.
    """
    _print(context, OPERATION_SET_POLICY, SetPolicyRequest(eviction=eviction), "setting the policy")


def _print(context: typer.Context, operation: int, request: Message, what: str) -> None:
    options = options_of(context)
    with connected(options, what) as client:
        reply = client.call(operation, request, PolicyReply)
    if options.output == "json":
        print_json(as_dict(reply))
        return
    changing = " (blocks are still being put in order)" if reply.changing else ""
    rows = [("policy.eviction", reply.eviction + changing)]
    print_table(("setting", "value"), [*rows, *sorted(reply.settings.items())])
    if reply.eviction != reply.configured_eviction:
        print(
            f"{reply.eviction} holds until the daemon restarts, then {reply.configured_eviction} again: "
            f'set policy.eviction = "{reply.eviction}" to keep it'
        )
