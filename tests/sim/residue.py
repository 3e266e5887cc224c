"""What is left of blocks whose purge says that it is complete: no byte of them may lie anywhere."""

import ctypes

from tests.sim.checks import SPOILING, require
from tests.sim.model import TAG_BYTES

PAGE_BYTES = 4096  # blocks begin there in slots, staging and extents, and each page of theirs names them


def require_none(world, tenant, tags):
    """Memory of the tenant and every file, what is only in the cache of the file system as well."""
    places = [(f"segment {s.segment_id}", _mapped(s.address, s.size_bytes)) for s in _segments(world, tenant)]
    places += [(f"staging of {tenant}", _mapped(s.address_of(0, 1), s.size_bytes)) for s in _stagings(world, tenant)]
    if not world.device.fired.keys() & SPOILING:  # zeros are spoilt as all else is
        for path, content in world.device.disk.contents():
            places += [(f"{path}", content.now), (f"{path}, durably,", content.durable)]
    for where, data in places:
        left = tags.intersection(bytes(data[at : at + TAG_BYTES]) for at in range(0, len(data), PAGE_BYTES))
        require(not left, f"{len(left)} blocks of {tenant} lie in {where} after a complete purge of them")


def _mapped(address, size_bytes):
    return ctypes.string_at(address, size_bytes)


def _segments(world, tenant):
    return [segment for segment in world.node.dram._segments.values() if segment.tenant == tenant]


def _stagings(world, tenant):
    sessions = [session for session in world.node.parts.sessions if session.caller.tenant == tenant]
    return [session.staging for session in sessions if session.staging is not None]
