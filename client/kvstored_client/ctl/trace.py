"""`kvstorectl trace`: the daemon records its own traffic, for `kvstorectl whatif`."""

from __future__ import annotations

from typing import Annotated

import typer
from kvstored_proto.v1.admin_pb2 import StartTraceRequest, StopTraceRequest, TraceReply, TraceStatusRequest
from kvstored_proto.v1.kvstored_pb2 import OPERATION_START_TRACE, OPERATION_STOP_TRACE, OPERATION_TRACE_STATUS

from kvstored_client.ctl.connection import Exit, Failure, Options, connected, options_of
from kvstored_client.ctl.output import as_dict, duration, print_json, size
from kvstored_client.ctl.sizes import parse_size

app = typer.Typer(help="Record the daemon's traffic for `whatif`: no payloads, no names.", no_args_is_help=True)

SizeOption = Annotated[str, typer.Option("--max-size", metavar="SIZE", help="End at this size; default: the daemon's.")]
TimeOption = Annotated[
    float | None, typer.Option("--max-seconds", metavar="S", help="End after so long; default: the daemon's.")
]


@app.command("start")
def start(context: typer.Context, max_size: SizeOption = "", max_seconds: TimeOption = None) -> None:
    """Begin a recording, in the daemon's own directory (server.trace_dir)."""
    options = options_of(context)
    if max_seconds is not None and not max_seconds > 0:
        raise Failure("--max-seconds: give a time over 0", Exit.USAGE)
    size_bytes = parse_size("--max-size", max_size, least=4096) if max_size else 0
    request = StartTraceRequest(size_limit_bytes=size_bytes, time_limit_s=max_seconds or 0.0)
    with connected(options, "starting a trace") as client:
        _print(options, client.call(OPERATION_START_TRACE, request, TraceReply))


@app.command("stop")
def stop(context: typer.Context) -> None:
    """End the recording; all of it is written when this returns."""
    options = options_of(context)
    with connected(options, "stopping the trace", wait_s=30.0) as client:
        _print(options, client.call(OPERATION_STOP_TRACE, StopTraceRequest(), TraceReply))


@app.command("status")
def status(context: typer.Context) -> None:
    """Show the recording that runs, or the last one."""
    options = options_of(context)
    with connected(options, "asking for the trace") as client:
        _print(options, client.call(OPERATION_TRACE_STATUS, TraceStatusRequest(), TraceReply))


def _print(options: Options, reply: TraceReply) -> None:
    if options.output == "json":
        print_json(as_dict(reply))
    elif not reply.path:
        print("nothing was recorded since the daemon started")
    else:
        state = "recording to" if reply.active else f"ended ({reply.ended}):"
        lost = f", {reply.dropped_calls} dropped" if reply.dropped_calls else ""
        print(f"{state} {reply.path}")
        print(f"{reply.calls} calls{lost}, {size(reply.size_bytes)} in {duration(reply.seconds)}")
