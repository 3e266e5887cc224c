"""How far the tokens of a prompt hit: their block hashes, asked for in one namespace and in those near it.

A namespace's fields seed its block hashes, but for those of its shard, so the same tokens have other hashes in a
namespace with another tokenizer, say. Only who has the tokens can compute both: the daemon is asked about each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstored_proto import namespace as wire
from kvstored_proto.v1.admin_pb2 import (
    ExplainChainReply,
    ExplainChainRequest,
    ExplainNamespaceReply,
    ExplainNamespaceRequest,
    NearNamespace,
)
from kvstored_proto.v1.kvstored_pb2 import OPERATION_EXPLAIN_CHAIN, OPERATION_EXPLAIN_NAMESPACE, NamespaceSpec

from kvstored_client import Client, keys
from kvstored_client.ctl.connection import Exit, Failure
from kvstored_client.ctl.keys import parse_spec
from kvstored_client.ctl.output import as_dict

NEAR_MAX: Final = 64
BLOCKS_PER_CALL: Final = 8192
VALUE_CHARS_MAX: Final = 80


@dataclass(frozen=True)
class Elsewhere:
    """Another namespace that has more of the tokens."""

    near: NearNamespace
    tokens: int


@dataclass(frozen=True)
class ChainAnswer:
    """What became of a prompt's blocks in one namespace. `hits.verdict` is about the first missing one."""

    namespace: ExplainNamespaceReply
    tokens: int
    block_tokens: int
    blocks: int
    hits: ExplainChainReply
    elsewhere: Elsewhere | None

    @property
    def verdict(self) -> str:
        """As in ExplainReply."""
        differs = self.elsewhere is not None and self.hits.verdict == "never_stored"
        return "namespace_differs" if differs else self.hits.verdict

    def sentences(self) -> Iterator[str]:
        """For people."""
        hits, size = self.hits, self.block_tokens
        if self.verdict == "hit":
            yield f"hit: all {self.blocks} blocks ({self.blocks * size} tokens) are stored{_where(hits)}"
        else:
            yield (
                f"{self.verdict}: the first {hits.hit_blocks} of {self.blocks} blocks ({hits.hit_blocks * size} of "
                f"{self.tokens} tokens) are stored{_where(hits)}"
            )
            named = f" ({hits.missing.hex()})" if hits.missing else ""
            yield f"block {hits.hit_blocks}{named} is missing: {hits.detail}"
        if hits.missing_blocks:
            counts = ", ".join(f"{n} {reason}" for reason, n in sorted(hits.missing_blocks.items()))
            yield f"missing blocks: {counts}"
        if hits.stored_after:
            yield f"{hits.stored_after} blocks behind the break are stored, and of no use without it"
        if self.elsewhere is not None:
            yield (
                f"{self.elsewhere.tokens} of the tokens are stored under a namespace that differs in: "
                f"{differing(self.elsewhere.near)} (namespace {self.elsewhere.near.digest.hex()})"
            )
        if rest := self.tokens - self.blocks * size:
            yield f"the last {rest} tokens fill no block: only full ones are stored"

    def document(self) -> dict[str, Any]:
        """For programs."""
        made = {
            "namespace": self.namespace.digest.hex(),
            "known": self.namespace.known,
            "tenant": self.namespace.tenant,
        }
        made |= {"tokens": self.tokens, "block_tokens": self.block_tokens, "blocks": self.blocks}
        made |= {name: value for name, value in as_dict(self.hits).items() if name not in ("boot_id", "nearest")}
        made["verdict"] = self.verdict
        found = self.elsewhere
        made["elsewhere"] = None if found is None else {**as_dict(found.near), "tokens": found.tokens}
        return made


def explain_namespace(
    client: Client, digest: bytes, spec: NamespaceSpec | None, tenant: str, near_max: int = 0
) -> ExplainNamespaceReply:
    """What the daemon knows of a namespace, and of those near it."""
    request = ExplainNamespaceRequest(digest=digest, spec=spec, tenant=tenant, near_max=near_max)
    return client.call(OPERATION_EXPLAIN_NAMESPACE, request, ExplainNamespaceReply)


def explain_tokens(
    client: Client, tokens: Sequence[int], digest: bytes, spec: NamespaceSpec | None, tenant: str, block_tokens: int
) -> ChainAnswer:
    """How far tokens hit in a namespace, given by its digest or its spec, and where else they are.

    Raises Failure where the namespace cannot be told, or no block is filled.
    """
    about = explain_namespace(client, digest, spec, tenant, NEAR_MAX)
    if spec is None and not about.known:
        raise Failure(about.detail)
    ours = spec if spec is not None else _spec(about.fields)
    size = block_tokens or ours.block_tokens
    if not size:
        raise Failure("the namespace does not say how many tokens a block has: give --block-tokens", Exit.USAGE)
    hashes = _chain(about.tenant, ours, tokens, size)
    if not hashes:
        raise Failure(f"{len(tokens)} tokens fill no block of {size}: only full blocks are stored", Exit.USAGE)
    if about.known:
        hits = _explain(client, about.digest, hashes, about.tenant)
    else:
        hits = ExplainChainReply(verdict="never_stored", detail=about.detail)
    elsewhere = None
    if hits.verdict != "hit":
        elsewhere = _elsewhere(client, tokens, about, ours, hits, size)
    return ChainAnswer(about, len(tokens), size, len(hashes), hits, elsewhere)


def differing(near: NearNamespace) -> str:
    """The fields in which two namespaces differ: `dtype bf16 / fp16, layout a / b`."""
    return ", ".join(f"{d.field} {_short(d.ours)} / {_short(d.theirs)}" for d in near.differences)


def _elsewhere(
    client: Client,
    tokens: Sequence[int],
    about: ExplainNamespaceReply,
    ours: NamespaceSpec,
    hits: ExplainChainReply,
    size: int,
) -> Elsewhere | None:
    """The nearest namespace that has more of the tokens."""
    have = hits.hit_blocks * size
    near = list(about.near)
    if hits.HasField("nearest"):  # with the same block hashes: the daemon has looked there
        near.insert(0, hits.nearest)
    for other in near:
        spec = _spec(other.fields)
        theirs = spec.block_tokens or size
        hashes = _chain(about.tenant, spec, tokens, theirs)
        more = have // theirs + 1  # so many blocks are more than we have
        if len(hashes) < more:
            continue
        if _explain(client, other.digest, hashes[:more], about.tenant).verdict in ("hit", "pending"):
            found = _explain(client, other.digest, hashes, about.tenant)
            return Elsewhere(other, found.hit_blocks * theirs)
    return None


def _explain(client: Client, digest: bytes, hashes: Sequence[bytes], tenant: str) -> ExplainChainReply:
    """A whole chain, in as many calls as it takes; they end with the first that does not hit."""
    total = ExplainChainReply()
    for start in range(0, len(hashes), BLOCKS_PER_CALL):
        packed = keys.pack(hashes[start : start + BLOCKS_PER_CALL])
        request = ExplainChainRequest(
            namespace_digest=digest, hashes=packed.data, hash_bytes=packed.hash_bytes, tenant=tenant
        )
        reply = client.call(OPERATION_EXPLAIN_CHAIN, request, ExplainChainReply)
        for name in ("hit_blocks", "dram_blocks", "nvme_blocks", "pending_blocks"):
            setattr(reply, name, getattr(reply, name) + getattr(total, name))
        total = reply
        if reply.hit_blocks < start + packed.length:
            break
    return total


def _chain(tenant: str, spec: NamespaceSpec, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    return keys.chain(wire.chain_seed(tenant, spec), tokens, block_tokens)


def _spec(fields: Any) -> NamespaceSpec:
    return parse_spec(f"{name}={value}" for name, value in fields.items())


def _where(hits: ExplainChainReply) -> str:
    counts = ((hits.dram_blocks, "in DRAM"), (hits.nvme_blocks, "on NVMe"), (hits.pending_blocks, "still pending"))
    told = ", ".join(f"{count} {where}" for count, where in counts if count)
    return f" ({told})" if told else ""


def _short(value: str) -> str:
    return value if len(value) <= VALUE_CHARS_MAX else f"{value[: VALUE_CHARS_MAX - 3]}..."
