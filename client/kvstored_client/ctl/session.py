"""`kvstorectl session`: who is connected, and the end of one."""

from __future__ import annotations

from typing import Annotated

import typer
from kvstored_proto.v1.admin_pb2 import KillSessionReply, KillSessionRequest
from kvstored_proto.v1.kvstored_pb2 import (
    OPERATION_KILL_SESSION,
    OPERATION_STATUS,
    SessionStatus,
    StatusReply,
    StatusRequest,
)

from kvstored_client.ctl.connection import connected, options_of
from kvstored_client.ctl.output import as_dict, duration, print_json, print_table, printable, size

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="As `session ls` shows it.")]

app = typer.Typer(help="List sessions and end them.", no_args_is_help=True, rich_markup_mode=None)


@app.command("ls")
def list_sessions(context: typer.Context) -> None:
    """List sessions and what they hold."""
    options = options_of(context)
    with connected(options, "listing sessions") as client:
        sessions = client.call(OPERATION_STATUS, StatusRequest(), StatusReply).sessions
    if options.output == "json":
        print_json({"sessions": [as_dict(session) for session in sessions]})
        return
    columns = ("session", "tenant", "client", "transport", "pid ", "leases ", "leased ", "puts ", "staging ", "age ")
    print_table(columns, map(_row, sessions))


@app.command()
def kill(context: typer.Context, session_id: IdArgument) -> None:
    """End a session: its connection is closed, and all that it held is given back. Its client may connect again."""
    options = options_of(context)
    with connected(options, f"ending session {session_id}") as client:
        reply = client.call(OPERATION_KILL_SESSION, KillSessionRequest(session_id=session_id), KillSessionReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        staging = size(reply.staging_bytes)
        print(f"ended; it held {reply.leases} leases, {reply.reservations} reservations, {staging} of staging")


def _row(session: SessionStatus) -> tuple[str, ...]:
    counts = (str(session.leases), size(session.leased_bytes), str(session.reservations), size(session.staging_bytes))
    pid = str(session.pid) if session.pid else "-"
    return (
        session.id,
        session.tenant,
        printable(session.client),
        session.transport,
        pid,
        *counts,
        duration(session.age_s),
    )
