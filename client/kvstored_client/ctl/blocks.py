"""`kvstorectl blocks`: what is stored."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from kvstored_proto.v1.admin_pb2 import BlockInfo, ListBlocksReply, ListBlocksRequest
from kvstored_proto.v1.kvstored_pb2 import OPERATION_LIST_BLOCKS

from kvstored_client import Client
from kvstored_client.ctl.connection import connected, options_of
from kvstored_client.ctl.keys import parse_digest
from kvstored_client.ctl.output import as_dict, print_json, print_table, size

PAGE_BLOCKS: Final = 1000
BLOCK_COLUMNS: Final = ("namespace", "hash", "size ", "state", "tiers", "holds ")

NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="DIGEST", help="Only this namespace.")
]
LimitOption = Annotated[int, typer.Option(min=1, max=1_000_000, help="List at most so many.")]


def blocks(context: typer.Context, namespace: NamespaceOption = None, limit: LimitOption = 1000) -> None:
    """List blocks, their size and their tiers."""
    options = options_of(context)
    digest = parse_digest(namespace) if namespace else b""
    with connected(options, "listing blocks") as client:
        found, more = list_blocks(client, digest, limit)
    if options.output == "json":
        print_json({"blocks": [as_dict(block) for block in found], "more": more})
        return
    print_table(BLOCK_COLUMNS, map(block_row, found))
    if more:
        print(f"(more than {limit}: --limit)")


def list_blocks(client: Client, digest: bytes, limit: int) -> tuple[list[BlockInfo], bool]:
    """At most `limit` blocks, page by page, and whether there are more."""
    found: list[BlockInfo] = []
    cursor = b""
    while len(found) <= limit:  # one more than asked, to know whether there is one
        page = min(PAGE_BLOCKS, limit + 1 - len(found))
        request = ListBlocksRequest(namespace_digest=digest, limit=page, cursor=cursor)
        reply = client.call(OPERATION_LIST_BLOCKS, request, ListBlocksReply)
        found += reply.blocks
        cursor = reply.cursor
        if not cursor:
            break
    return found[:limit], len(found) > limit


def block_row(block: BlockInfo) -> tuple[str, ...]:
    """A block under `BLOCK_COLUMNS`."""
    place = (block.namespace_digest.hex(), block.hash.hex())
    return (*place, size(block.size_bytes), block.state, block.tiers, str(block.holds))
