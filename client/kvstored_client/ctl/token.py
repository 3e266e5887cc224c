"""`kvstorectl token`: what clients show to be a tenant. A token is told once, when it is made."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from kvstored_proto.v1 import admin_pb2 as pb
from kvstored_proto.v1.kvstored_pb2 import (
    OPERATION_ADD_TOKEN,
    OPERATION_LIST_TENANTS,
    OPERATION_REVOKE_TOKEN,
    OPERATION_ROTATE_TOKEN,
)

from kvstored_client.ctl.connection import Exit, Failure, connected, options_of
from kvstored_client.ctl.output import ago, as_dict, duration, print_json, print_table
from kvstored_client.ctl.pages import all_pages
from kvstored_client.terms import TTL_MAX_S

app = typer.Typer(help="Tokens of tenants, by their ids. All of it needs the role admin.", no_args_is_help=True)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The token's id: kvs_ID_...")]
ExpiresOption = Annotated[
    str, typer.Option("--expires-in", metavar="TIME", help="How long it counts: 90d, 12h, 30m; default: for good.")
]
NewExpiresOption = Annotated[
    str, typer.Option("--expires-in", metavar="TIME", help="How long the new one counts; default: as the old one.")
]
LabelOption = Annotated[str, typer.Option("--label", help="What it is for, to tell it from others.")]
GraceOption = Annotated[str, typer.Option("--grace", metavar="TIME", help="How long the old one counts yet.")]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the token there (mode 0600), not to the terminal."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the file of --out, whatever is in it.")]


@app.command()
def add(
    context: typer.Context,
    tenant: Annotated[str, typer.Argument(metavar="TENANT")],
    expires_in: ExpiresOption = "",
    label: LabelOption = "",
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Make a token for a tenant. The daemon keeps a hash only: it cannot be shown again."""
    _check_target(out, force)
    request = pb.AddTokenRequest(tenant=tenant, expires_in_s=seconds_of(expires_in), label=label)
    options = options_of(context)
    with connected(options, f"making a token for tenant {tenant}") as client:
        reply = client.call(OPERATION_ADD_TOKEN, request, pb.TokenReply)
    _tell(options.output, reply, out)


@app.command()
def rotate(
    context: typer.Context,
    token_id: IdArgument,
    grace: GraceOption = "1h",
    expires_in: NewExpiresOption = "",
    out: OutOption = None,
    force: ForceOption = False,
) -> None:
    """Make a token in place of another. Both count until --grace is over, or the old one is revoked.

    The file of --out may be the one that the old token stands in.
    """
    _check_target(out, force, token_id)
    request = pb.RotateTokenRequest(token_id=token_id, grace_s=seconds_of(grace), expires_in_s=seconds_of(expires_in))
    options = options_of(context)
    with connected(options, f"rotating token {token_id}") as client:
        reply = client.call(OPERATION_ROTATE_TOKEN, request, pb.TokenReply)
    _tell(options.output, reply, out)


@app.command()
def revoke(context: typer.Context, token_id: IdArgument) -> None:
    """A token counts no more, and sessions that were opened with it end."""
    options = options_of(context)
    with connected(options, f"revoking token {token_id}") as client:
        reply = client.call(OPERATION_REVOKE_TOKEN, pb.RevokeTokenRequest(token_id=token_id), pb.RevokeTokenReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        print(f"revoked: {token_id}; {reply.sessions_ended} sessions ended")


@app.command()
def ls(context: typer.Context) -> None:
    """List tokens, without what they are."""
    options = options_of(context)
    with connected(options, "listing tokens") as client:
        tenants = all_pages(client, OPERATION_LIST_TENANTS, pb.ListTenantsRequest(), pb.ListTenantsReply, "tenants")
    tokens = [token for info in tenants for token in info.tokens]
    if options.output == "json":
        print_json({"tokens": [as_dict(token) for token in tokens]})
    else:
        print_tokens(tokens)


def print_tokens(tokens: Iterable[pb.TokenInfo]) -> None:
    """A table of them; nothing where there are none."""
    print_table(("token", "tenant", "label", "made", "expires"), map(_row, tokens))


def seconds_of(text: str) -> float:
    """Seconds in `90d`, `12h`, `30m`, `10s` or `3600`, 100 years at most; 0 for nothing. Raises Failure."""
    number, factor = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text or "0", 1)
    try:
        seconds = float(number) * factor
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= TTL_MAX_S:
        raise Failure(f"{text!r}: must be a time up to 100 years, such as 90d, 12h, 30m or 10s", Exit.USAGE)
    return seconds


def _tell(output: str, reply: pb.TokenReply, out: Path | None) -> None:
    if out is not None:
        _write(out, reply)
    if output == "json":
        shown = as_dict(reply)
        if out is not None:
            del shown["token"]
        print_json(shown)
    elif out is None:
        print(reply.token)  # alone on standard output, so that it can be sent on
    else:
        print(f"{reply.info.id}: the token is in {out}")


def _check_target(path: Path | None, force: bool, replaced_id: str = "") -> None:
    """Raises Failure before a token is made where its file cannot be, or would take the place of something else.

    `get` and reports replace their files: what was in them can be had again, a token cannot.
    """
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise Failure(f"{path}: its directory is not there, or not to be written to: no token was made", Exit.USAGE)
    if path is None or force or not os.path.lexists(path):
        return
    with suppress(OSError, UnicodeDecodeError):
        if replaced_id and path.read_text(encoding="utf-8").startswith(f"kvs_{replaced_id}_"):
            return
    raise Failure(f"{path} is there already: name another file, or replace it with --force", Exit.USAGE)


def _write(path: Path, reply: pb.TokenReply) -> None:
    """Put the token into a file of its own; whoever reads it meanwhile sees the old one or this one."""
    fresh = path.with_name(path.name + ".new")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)
            file.write(reply.token + "\n")
        fresh.replace(path)
    except OSError as error:
        raise Failure(
            f"writing {path}: {error.strerror}: the token is lost; `kvstorectl token revoke {reply.info.id}`"
        ) from error


def _row(token: pb.TokenInfo) -> tuple[str, ...]:
    left_s = token.expires_s - time.time()
    expires = "never" if not token.expires_s else "expired" if token.expired else f"in {duration(max(0.0, left_s))}"
    return (token.id, token.tenant, token.label or "-", ago(token.created_s), expires)
