"""`kvstorectl audit`: what admins did and who was refused."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Final

import typer
from kvstored_proto.v1.admin_pb2 import ReadAuditReply, ReadAuditRequest
from kvstored_proto.v1.kvstored_pb2 import OPERATION_READ_AUDIT

from kvstored_client import Client
from kvstored_client.ctl.connection import connected, options_of
from kvstored_client.ctl.output import print_json, printable

POLL_S: Final = 1.0

LinesOption = Annotated[int, typer.Option("--lines", "-n", min=1, max=1000, help="The last so many lines.")]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")]


def audit(context: typer.Context, lines: LinesOption = 20, follow: FollowOption = False) -> None:
    """Show the end of the audit log: admin acts and refusals. Needs the role admin.

    With -o json and --follow: one object a line.
    """
    options = options_of(context)
    with connected(options, "reading the audit log") as client:
        records = _read(client, lines, 0)
        if options.output == "json" and not follow:
            print_json({"records": records})
            return
        last = 0
        while True:
            for record in records:
                print(json.dumps(record) if options.output == "json" else _line(record), flush=follow)
                last = max(last, record.get("seq", 0))
            if not follow:
                break
            time.sleep(POLL_S)
            records = _read(client, 1000, last)


def _read(client: Client, limit: int, after: int) -> list[dict[str, Any]]:
    reply = client.call(OPERATION_READ_AUDIT, ReadAuditRequest(limit=limit, after=after), ReadAuditReply)
    return [json.loads(line) for line in reply.lines]


def _line(record: dict[str, Any]) -> str:
    by, details = record.get("by", {}), record.get("with", {})
    who = " ".join(str(by[key]) for key in ("tenant", "credential", "client") if by.get(key)) or "-"
    what = " ".join(f"{key}={value}" for key, value in details.items())
    line = "  ".join(filter(None, (record["time"], record["act"], what, f"by {who}", record.get("outcome", ""))))
    # Clients choose their names: what a terminal would take for a command is not passed on.
    return printable(line)
