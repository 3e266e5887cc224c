"""`kvstorectl hint` and `kvstorectl pins`: say something of blocks, and list what was said."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from kvstored_proto.v1.admin_pb2 import ListPinsReply, ListPinsRequest, PinInfo
from kvstored_proto.v1.kvstored_pb2 import (
    OPERATION_HINT,
    OPERATION_LIST_PINS,
    OPERATION_OPEN_NAMESPACE,
    HintReply,
    HintRequest,
    OpenNamespaceReply,
    OpenNamespaceRequest,
)

from kvstored_client.ctl.connection import Exit, Failure, connected, options_of
from kvstored_client.ctl.keys import parse_digest, parse_hash
from kvstored_client.ctl.namespaces import spec_of
from kvstored_client.ctl.output import as_dict, print_json, print_table, size
from kvstored_client.terms import TTL_MAX_S

PIN_S_MAX: Final = 86_400

NamespaceOption = Annotated[str, typer.Option("--namespace", "-n", metavar="DIGEST", help="The namespace.")]
HashesArgument = Annotated[list[str], typer.Argument(metavar="HASH...", help="Block hashes in hex, parents first.")]
PriorityOption = Annotated[int | None, typer.Option(min=-3, max=3, help="Counts as so many uses more or less.")]
TtlOption = Annotated[
    float,
    typer.Option("--ttl", min=0, max=TTL_MAX_S, metavar="SECONDS", help="Blocks that end do so no earlier."),
]
SoftOption = Annotated[float, typer.Option("--soft-pin", min=0, max=PIN_S_MAX, metavar="SECONDS", help="They go last.")]
HardOption = Annotated[
    float, typer.Option("--hard-pin", min=0, max=PIN_S_MAX, metavar="SECONDS", help="They are not evicted.")
]
ContinuesOption = Annotated[bool, typer.Option("--continues", help="The chain will be asked for again soon.")]
FinalOption = Annotated[bool, typer.Option("--final", help="It will not: these go first.")]
UnpinOption = Annotated[bool, typer.Option("--unpin", help="End pins and --final.")]


def hint(  # one parameter an option
    context: typer.Context,
    hashes: HashesArgument,
    namespace: NamespaceOption,
    priority: PriorityOption = None,
    ttl: TtlOption = 0.0,
    soft_pin: SoftOption = 0.0,
    hard_pin: HardOption = 0.0,
    continues: ContinuesOption = False,
    final: FinalOption = False,
    unpin: UnpinOption = False,
) -> None:
    """Give a hint about blocks of one chain that are in DRAM. Exit 1 where it has no effect on any."""
    options = options_of(context)
    request = HintRequest(continues=continues, final=final, unpin=unpin, priority=priority)
    request.ttl_ms, request.soft_pin_ms, request.hard_pin_ms = (round(s * 1000) for s in (ttl, soft_pin, hard_pin))
    if not request.ListFields():
        raise Failure("say what: --priority, --ttl, --soft-pin, --hard-pin, --continues, --final, --unpin", Exit.USAGE)
    blocks, digest = [parse_hash(text) for text in hashes], parse_digest(namespace)
    if len(set(map(len, blocks))) > 1:
        raise Failure("the hashes have different lengths: those of one chain have one", Exit.USAGE)
    request.hashes, request.hash_bytes = b"".join(blocks), len(blocks[0])
    with connected(options, "giving a hint") as client:
        opening = OpenNamespaceRequest(spec=spec_of(client, digest))
        request.namespace_id = client.call(OPERATION_OPEN_NAMESPACE, opening, OpenNamespaceReply).namespace_id
        reply = client.call(OPERATION_HINT, request, HintReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        print(f"{reply.applied_blocks} of {reply.blocks} blocks in DRAM (with what they hang on)")
    if not reply.applied_blocks:
        raise typer.Exit(Exit.NO)


def pins(context: typer.Context) -> None:
    """List pins and other hints by namespace, and what may be pinned hard."""
    options = options_of(context)
    with connected(options, "listing pins") as client:
        reply = client.call(OPERATION_LIST_PINS, ListPinsRequest(), ListPinsReply)
    if options.output == "json":
        print_json({"pins": [as_dict(pin) for pin in reply.pins], "limits": [as_dict(one) for one in reply.limits]})
        return
    columns = ("namespace", "tenant", "hard ", "bytes ", "soft ", "bytes ", "final ", "priority ", "ends in ")
    print_table(columns, map(_row, reply.pins))
    for limit in reply.limits:
        pinned = f"{size(limit.hard_pinned_bytes)} of {size(limit.hard_pin_bytes)} pinned hard"
        wrong = f"; {limit.final_wrong_share:.0%} of what was final was asked for again"
        print(f"{limit.tenant}: {pinned}{wrong if limit.final_wrong_share else ''}")


def _row(pin: PinInfo) -> tuple[str, ...]:
    hard, soft = (str(pin.hard_blocks), size(pin.hard_bytes)), (str(pin.soft_blocks), size(pin.soft_bytes))
    ends = f"{pin.longest_s:.0f} s" if pin.longest_s > 0 else "-"
    others = (str(pin.final_blocks), str(pin.preferred_blocks), ends)
    return (pin.namespace_digest.hex(), pin.tenant, *hard, *soft, *others)
