"""`kvstorectl verify`, `flush` and `drain`."""

from __future__ import annotations

from typing import Annotated

import typer
from kvstored_proto.v1.admin_pb2 import DrainReply, DrainRequest, FlushReply, FlushRequest, VerifyReply, VerifyRequest
from kvstored_proto.v1.kvstored_pb2 import OPERATION_DRAIN, OPERATION_FLUSH, OPERATION_VERIFY

from kvstored_client.ctl.connection import Exit, connected, options_of
from kvstored_client.ctl.output import as_dict, print_json, size

WaitOption = Annotated[float, typer.Option("--wait", min=0, max=86400, metavar="SECONDS", help="Time for the work.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Take puts again.")]


def verify(context: typer.Context, wait: WaitOption = 3600) -> None:
    """Check the content hash of every block.

    A block whose bytes are not what was stored is dropped; exit 3 where there was one.
    """
    options = options_of(context)
    with connected(options, "verifying", wait_s=wait) as client:
        reply = client.call(OPERATION_VERIFY, VerifyRequest(), VerifyReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        checked = f"{reply.dram_blocks} blocks in DRAM, {reply.nvme_blocks} on NVMe, {size(reply.bytes)}"
        print(f"verified {checked}: {reply.corrupt} corrupt, {reply.skipped} skipped")
    raise typer.Exit(Exit.CORRUPT if reply.corrupt else Exit.OK)


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


def drain(context: typer.Context, resume: ResumeOption = False) -> None:
    """Refuse new puts, until --resume.

    The daemon can be stopped without loss when no lease and no reservation is held any more.
    """
    options = options_of(context)
    with connected(options, "resuming" if resume else "draining") as client:
        reply = client.call(OPERATION_DRAIN, DrainRequest(resume=resume), DrainReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        print(f"{reply.state}: {reply.leases} leases, {reply.reservations} reservations held")
