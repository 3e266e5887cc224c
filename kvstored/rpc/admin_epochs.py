"""Epochs over both transports: a tenant bumps and lists its own, an admin anybody's."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import Message
from kvstored_proto.v1 import admin_pb2 as pb

from kvstored.catalog.leases import Session
from kvstored.errors import InvalidArgument
from kvstored.rpc.context import Context
from kvstored.rpc.paging import Page, after
from kvstored.rpc.roles import Handler
from kvstored.store.epochs import EpochInfo

NAME_BYTES_MAX: Final = 4096


async def _bump_epoch(context: Context, session: Session, request: pb.BumpEpochRequest) -> Message:
    tenant = request.tenant or session.caller.tenant
    if tenant != session.caller.tenant:
        session.check_admin()
    if not request.model:
        raise InvalidArgument("an epoch is of a model: name it, as in its namespaces")
    if len(request.model.encode()) + len(request.model_version.encode()) > NAME_BYTES_MAX:
        raise InvalidArgument(f"model and model_version have at most {NAME_BYTES_MAX} bytes together")
    bumped = await context.store.bumps.bump(tenant, request.model, request.model_version)
    return pb.BumpEpochReply(
        boot_id=context.boot_id,
        number=bumped.number,
        namespaces=bumped.namespaces,
        dram_blocks=bumped.dram_blocks,
    )


def _list_epochs(context: Context, session: Session, request: pb.ListEpochsRequest) -> Message:
    sees_all = session.caller.role == "admin"
    page: Page[pb.EpochInfo] = Page(request.limit)
    found = context.store.bumps.list(None if sees_all else session.caller.tenant)
    for key, epoch in after(found, _key, request.cursor):
        if not page.add(key, _info(epoch)):
            break
    return pb.ListEpochsReply(boot_id=context.boot_id, epochs=page.items, cursor=page.cursor)


def _key(epoch: EpochInfo) -> bytes:
    return "\0".join((epoch.tenant, epoch.model, epoch.version)).encode()


def _info(epoch: EpochInfo) -> pb.EpochInfo:
    return pb.EpochInfo(
        tenant=epoch.tenant,
        model=epoch.model,
        model_version=epoch.version,
        number=epoch.number,
        taking_back=epoch.taking_back,
    )


SERVED: Final[dict[str, tuple[type[Message], Handler]]] = {
    "BumpEpoch": (pb.BumpEpochRequest, _bump_epoch),
    "ListEpochs": (pb.ListEpochsRequest, _list_epochs),
}
