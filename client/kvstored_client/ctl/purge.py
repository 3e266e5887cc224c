"""`kvstorectl purge`: take blocks away so that no byte of them is left, and show the receipt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Final

import typer
from kvstored_proto.v1.admin_pb2 import (
    PurgeReceipt,
    PurgeReply,
    PurgeRequest,
    PurgeStatusReply,
    PurgeStatusRequest,
)
from kvstored_proto.v1.kvstored_pb2 import OPERATION_PURGE, OPERATION_PURGE_STATUS
from rich.console import Console

from kvstored_client import Client
from kvstored_client.ctl.connection import Exit, Failure, connected, options_of
from kvstored_client.ctl.output import ago, as_dict, print_json, print_table, printable, size
from kvstored_client.ctl.token import seconds_of

POLL_S: Final = 0.2
DRY_RUN_WAIT_S: Final = 600.0  # it looks at every index entry that is selected
UNDER_WAY: Final = ("waiting", "running")

TenantOption = Annotated[str, typer.Option("--tenant", metavar="NAME", help="What this tenant has.")]
NamespaceOption = Annotated[str, typer.Option("--namespace", metavar="DIGEST", help="What one namespace holds.")]
ModelOption = Annotated[str, typer.Option("--model", metavar="NAME", help="What belongs to a model.")]
VersionOption = Annotated[str, typer.Option("--model-version", metavar="VERSION", help="Of that model.")]
OlderOption = Annotated[str, typer.Option("--older-than", metavar="AGE", help="Stored longer ago: 90s, 12h, 7d.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would go, change nothing.")]
DeadlineOption = Annotated[
    float, typer.Option("--deadline", min=0.001, max=86400, metavar="SECONDS", help="End sessions that hold it then.")
]
NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Begin it and print its id.")]
IdArgument = Annotated[str, typer.Argument(metavar="[ID]", help="Of one purge; else all on record are listed.")]

app = typer.Typer(no_args_is_help=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def purge(
    context: typer.Context,
    tenant: TenantOption = "",
    namespace: NamespaceOption = "",
    model: ModelOption = "",
    model_version: VersionOption = "",
    older_than: OlderOption = "",
    dry_run: DryRunOption = False,
    deadline: DeadlineOption = 30.0,
    no_wait: NoWaitOption = False,
) -> None:
    """Take blocks away so that no byte of them is left in memory, on NVMe and in staging.

    What fits all that is named goes. It is nobody's hit from the first moment on; who holds it has until the
    deadline, then their sessions are ended. The purge goes on in the daemon if this command is ended. Exit 1 where
    something remains.
    """
    if context.invoked_subcommand is not None:
        return
    request = PurgeRequest(
        tenant=tenant,
        namespace_digest=_digest(namespace),
        model=model,
        model_version=model_version,
        older_than_ms=round(seconds_of(older_than) * 1000) if older_than else 0,
        dry_run=dry_run,
        deadline_ms=round(deadline * 1000),
    )
    options = options_of(context)
    with connected(options, "purging", wait_s=DRY_RUN_WAIT_S if dry_run else 0.0) as client:
        receipt = client.call(OPERATION_PURGE, request, PurgeReply).receipt
        if not (dry_run or no_wait):
            receipt = _watched(client, receipt)
    _show(options.output, receipt)
    raise typer.Exit(Exit.NO if receipt.state == "incomplete" else Exit.OK)


@app.command()
def status(context: typer.Context, purge_id: IdArgument = "") -> None:
    """Show how far a purge is, or its receipt; without an id all that are on record.

    Exit 1 where the one that is asked for is not complete.
    """
    options = options_of(context)
    with connected(options, "asking for receipts") as client:
        receipts = _receipts(client, purge_id)
    if options.output == "json":
        print_json({"receipts": [as_dict(receipt) for receipt in receipts]})
    elif purge_id:
        _print(receipts[0])
    else:
        print_table(("purge", "state", "begun", "what", "blocks ", "remains "), map(_row, receipts))
    raise typer.Exit(Exit.NO if purge_id and receipts[0].state != "complete" else Exit.OK)


def _digest(namespace: str) -> bytes:
    try:
        return bytes.fromhex(namespace)
    except ValueError as error:
        raise Failure(f"{namespace!r} is no digest in hex: see `kvstorectl namespaces`", Exit.USAGE) from error


def _receipts(client: Client, purge_id: str) -> list[PurgeReceipt]:
    request = PurgeStatusRequest(purge_id=purge_id)
    return list(client.call(OPERATION_PURGE_STATUS, request, PurgeStatusReply).receipts)


def _watched(client: Client, receipt: PurgeReceipt) -> PurgeReceipt:
    """Follow a purge to its end; on Ctrl-C say how to ask for it again."""
    try:
        with Console(stderr=True).status("purging") as shown:
            while receipt.state in UNDER_WAY:
                time.sleep(POLL_S)
                (receipt,) = _receipts(client, receipt.purge_id)
                of = f" {receipt.steps_done} of {receipt.steps}" if receipt.steps else ""
                shown.update(f"purging: {receipt.phase or receipt.state}{of}")
    except KeyboardInterrupt:
        raise Failure(f"the purge goes on: `kvstorectl purge status {receipt.purge_id}` tells how far it is") from None
    return receipt


def _show(output: str, receipt: PurgeReceipt) -> None:
    if output == "json":
        print_json(as_dict(receipt))
    else:
        _print(receipt)


def _print(receipt: PurgeReceipt) -> None:
    for line in _lines(receipt):
        print(printable(line))  # clients choose their names


def _lines(receipt: PurgeReceipt) -> Iterator[str]:
    state = receipt.state.replace("_", " ")
    yield f"{receipt.purge_id}: {state}, {_what(receipt)}" if receipt.purge_id else f"{state}: {_what(receipt)}"
    if receipt.state in UNDER_WAY:
        yield f"  at        {receipt.phase or 'waiting for another purge'} {receipt.steps_done}/{receipt.steps}"
    yield f"  dram      {receipt.dram_blocks} blocks, {size(receipt.dram_bytes)}"
    yield f"  nvme      {receipt.nvme_blocks} blocks, {size(receipt.nvme_bytes)}"
    yield f"  leases    {receipt.leases} held some of it, {receipt.leases_ended} ended"
    if receipt.purge_id:
        zeroed = (receipt.dram_zeroed_bytes, receipt.nvme_zeroed_bytes, receipt.staging_zeroed_bytes)
        yield "  zeroed    {} in DRAM, {} on NVMe, {} in staging".format(*map(size, zeroed))
        yield f"  took      {receipt.duration_s:.1f} s, begun {ago(receipt.begun_s)} by {receipt.by}"
    for session in receipt.sessions_ended:
        yield f"  ended     session {session}"
    if receipt.sessions_ended_count > len(receipt.sessions_ended):
        yield f"  ended     {receipt.sessions_ended_count} sessions in all"
    yield from (f"  remains   {line}" for line in receipt.remains)
    yield from (f"  note      {line}" for line in receipt.notes)


def _what(receipt: PurgeReceipt) -> str:
    chosen = receipt.selection
    facts = {
        "tenant": chosen.tenant,
        "namespace": chosen.namespace_digest.hex(),
        "model": chosen.model,
        "version": chosen.model_version,
        "older than": f"{chosen.older_than_ms / 1000:g} s" if chosen.older_than_ms else "",
    }
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value)


def _row(receipt: PurgeReceipt) -> tuple[str, ...]:
    blocks, remains = str(receipt.dram_blocks + receipt.nvme_blocks), str(len(receipt.remains))
    return (receipt.purge_id, receipt.state, ago(receipt.begun_s), _what(receipt), blocks, remains)
