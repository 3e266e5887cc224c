"""On which terms a put stores its blocks: its own, else those that its namespace was opened with."""

from __future__ import annotations

from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.catalog.leases import Session
from kvstored.errors import InvalidArgument
from kvstored.lifetime import Lifetime


def wants_durable(session: Session, request: pb.ReserveRequest | pb.PutInlineHeader | pb.StoreRequest) -> bool:
    """The durability of a put: its own, else the one that its namespace was opened with."""
    if request.durability == pb.DURABILITY_UNSPECIFIED:
        return request.namespace_id in session.durable
    return request.durability == pb.DURABILITY_NVME


def lifetime_of(
    session: Session,
    request: pb.OpenNamespaceRequest | pb.ReserveRequest | pb.PutInlineHeader | pb.StoreRequest,
    handle: int = 0,
) -> Lifetime | None:
    """The lifetime that is asked for; of a put that asks for none, the one that its namespace was opened with."""
    if request.ttl_ms:
        return Lifetime(request.ttl_ms / 1000, request.sliding_ttl)
    if request.sliding_ttl:
        raise InvalidArgument("sliding_ttl without ttl_ms: say how long after its last use a block ends")
    return session.lifetimes.get(handle)
