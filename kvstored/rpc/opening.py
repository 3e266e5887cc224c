"""Opening a session, once for both transports: what is agreed on, and what a client that comes back still holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from google.protobuf.message import Message
from kvstored_proto import frames, page, progress
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored import keys
from kvstored.catalog.leases import Caller, Session
from kvstored.errors import FailedPrecondition, InvalidArgument, Unauthenticated
from kvstored.rpc.context import Context

CLIENT_NAME_MAX: Final = 256  # it stands in every status
CLIENT_ID_MAX: Final = 64
TRANSFER_LAYERS: Final = "transfer_layers"  # ranges of layers, layers that are told, deadlines; goes with `gpu`
GPU: Final = "gpu"  # the feature; granted where the daemon may use GPUs, whether there is one or not
GPU_DESCRIPTORS: Final = "gpu_descriptors"
FEATURES: Final[tuple[str, ...]] = ("prefetch", "groups", "durability", "ttl", "lookup_prefetch", "hints", "put_hints")


async def open_session(context: Context, caller: Caller, request: pb.OpenSessionRequest) -> tuple[Session, Message]:
    """Open a session; not in the table, because there is none yet. Raises FailedPrecondition for another protocol."""
    low, high = max(request.protocol_min, frames.PROTOCOL_MIN), min(request.protocol_max, frames.PROTOCOL_MAX)
    if low > high:
        raise FailedPrecondition(
            f"the client speaks protocol {request.protocol_min} to {request.protocol_max}, this daemon "
            f"{frames.PROTOCOL_MIN} to {frames.PROTOCOL_MAX}: update the older of the two"
        )
    if len(request.client_name) > CLIENT_NAME_MAX:
        raise InvalidArgument(f"client_name has {len(request.client_name)} characters: {CLIENT_NAME_MAX} are allowed")
    if len(request.resume.client_id) > CLIENT_ID_MAX:
        raise InvalidArgument(f"client_id has {len(request.resume.client_id)} bytes: {CLIENT_ID_MAX} are allowed")
    session = await context.store.open_session(
        caller,
        staging_bytes=request.staging_bytes if caller.transport == "session" else 0,
        create_group=request.create_group,
        join_group=request.join_group,
        page=caller.transport == "session" and page.FEATURE in request.features,
        client_id=request.resume.client_id,
    )
    if session.ended:  # meanwhile its credential was taken away
        raise Unauthenticated("what was shown does not count any more: ask for a new token")
    resumed = context.store.quarantine.resume(session, request.resume.lease_ids)
    limits = context.store.parts.limits
    return session, pb.OpenSessionReply(
        boot_id=context.boot_id,
        protocol=high,
        features=_features(context, session, request.features),
        resumed_leases=resumed,
        session_id=session.session_id,
        tenant=caller.tenant,
        role=caller.role,
        group_id=session.group.group_id,
        staging_bytes=session.staging_bytes,
        daemon_version=context.version,
        limits=pb.Limits(
            max_blocks_per_call=keys.BLOCKS_PER_CALL_MAX,
            max_block_bytes=keys.BLOCK_BYTES_MAX,
            max_leases=limits.leases_per_session,
            max_reservations=limits.reservations_per_session,
        ),
        idle_timeout_ms=int(context.config.server.idle_timeout_s * 1000),
    )


def _features(context: Context, session: Session, asked: Sequence[str]) -> list[str]:
    granted = FEATURES if session.page is None else (*FEATURES, page.FEATURE)
    if session.staging is not None and progress.AVAILABLE:
        granted = (*granted, progress.FEATURE)
    if context.store.transfers is not None and session.caller.transport == "session":
        granted = (*granted, GPU_DESCRIPTORS)
    if context.store.transfers is not None:
        granted = (*granted, GPU, TRANSFER_LAYERS)
    return [name for name in granted if name in asked]
