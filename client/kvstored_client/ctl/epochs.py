"""`kvstorectl epoch`: blocks of a model from before a change of its weights are out of reach at once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from kvstored_proto.v1.admin_pb2 import (
    BumpEpochReply,
    BumpEpochRequest,
    EpochInfo,
    ListEpochsReply,
    ListEpochsRequest,
)
from kvstored_proto.v1.kvstored_pb2 import OPERATION_BUMP_EPOCH, OPERATION_LIST_EPOCHS

from kvstored_client.ctl.connection import connected, options_of
from kvstored_client.ctl.output import as_dict, print_json, print_table
from kvstored_client.ctl.pages import all_pages

app = typer.Typer(help="Bump a model's epoch, or list epochs.", no_args_is_help=True)

ModelOption = Annotated[str, typer.Option("--model", metavar="NAME", help="The model, as its namespaces name it.")]
VersionOption = Annotated[str, typer.Option("--model-version", metavar="VERSION", help="Only this one; else all.")]
TenantOption = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Another tenant's; needs the role admin.")]


@app.command("bump")
def bump(
    context: typer.Context, model: ModelOption, model_version: VersionOption = "", tenant: TenantOption = ""
) -> None:
    """Put all blocks of a model that are stored by now out of reach, for good.

    Whoever has its namespaces open goes on with them. The room comes back in the background.
    """
    options = options_of(context)
    request = BumpEpochRequest(model=model, model_version=model_version, tenant=tenant)
    with connected(options, "bumping the epoch") as client:
        reply = client.call(OPERATION_BUMP_EPOCH, request, BumpEpochReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        about = f"{reply.namespaces} namespaces, {reply.dram_blocks} blocks in DRAM"
        print(f"epoch {_when(reply.number)}: {about} and all on NVMe are out of reach")


@app.command("ls")
def list_epochs(context: typer.Context) -> None:
    """List the epochs that were bumped, and whether room is still coming back."""
    options = options_of(context)
    with connected(options, "listing epochs") as client:
        epochs = all_pages(client, OPERATION_LIST_EPOCHS, ListEpochsRequest(), ListEpochsReply, "epochs")
    if options.output == "json":
        print_json({"epochs": [as_dict(epoch) for epoch in epochs]})
        return
    print_table(("tenant", "model", "version", "since", "room of earlier ones"), map(_row, epochs))


def _row(epoch: EpochInfo) -> tuple[str, ...]:
    room = "coming back" if epoch.taking_back else "back"
    return (epoch.tenant, epoch.model, epoch.model_version or "all", _when(epoch.number), room)


def _when(number: int) -> str:
    return datetime.fromtimestamp(number / 1e6, UTC).isoformat(timespec="milliseconds")
