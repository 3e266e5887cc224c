"""Blocks and namespaces as answers name them, and which of them a caller may see."""

from __future__ import annotations

from kvstored_proto.v1 import admin_pb2 as pb

from kvstored.catalog.catalog import STATE_NAMES, Entry, Space
from kvstored.catalog.leases import Session
from kvstored.errors import NotFound, PermissionDenied
from kvstored.explain.difference import Difference
from kvstored.rpc.context import Context
from kvstored.tiers.base import Record


def tenant_of(session: Session, named: str) -> str:
    """The tenant that a call is about: the caller's, unless an admin names one. Raises PermissionDenied."""
    if named and named != session.caller.tenant and session.caller.role != "admin":
        raise PermissionDenied("naming another tenant needs the role admin")
    return named or session.caller.tenant


def spaces_of(context: Context, session: Session, named: str = "") -> list[Space]:
    """The namespaces that a caller may see: its tenant's; an admin's are all, or those of the tenant that it names.

    Raises PermissionDenied.
    """
    spaces = context.store.parts.catalog.spaces.values()
    if session.caller.role == "admin" and not named:
        return list(spaces)
    tenant = tenant_of(session, named)
    return [space for space in spaces if space.tenant == tenant]


def space_of(context: Context, session: Session, digest: bytes, named: str = "") -> Space:
    """One of them. Raises NotFound, also where it is another tenant's, and PermissionDenied."""
    for space in spaces_of(context, session, named):
        if space.namespace.digest == digest:
            return space
    raise NotFound("no such namespace: `kvstorectl namespaces` lists what there is")


def of_entry(context: Context, entry: Entry) -> pb.BlockInfo:
    """A block in DRAM."""
    return pb.BlockInfo(
        namespace_digest=entry.pool.space.namespace.digest,
        hash=entry.hash,
        parent=entry.parent,
        size_bytes=entry.size_bytes,
        state=STATE_NAMES[entry.state],
        tiers="dram+nvme" if entry.below else "dram",
        holds=entry.holds,
        content_hash=context.store.parts.dram.records.content_hash(entry.slot),
        expires_s=entry.expires_s,
    )


def of_record(space: Space, hash_: bytes, record: Record) -> pb.BlockInfo:
    """A block on NVMe."""
    return pb.BlockInfo(
        namespace_digest=space.namespace.digest,
        hash=hash_,
        parent=record.parent,
        size_bytes=record.size_bytes,
        state="ready",
        tiers="nvme",
        content_hash=record.content_hash,
        expires_s=0.0 if record.expiry is None else record.expiry.expires_s,
    )


def near(space: Space, found: list[Difference]) -> pb.NearNamespace:
    """Another namespace, and how it differs from the one that was asked about."""
    return pb.NearNamespace(
        digest=space.namespace.digest,
        fields=space.namespace.fields,
        differences=[pb.FieldDifference(field=d.field, ours=d.ours, theirs=d.theirs) for d in found],
        dram_blocks=len(space.entries),
    )
