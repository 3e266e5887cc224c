"""Hints over both transports, by themselves and with a put, and the list of what is hinted."""

from __future__ import annotations

from typing import Final

import msgspec
from google.protobuf.message import Message
from kvstored_proto.v1 import admin_pb2, kvstored_pb2

from kvstored import keys
from kvstored.catalog.leases import Session
from kvstored.rpc.context import Context
from kvstored.rpc.roles import Handler
from kvstored.store.hints import PinCounts, Wish


async def _hint(context: Context, session: Session, request: kvstored_pb2.HintRequest) -> Message:
    wish = Wish(
        priority=request.priority if request.HasField("priority") else None,
        ttl_s=request.ttl_ms / 1000,
        soft_pin_s=request.soft_pin_ms / 1000,
        hard_pin_s=request.hard_pin_ms / 1000,
        continues=request.continues,
        final=request.final,
        unpin=request.unpin,
    )
    hashes = keys.split_hashes(request.hashes, request.hash_bytes)
    result = await context.store.hints.hint(session, session.space_of(request.namespace_id), hashes, wish)
    return kvstored_pb2.HintReply(
        boot_id=context.boot_id,
        blocks=result.blocks,
        applied_blocks=result.applied,
        hard_pinned_bytes=result.hard_pinned_bytes,
    )


def wish_of(
    request: kvstored_pb2.ReserveRequest | kvstored_pb2.PutInlineHeader | kvstored_pb2.StoreRequest,
) -> Wish | None:
    """What a put says of its blocks, if anything. Raises InvalidArgument."""
    if not request.HasField("hints"):
        return None
    said = request.hints
    wish = Wish(
        priority=said.priority if said.HasField("priority") else None,
        soft_pin_s=said.soft_pin_ms / 1000,
        hard_pin_s=said.hard_pin_ms / 1000,
        continues=said.continues,
        final=said.final,
    )
    wish.check()
    return wish


async def _list_pins(context: Context, session: Session, request: admin_pb2.ListPinsRequest) -> Message:
    own = session.caller.tenant
    hints = context.store.hints
    found = await hints.listed(None if session.caller.role == "admin" else own)
    tenants = sorted({own, *(counts.space.tenant for counts in found)})
    limits = [
        admin_pb2.PinLimit(
            tenant=name,
            hard_pinned_bytes=hints.hinting.hard_bytes(name),
            hard_pin_bytes=hints.hard_limit_of(name),
            final_wrong_share=hints.hinting.trust[name].wrong_share,
        )
        for name in tenants
    ]
    return admin_pb2.ListPinsReply(boot_id=context.boot_id, pins=map(_info, found), limits=limits)


def _info(counts: PinCounts) -> admin_pb2.PinInfo:
    fields = {name: value for name, value in msgspec.structs.asdict(counts).items() if name != "space"}
    space = counts.space
    return admin_pb2.PinInfo(namespace_digest=space.namespace.digest, tenant=space.tenant, **fields)


SERVED: Final[dict[str, tuple[type[Message], Handler]]] = {
    "Hint": (kvstored_pb2.HintRequest, _hint),
    "ListPins": (admin_pb2.ListPinsRequest, _list_pins),
}
