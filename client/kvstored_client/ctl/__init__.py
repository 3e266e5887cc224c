"""`kvstorectl`: one file per noun, each speaking only the daemon's public API."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from kvstored_client.ctl import (
    audit,
    blocks,
    epochs,
    explain,
    files,
    hint,
    maintenance,
    namespaces,
    plan,
    policy,
    purge,
    session,
    status,
    tenant,
    token,
    trace,
    wear,
    whatif,
)
from kvstored_client.ctl.connection import Exit, Failure, Options, read_token

DEFAULT_ADDRESS: Final = "unix:/run/kvstored/session.sock"
_WITH_VALUE: Final = ("--address", "--timeout", "--token-file", "--output", "-o")
_ATTACHED: Final = ("-o", *(f"{name}=" for name in _WITH_VALUE))  # -ojson, --timeout=1
_FLAGS: Final = ("--debug",)

app = typer.Typer(
    help="Look into a kvstored daemon and manage it.",
    epilog=(
        "Exit codes: 0 done, 1 the answer is no or it failed, 2 usage, 3 corrupt data found, 4 daemon unreachable. "
        "The options above may stand after the command too."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

AddressOption = Annotated[str, typer.Option(envvar="KVSTORED_ADDRESS", help="unix:PATH, or grpc:HOST:PORT.")]
TimeoutOption = Annotated[float, typer.Option(min=0.01, max=3600, metavar="SECONDS", help="Wait so long for answers.")]
TokenOption = Annotated[
    Path | None, typer.Option(envvar="KVSTORED_TOKEN_FILE", metavar="FILE", help="A token instead of one's uid.")
]
OutputOption = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="How to print.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]


@app.callback()
def _global(
    context: typer.Context,
    address: AddressOption = DEFAULT_ADDRESS,
    timeout: TimeoutOption = 5.0,
    token_file: TokenOption = None,
    output: OutputOption = "table",
    debug: DebugOption = False,
) -> None:
    if not debug:
        logging.getLogger("kvstored_client").setLevel(logging.CRITICAL)  # its warnings come as the one error line
    address = f"unix:{address}" if address.startswith(("/", ".")) else address
    context.obj = Options(address, timeout, read_token(token_file), output)


app.command()(status.status)
app.command()(status.health)
app.command()(namespaces.namespaces)
app.command("ls", hidden=True)(namespaces.namespaces)
app.command()(blocks.blocks)
app.command()(explain.explain)
app.command()(files.get)
app.command()(files.put)
app.command()(hint.hint)
app.command()(hint.pins)
app.command()(maintenance.verify)
app.command()(maintenance.flush)
app.command()(maintenance.drain)
app.command()(audit.audit)
app.add_typer(purge.app, name="purge")
app.add_typer(session.app, name="session")
app.add_typer(tenant.app, name="tenant")
app.add_typer(token.app, name="token")
app.command()(wear.wear)
app.add_typer(epochs.app, name="epoch")
app.add_typer(trace.app, name="trace")
app.add_typer(policy.app, name="policy")
app.command()(whatif.whatif)
app.command()(plan.plan)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: runs one command; every failure is one line on standard error."""
    given = globals_first(sys.argv[1:] if arguments is None else arguments)
    try:
        app(given, prog_name="kvstorectl")
    except Failure as failure:
        if "--debug" in given:
            traceback.print_exc()
        print(f"kvstorectl: {failure}", file=sys.stderr)
        sys.exit(failure.code)
    except BrokenPipeError:  # the reader of the output went away: nothing more to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.NO)


def globals_first(arguments: Sequence[str]) -> list[str]:
    """The same arguments with the global options before the command, so that people may put them anywhere."""
    first: list[str] = []
    rest: list[str] = []
    items = iter(arguments)
    for item in items:
        if item == "--":
            rest += [item, *items]
        elif item in _WITH_VALUE:
            first += [item, *(value for value in [next(items, None)] if value is not None)]
        elif item in _FLAGS or item.startswith(_ATTACHED):
            first.append(item)
        else:
            rest.append(item)
    return first + rest
