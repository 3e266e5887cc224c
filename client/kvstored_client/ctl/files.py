"""`kvstorectl put` and `kvstorectl get`: one file as one block, for trying things out and for rescue."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer
from kvstored_proto.v1.admin_pb2 import ExplainReply, ExplainRequest
from kvstored_proto.v1.kvstored_pb2 import OPERATION_EXPLAIN

from kvstored_client import Client, Namespace, NamespaceSpec
from kvstored_client.ctl.connection import Exit, Failure, Options, connected, options_of
from kvstored_client.ctl.keys import parse_digest, parse_hash, parse_key, parse_spec
from kvstored_client.ctl.namespaces import spec_of
from kvstored_client.ctl.output import print_json, size
from kvstored_client.ctl.status import read_status
from kvstored_client.dialing import REMOTE
from kvstored_client.errors import Unavailable
from kvstored_client.results import Outcome
from kvstored_client.terms import Durability

BLOCK_BYTES_MAX: Final = 16 << 20
_STAGING_ALIGN_BYTES: Final = 4096
_WHY_NOT_DURABLE: Final = "it is full, read-only or off, or the tenant's key is missing"
_ASK_STATUS: Final = "see `kvstorectl status` (as admin)"

NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="DIGEST", help="The namespace, as `namespaces` lists it.")
]
FieldOption = Annotated[
    list[str] | None,
    typer.Option("--field", "-f", metavar="FIELD=VALUE", help="Or its fields, as in model=llama; may be repeated."),
]
SourceArgument = Annotated[Path, typer.Argument(metavar="FILE", help="At most 16 MiB; `-` is standard input.")]
TargetArgument = Annotated[Path, typer.Argument(metavar="FILE", help="`-` is standard output.")]
KeyArgument = Annotated[
    str, typer.Argument(metavar="[NAMESPACE:]HASH", help="Block hash in hex; with its namespace as `put` prints it.")
]
DurableOption = Annotated[bool, typer.Option("--durable", help="Stored only when it is on NVMe, synced.")]
NewKeyArgument = Annotated[
    str | None, typer.Argument(metavar="KEY", help="Block hash in hex; default: SHA-256 of the file.")
]


def put(
    context: typer.Context,
    file: SourceArgument,
    key: NewKeyArgument = None,
    namespace: NamespaceOption = None,
    field: FieldOption = None,
    durable: DurableOption = False,
) -> None:
    """Store a file as one block and print its key."""
    options = options_of(context)
    wanted = _wanted(namespace, field)
    data = _read(file)
    block = parse_hash(key) if key else hashlib.sha256(data).digest()
    staging_bytes = -(-len(data) // _STAGING_ALIGN_BYTES) * _STAGING_ALIGN_BYTES
    with connected(options, f"putting {file}", staging_bytes=staging_bytes) as client:
        handle = _open(client, wanted)
        durability: Durability = "nvme" if durable else "memory"
        result = client.put(handle, [block], [data], wait_s=options.timeout_s, durability=durability)
        if result.error is not None:  # the daemon's own words, such as which role may not write
            raise result.error
        if not result.stored + result.existing:
            raise Failure(f"putting {file}: {_refusal(client, result.outcomes[0])}")
        document = {"namespace": handle.digest.hex(), "key": block.hex(), "size_bytes": len(data)}
    verdict = "stored" if result.stored else "stored before"
    if options.output == "json":
        print_json(document | {"stored": bool(result.stored), "durable": bool(result.durable)})
    else:
        print(f"{verdict}: {document['namespace']}:{document['key']} ({size(len(data))})")


def get(
    context: typer.Context,
    key: KeyArgument,
    file: TargetArgument,
    namespace: NamespaceOption = None,
    field: FieldOption = None,
) -> None:
    """Write a block to a file.

    Exit 1 where it is not stored.
    """
    options = options_of(context)
    digest, block = parse_key(key)
    if digest and (namespace or field):
        raise Failure(f"{key} names its namespace already: leave --namespace and --field out", Exit.USAGE)
    wanted = digest or _wanted(namespace, field)
    with connected(options, f"getting {key}") as client:
        handle = _open(client, wanted)
        data = _fetched(client, options, handle, block)
        if data is None:
            if client.stats.misses_unavailable:
                raise Unavailable("the daemon does not answer")
            raise Failure(f"getting {key}: not stored here; `kvstorectl explain {key}` says why")
    _write(file, data)
    if options.output == "json":
        print_json({"key": key, "size_bytes": len(data), "file": str(file)})
    elif str(file) != "-":
        print(f"{file}: {size(len(data))}")


def _fetched(client: Client, options: Options, namespace: Namespace, block: bytes) -> bytes | None:
    """The bytes of a block; None where it is not stored."""
    if not options.address.startswith(REMOTE):
        with client.get(namespace, [block], wait_s=options.timeout_s) as blocks:
            return bytes(blocks[0]) if len(blocks) else None
    # There it comes inside of messages, to memory of its size.
    request = ExplainRequest(hash=block, namespace_digest=namespace.digest)
    listed = client.call(OPERATION_EXPLAIN, request, ExplainReply).blocks  # other namespaces' blocks of this hash, too
    found = [each.size_bytes for each in listed if each.namespace_digest == namespace.digest]
    if not found:
        return None
    buffer = bytearray(found[0])
    try:
        came = client.get_into(namespace, [block], [buffer], wait_s=options.timeout_s)
    except ValueError as error:
        raise Failure(f"getting {block.hex()}: it was replaced meanwhile ({error}): try again") from None
    return bytes(buffer) if came else None


def _wanted(namespace: str | None, field: list[str] | None) -> bytes | NamespaceSpec:
    """The namespace as it was named: by exactly one of its digest and its fields."""
    if bool(namespace) == bool(field):
        raise Failure("name the namespace: either --namespace DIGEST or --field FIELD=VALUE ...", Exit.USAGE)
    return parse_digest(namespace) if namespace else parse_spec(field or ())


def _open(client: Client, wanted: bytes | NamespaceSpec) -> Namespace:
    read_status(client)  # the verbs fail open: without this an absent daemon would read as "not stored"
    if isinstance(wanted, NamespaceSpec):
        return client.namespace(wanted)
    handle = client.namespace(spec_of(client, wanted))
    if handle.digest and handle.digest != wanted:
        raise Failure(f"namespace {wanted.hex()} belongs to another tenant: use that tenant's token")
    return handle


def _refusal(client: Client, outcome: Outcome) -> str:
    """Why nothing was stored, and what to look at; paths are shown to admins only."""
    status = read_status(client)
    if outcome is Outcome.NOT_DURABLE:
        paths = [path for tier in status.tiers for path in tier.paths if path.health != "ok"]
        why = "; ".join(f"{path.path} is {path.health} ({path.reason})" for path in paths) or _WHY_NOT_DURABLE
        return f"not stored durably: NOT_DURABLE: it is in DRAM, but NVMe takes no writes: {why}: {_ASK_STATUS}"
    if status.state == "draining":
        return f"not stored: {outcome.name}: the daemon is draining; `kvstorectl drain --undo` takes puts again"
    return f"not stored: {outcome.name}"


def _read(path: Path) -> bytes:
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(BLOCK_BYTES_MAX + 1)
        else:
            with path.open("rb") as source:
                data = source.read(BLOCK_BYTES_MAX + 1)
    except OSError as error:
        raise Failure(f"reading {path}: {error.strerror}") from error
    if not 0 < len(data) <= BLOCK_BYTES_MAX:
        held = "is empty" if not data else f"is larger than {size(BLOCK_BYTES_MAX)}"
        raise Failure(f"putting {path}: it {held}; a block has 1 byte to {size(BLOCK_BYTES_MAX)}", Exit.USAGE)
    return data


def _write(path: Path, data: bytes) -> None:
    """All of the file or nothing: written beside it, then renamed."""
    if str(path) == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise Failure(f"writing {path}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as target:
            target.write(data)
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise Failure(f"writing {path}: {error.strerror}") from error
