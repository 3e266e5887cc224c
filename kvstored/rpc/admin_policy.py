"""The eviction policy over both transports: what it is, and another one; admins only (`roles`)."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message
from kvstored_proto.v1 import admin_pb2 as pb

from kvstored.catalog.leases import Session
from kvstored.rpc.context import Context
from kvstored.rpc.roles import Handler

SHOWN: Final = {
    "policy": ("heat_half_life", "heat_demote_above", "heat_promote_from", "admission", "admission_memory_blocks"),
    "mover": ("high_watermark", "low_watermark", "batch_share", "forecast_half_life_s"),
    "nvme": ("write_budget_bytes_per_day",),
}


def _policy(context: Context, session: Session, request: pb.PolicyRequest) -> Message:
    return _reply(context)


def _set_policy(context: Context, session: Session, request: pb.SetPolicyRequest) -> Message:
    context.reordering.set_eviction(request.eviction)
    return _reply(context)


def _reply(context: Context) -> Message:
    config, reordering = context.config, context.reordering
    settings = {
        f"{section}.{name}": str(getattr(getattr(config, section), name))
        for section, names in SHOWN.items()
        for name in names
    }
    return pb.PolicyReply(
        boot_id=context.boot_id,
        eviction=reordering.settings.name,
        configured_eviction=config.policy.eviction,
        changing=reordering.changing,
        settings=settings,
    )


SERVED: Final[dict[str, tuple[type[Message], Handler]]] = {
    "Policy": (pb.PolicyRequest, _policy),
    "SetPolicy": (pb.SetPolicyRequest, _set_policy),
}
