"""`kvstorectl namespaces`: which namespaces hold blocks."""

from __future__ import annotations

import typer
from kvstored_proto.v1.admin_pb2 import ListNamespacesReply, ListNamespacesRequest, NamespaceInfo
from kvstored_proto.v1.kvstored_pb2 import OPERATION_LIST_NAMESPACES, NamespaceSpec

from kvstored_client import Client
from kvstored_client.ctl.connection import Exit, Failure, connected, options_of
from kvstored_client.ctl.keys import parse_spec
from kvstored_client.ctl.output import as_dict, print_json, print_table, size
from kvstored_client.ctl.pages import all_pages


def namespaces(context: typer.Context) -> None:
    """List namespaces and what they hold."""
    options = options_of(context)
    with connected(options, "listing namespaces") as client:
        found = list_namespaces(client)
    if options.output == "json":
        print_json({"namespaces": [as_dict(info) for info in found]})
        return
    print_table(("namespace", "tenant", "dram blocks ", "dram ", "nvme blocks ", "fields"), map(_row, found))


def list_namespaces(client: Client) -> list[NamespaceInfo]:
    """All that the caller may see."""
    return all_pages(client, OPERATION_LIST_NAMESPACES, ListNamespacesRequest(), ListNamespacesReply, "namespaces")


def spec_of(client: Client, digest: bytes) -> NamespaceSpec:
    """The specification behind a digest, from the fields that the daemon lists. Raises Failure where it has none."""
    for info in list_namespaces(client):
        if info.digest == digest:
            return parse_spec(f"{name}={value}" for name, value in info.fields.items())
    raise Failure(f"no namespace {digest.hex()}: see `kvstorectl namespaces`", Exit.NO)


def _row(info: NamespaceInfo) -> tuple[str, ...]:
    fields = " ".join(f"{name}={info.fields[name]}" for name in sorted(info.fields))
    return (info.digest.hex(), info.tenant, str(info.dram_blocks), size(info.dram_bytes), str(info.nvme_blocks), fields)
