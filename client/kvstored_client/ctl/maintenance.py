"""`kvstorectl verify`, `flush` and `drain`."""

from __future__ import annotations

from typing import Annotated

import typer
from kvstored_proto.v1.admin_pb2 import DrainReply, DrainRequest, FlushReply, FlushRequest, VerifyReply, VerifyRequest
from kvstored_proto.v1.kvstored_pb2 import OPERATION_DRAIN, OPERATION_FLUSH, OPERATION_VERIFY

from kvstored_client.ctl.connection import Exit, connected, options_of
from kvstored_client.ctl.output import as_dict, print_json, size

WaitOption = Annotated[float, typer.Option("--wait", min=0, max=86400, metavar="SECONDS", help="Time for the work.")]
DeadlineOption = Annotated[
    float, typer.Option("--deadline", min=0, max=86400, metavar="SECONDS", help="Time for it; 0: only refuse puts.")
]
UndoOption = Annotated[bool, typer.Option("--undo", "--resume", help="Take puts again.")]


def verify(context: typer.Context, wait: WaitOption = 3600) -> None:
    """Check the content hash of every block, and that no tenant has more than its limits.

    A block whose bytes are not what was stored is dropped; exit 3 where something was wrong.
    """
    options = options_of(context)
    with connected(options, "verifying", wait_s=wait) as client:
        reply = client.call(OPERATION_VERIFY, VerifyRequest(), VerifyReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        checked = f"{reply.dram_blocks} blocks in DRAM, {reply.nvme_blocks} on NVMe, {size(reply.bytes)}"
        print(f"verified {checked}: {reply.corrupt} corrupt, {reply.skipped} skipped")
        for problem in reply.problems:
            print(f"wrong: {problem}")
    raise typer.Exit(Exit.CORRUPT if reply.corrupt or reply.problems else Exit.OK)


def flush(context: typer.Context, wait: WaitOption = 60) -> None:
    """Write to NVMe what is only in DRAM.

    Exit 1 where some was left when the time was up.
    """
    options = options_of(context)
    with connected(options, "flushing", wait_s=wait) as client:
        reply = client.call(OPERATION_FLUSH, FlushRequest(wait_ms=round(wait * 1000)), FlushReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        print(f"written: {reply.written_blocks} blocks; left: {reply.left_blocks}")
    raise typer.Exit(Exit.NO if reply.left_blocks else Exit.OK)


def drain(context: typer.Context, deadline: DeadlineOption = 30, undo: UndoOption = False) -> None:
    """Refuse new puts, wait until nothing is held, and write to NVMe what is only in DRAM.

    Gets are served all the while, and puts stay refused until --undo. Exit 1 where something was held or left
    when the time was up: else the daemon can be stopped without loss.
    """
    options = options_of(context)
    request = DrainRequest(resume=True) if undo else DrainRequest(deadline_ms=round(deadline * 1000))
    with connected(options, "resuming" if undo else "draining", wait_s=0 if undo else deadline) as client:
        reply = client.call(OPERATION_DRAIN, request, DrainReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        flushed = "" if undo else f"written: {reply.written_blocks} blocks; left: {reply.left_blocks}; "
        print(f"{reply.state}: {flushed}held: {reply.leases} leases, {reply.reservations} reservations")
    unfinished = reply.left_blocks or reply.leases or reply.reservations or reply.state == "serving"
    raise typer.Exit(Exit.NO if unfinished and not undo else Exit.OK)
