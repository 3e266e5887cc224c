"""`kvstorectl explain`: why something was a miss; for a block, for the tokens of a prompt, for a namespace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer
from kvstored_proto.v1.admin_pb2 import ExplainNamespaceReply, ExplainReply, ExplainRequest
from kvstored_proto.v1.kvstored_pb2 import OPERATION_EXPLAIN

from kvstored_client.ctl import chains
from kvstored_client.ctl.blocks import BLOCK_COLUMNS, block_row
from kvstored_client.ctl.connection import Exit, Failure, Options, connected, options_of
from kvstored_client.ctl.keys import parse_digest, parse_key
from kvstored_client.ctl.output import as_dict, print_json, print_table
from kvstored_client.ctl.token_files import read_spec, read_tokens

_THERE: Final = frozenset({"hit", "pending"})

KeyArgument = Annotated[str | None, typer.Argument(metavar="[[NAMESPACE:]HASH]", help="Block hash in hex.")]
TokensOption = Annotated[
    Path | None,
    typer.Option("--tokens", metavar="FILE", help="Token ids of a prompt, JSON or text (-: stdin)."),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="DIGEST", help="The namespace, by its digest.")
]
ModelOption = Annotated[
    Path | None, typer.Option("--model", metavar="DIR", help="The namespace of this model: its directory.")
]
SpecOption = Annotated[
    Path | None, typer.Option("--spec", metavar="FILE", help="The namespace, as a JSON object of its fields.")
]
FieldOption = Annotated[
    list[str] | None, typer.Option("--field", "-f", metavar="FIELD=VALUE", help="A field of the namespace.")
]
BlockTokensOption = Annotated[
    int | None,
    typer.Option("--block-tokens", min=1, metavar="N", help="Tokens of a block, where the namespace has none."),
]
TenantOption = Annotated[str, typer.Option("--tenant", metavar="NAME", help="Another tenant, for admins.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The same as -o json.")]


def explain(  # one parameter an option
    context: typer.Context,
    key: KeyArgument = None,
    tokens: TokensOption = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    spec: SpecOption = None,
    field: FieldOption = None,
    block_tokens: BlockTokensOption = None,
    tenant: TenantOption = "",
    as_json: JsonOption = False,
) -> None:
    """Say why something was a miss.

    Of a block: where it is, or why it is not. With --tokens: how far a prompt hits, where that ends, and why. With a
    namespace alone: what it holds, and which others are near it and how they differ. Exit 1 where the answer is a miss.
    """
    options = options_of(context)
    if as_json:
        options = replace(options, output="json")
    named = [option for option in (namespace, model, spec, *(field or [])) if option is not None]
    if key is not None:
        if named or tokens is not None:
            raise Failure("a block is named by [NAMESPACE:]HASH alone, or a prompt by --tokens", Exit.USAGE)
        there = _explain_key(options, key, tenant)
    elif not named:
        raise Failure(
            "say what: [NAMESPACE:]HASH, or --namespace, --model, --spec or --field, with --tokens for a prompt",
            Exit.USAGE,
        )
    else:
        digest = parse_digest(namespace) if namespace else b""
        wanted = read_spec(model, spec, field or [])
        if digest and wanted is not None:
            raise Failure("--namespace and --model, --spec or --field exclude each other", Exit.USAGE)
        if tokens is None:
            with connected(options, "explaining the namespace") as client:
                there = _print_namespace(options, chains.explain_namespace(client, digest, wanted, tenant))
        else:
            ids = read_tokens(tokens)
            with connected(options, f"explaining {tokens}") as client:
                answer = chains.explain_tokens(client, ids, digest, wanted, tenant, block_tokens or 0)
            there = _print_chain(options, answer)
    raise typer.Exit(Exit.OK if there else Exit.NO)


def _explain_key(options: Options, key: str, tenant: str) -> bool:
    digest, block = parse_key(key)
    with connected(options, f"explaining {key}") as client:
        request = ExplainRequest(hash=block, namespace_digest=digest, tenant=tenant)
        reply = client.call(OPERATION_EXPLAIN, request, ExplainReply)
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        print(f"{reply.verdict}: {reply.detail}" if reply.detail else reply.verdict)
        print_table(BLOCK_COLUMNS, map(block_row, reply.blocks))
    return reply.verdict in _THERE


def _print_chain(options: Options, answer: chains.ChainAnswer) -> bool:
    if options.output == "json":
        print_json(answer.document())
    else:
        for sentence in answer.sentences():
            print(sentence)
    return answer.verdict in _THERE and answer.hits.hit_blocks == answer.blocks


def _print_namespace(options: Options, reply: ExplainNamespaceReply) -> bool:
    if options.output == "json":
        print_json(as_dict(reply))
    else:
        print(f"namespace {reply.digest.hex()} of tenant {reply.tenant}: {reply.detail}")
        rows = [(near.digest.hex(), str(near.dram_blocks), chains.differing(near)) for near in reply.near]
        print_table(("near it", "dram blocks ", "differs in"), rows)
    return bool(reply.dram_blocks or reply.nvme_blocks)
