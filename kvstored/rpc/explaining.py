"""The admin operations that answer "why was it a miss": for a block, a chain, a namespace.

Whatever is compared or named is the caller's own tenant's; an admin may name another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from google.protobuf.message import Message
from kvstored_proto import namespace as wire
from kvstored_proto.v1 import admin_pb2 as pb

from kvstored import keys
from kvstored.catalog.catalog import DEAD, Space
from kvstored.catalog.history import ROOM_MADE
from kvstored.catalog.leases import Session
from kvstored.errors import InvalidArgument
from kvstored.explain import misses
from kvstored.explain.chain import explain_chain, near_namespaces
from kvstored.explain.difference import told
from kvstored.explain.explain import Answer, Near, explain
from kvstored.keys import HASH_BYTES_MAX, HASH_BYTES_MIN, NAMESPACE_BYTES_MAX, Namespace
from kvstored.rpc.context import Context
from kvstored.rpc.described import near, of_entry, of_record, space_of, spaces_of, tenant_of
from kvstored.store.parts import Below

PAGE_BLOCKS: Final = 1000
NEAR_DEFAULT: Final = 8
NEAR_MAX: Final = 64


async def _explain(context: Context, session: Session, request: pb.ExplainRequest) -> Message:
    if not HASH_BYTES_MIN <= len(request.hash) <= HASH_BYTES_MAX:
        raise InvalidArgument(f"a hash has {HASH_BYTES_MIN} to {HASH_BYTES_MAX} bytes, this one {len(request.hash)}")
    digest, named = request.namespace_digest, request.tenant
    spaces = spaces_of(context, session, named)
    wanted = space_of(context, session, digest, named) if digest else None
    answer = await explain(context.store.parts, spaces, wanted, request.hash)
    blocks = [of_entry(context, entry) for entry in answer.entries if entry.state != DEAD]  # it took a while
    listed = {entry.pool.space for entry in answer.entries}
    blocks += [of_record(space, request.hash, record) for space, record in answer.records if space not in listed]
    detail = _detail(context, answer)
    return pb.ExplainReply(boot_id=context.boot_id, verdict=answer.verdict, detail=detail, blocks=blocks)


def _detail(context: Context, answer: Answer) -> str:
    by_order = ROOM_MADE in answer.detail
    return answer.detail + (f" (policy.eviction: {context.config.policy.eviction})" if by_order else "")


async def _explain_chain(context: Context, session: Session, request: pb.ExplainChainRequest) -> Message:
    hashes = keys.split_hashes(request.hashes, request.hash_bytes)
    space = space_of(context, session, request.namespace_digest, request.tenant)
    store = context.store
    answer = await explain_chain(store.parts, store.reads, space, hashes)
    reply = pb.ExplainChainReply(
        boot_id=context.boot_id,
        hit_blocks=answer.hit_blocks,
        dram_blocks=answer.dram_blocks,
        nvme_blocks=answer.nvme_blocks,
        pending_blocks=answer.pending_blocks,
        stored_after=answer.stored_after,
        missing_blocks={str(reason): count for reason, count in answer.missing.items()},
        verdict="hit",
        detail="all of it is stored",
    )
    if answer.first is not None:
        reply.verdict, reply.detail = answer.first.verdict, _detail(context, answer.first)
        reply.missing = hashes[answer.hit_blocks]
        if answer.first.nearest is not None:
            reply.nearest.CopyFrom(near(answer.first.nearest.space, answer.first.nearest.differences))
    return reply


async def _explain_namespace(context: Context, session: Session, request: pb.ExplainNamespaceRequest) -> Message:
    parts, tenant = context.store.parts, tenant_of(session, request.tenant)
    known = {space.namespace.digest: space for space in spaces_of(context, session, request.tenant)}
    if request.HasField("spec"):
        encoding, digest = wire.encode(tenant, request.spec), wire.digest(tenant, request.spec)
        if len(encoding) > NAMESPACE_BYTES_MAX:
            raise InvalidArgument(f"the namespace has {len(encoding)} bytes: {NAMESPACE_BYTES_MAX} are allowed")
        ours: Namespace | None = Namespace(tenant, digest, encoding, wire.fields(request.spec))
        space = known.get(digest)
    else:
        digest, space = request.digest, known.get(request.digest)
        ours = space.namespace if space is not None else None
    reply = pb.ExplainNamespaceReply(boot_id=context.boot_id, digest=digest, known=space is not None, tenant=tenant)
    if space is not None:
        await _count(parts.below, space, reply)
    others: list[Near] = []
    if ours is not None:
        reply.tenant = ours.tenant
        reply.fields.update(ours.fields)
        most = min(request.near_max or NEAR_DEFAULT, NEAR_MAX)
        others = await near_namespaces([s for s in known.values() if s.tenant == ours.tenant], ours, most)
        reply.near.extend(near(other.space, other.differences) for other in others)
    reply.detail = _sentence(reply, ours, others)
    if space is not None and (warning := misses.warning_of(parts, space)):
        reply.detail += f"; {warning}"
    return reply


async def _count(below: Below | None, space: Space, reply: pb.ExplainNamespaceReply) -> None:
    reply.dram_blocks, reply.dram_bytes = len(space.entries), space.used_bytes
    reply.nvme_blocks = await count_below(below, space) if below is not None else 0


async def count_below(below: Below, space: Space) -> int:
    """How many blocks of a namespace are on NVMe; it reads the index, page by page."""
    count, cursor = 0, b""
    while True:
        page, cursor = await below.tier.list_records(space.digest, cursor, PAGE_BLOCKS)
        count += len(page)
        if not cursor:
            return count


def _sentence(reply: pb.ExplainNamespaceReply, ours: Namespace | None, others: list[Near]) -> str:
    if ours is None:
        return "no namespace of the tenant has this digest: give its fields, to be told which is nearest"
    if reply.dram_blocks or reply.nvme_blocks:
        return f"it is known, with {reply.dram_blocks} blocks in DRAM and {reply.nvme_blocks} on NVMe"
    what = "it is known, but holds no block" if reply.known else "nothing was stored or asked for in it"
    if not others:
        return f"{what}; the tenant has no other namespace"
    model = ours.fields.get("model", "")
    same = others[0].space.namespace.fields.get("model", "") == model
    which = "the nearest namespace of this model" if same else "there is none of this model, and the nearest other"
    return f"{what}; {which} differs in: {told(others[0].differences)}"


SERVED: Final[dict[str, tuple[type[Message], Callable[[Context, Session, Any], Awaitable[Message]]]]] = {
    "Explain": (pb.ExplainRequest, _explain),
    "ExplainChain": (pb.ExplainChainRequest, _explain_chain),
    "ExplainNamespace": (pb.ExplainNamespaceRequest, _explain_namespace),
}
