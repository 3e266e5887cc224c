"""Requests that ask for what is another tenant's, made from the schema: whatever field names something, by that.

A field that is not listed here is a KeyError: say below what of another tenant it could name, or that it
names nothing.
"""

import itertools
import re

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from kvstored_proto import frames
from kvstored_proto.v1 import admin_pb2
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.contract_client import HASH_BYTES, spec

SERVICES = [pb.DESCRIPTOR.services_by_name["KVStore"], admin_pb2.DESCRIPTOR.services_by_name["Admin"]]
METHODS = {method.name: method for service in SERVICES for method in service.methods}
OWN_HANDLE = 1  # the walker's own namespace, opened first
PRODUCT_MAX = 64

# Fields that can name something: the values that a walker tries, of `victim`, what another tenant has.
# Beside them it tries what is its own, or nothing.
NAMING = {
    "namespace_id": lambda victim: [OWN_HANDLE, *victim.handles],
    "namespace_ids": lambda victim: [[OWN_HANDLE], [max(victim.handles)], [OWN_HANDLE, max(victim.handles)]],
    "digest": lambda victim: victim.digests,
    "namespace_digest": lambda victim: [b"", *victim.digests],
    "hashes": lambda victim: [b"".join(victim.hashes), b"".join(victim.gone)],
    "hash": lambda victim: [victim.hashes[0], victim.hashes[-1], victim.gone[0]],
    "parent": lambda victim: [b"", victim.hashes[0]],
    "lease_id": lambda victim: victim.lease_ids,
    "lease_ids": lambda victim: [victim.lease_ids],
    "reservation_id": lambda victim: victim.reservation_ids,
    "prefetch_id": lambda victim: victim.prefetch_ids,
    # Numbered per tenant, as leases are; on a machine without a GPU nobody has any.
    "registration_id": lambda victim: [1, *victim.lease_ids],
    "transfer_id": lambda victim: [1],
    "join_group": lambda victim: [b"", victim.group_id],
    "client_id": lambda victim: [b"", victim.client_id],
    "cursor": lambda victim: [b"", *victim.cursors],
    "ids": lambda victim: [victim.segment_ids],
    "name": lambda victim: ["nobody", victim.tenant],
    "tenant": lambda victim: ["nobody", victim.tenant],
    "token_id": lambda victim: ["0" * 16, victim.token_id],
    "fields": lambda victim: [{"role": "reader"}],
    "model": lambda victim: ["", *{fields.get("model", "m") for fields in victim.spec_fields}],
    "purge_id": lambda victim: ["", victim.purge_id],
    "session_id": lambda victim: ["0" * 16, victim.session_ids[0].hex(), victim.session_ids[0].hex()[:8]],
}
# Fields that name nothing of anybody's, and what stands in them.
PLAIN = {
    "hash_bytes": HASH_BYTES,
    "indices": [0],
    "staging_offsets": [0],
    "streamed": None,
    "progress_offset": None,
    "block_bytes": 4096,
    "sizes_bytes": None,
    "durability": None,
    "ttl_ms": None,
    "sliding_ttl": None,
    "wait_ms": None,
    "priority": None,
    "prefill_tokens_per_s": 1000.0,
    "prefetch": True,
    "prefetch_deadline_ms": None,
    "limit": None,
    "near_max": None,
    "resume": None,  # of Drain; the message of OpenSession is taken apart
    "create_group": None,
    "features": ["groups", "prefetch", "session_page", "durability"],
    "protocol_min": frames.PROTOCOL_MIN,
    "protocol_max": frames.PROTOCOL_MAX,
    "client_name": "walker",
    "client_version": None,
    "staging_bytes": None,
    "token": None,  # who walks says by which
    "size_bytes": 8,
    "reset": None,
    "label": None,
    "after": None,
    "expires_in_s": None,
    "grace_s": None,
    "model_version": None,
    "older_than_ms": None,
    "dry_run": True,  # of all tenants an admin may purge, and what a walker has would go too
    "deadline_ms": None,
    "chunk": None,
    "size_limit_bytes": None,  # of a recording
    "time_limit_s": None,
    "eviction": "lru",
    "soft_pin_ms": 1000,
    "hard_pin_ms": 1000,
    "continues": None,
    "final": None,
    "unpin": None,
    "block_ids": bytes(4),
    "device_uuid": bytes(16),
    "ipc_handle": bytes(64),
    "not_exportable": "",
    "memory_number": 1,
    "chunk_bytes": None,
    "offset": None,
    "stride": None,
    "region": None,
    "probe": None,
    "probe_end": None,
    "done_word": None,
    "layer_fragments": None,
    "first_layer": None,
    "layers": None,
    "layers_word": None,
    "by_layers": None,
    "blocks": 1,
}


def requests_of(method, victim):
    """Every combination of what the request's fields can name."""
    kind = message_factory.GetMessageClass(method.input_type)
    return [kind(**fields) for fields in itertools.islice(_combinations(method.input_type, victim), PRODUCT_MAX)]


def _combinations(descriptor, victim):
    choices = {field.name: _choices(field, victim) for field in descriptor.fields}
    for values in itertools.product(*choices.values()):
        yield {name: value for name, value in zip(choices, values, strict=True) if value is not None}


def _choices(field, victim):
    if field.message_type is pb.NamespaceSpec.DESCRIPTOR:
        return [spec(**fields) for fields in victim.spec_fields]
    if field.name in NAMING:
        return NAMING[field.name](victim)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        kind = message_factory.GetMessageClass(field.message_type)
        made = [kind(**fields) for fields in _combinations(field.message_type, victim)]
        return [[each] for each in made] if field.label == FieldDescriptor.LABEL_REPEATED else made
    assert field.name in PLAIN, f"say in {__name__} how to walk {field.full_name}"
    return [PLAIN[field.name]]


# ---- answers ----

# What differs between two daemons, or between two sessions of one, whatever others have.
VOLATILE = {
    *("boot_id", "session_id", "group_id", "uptime_s", "age_s"),
    "kvstored.v1.SessionStatus.id",
    # How busy the device and the memory are, as the time of every call tells it.
    *(f"kvstored.v1.LookupReply.{name}" for name in ("load_s", "paying_blocks")),
    *("begun_s", "duration_s", "purge_id"),
    *(f"kvstored.v1.TraceReply.{name}" for name in ("path", "seconds", "size_bytes", "calls")),
}
_TIMES = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+:\d]*")


def comparable(reply):
    """A reply without what is volatile; segment ids become their order of appearance."""
    seen = {}
    copy = type(reply)()
    copy.CopyFrom(reply)
    _scrub(copy, seen)
    return _TIMES.sub("<time>", str(copy))


def _scrub(message, seen):
    for field, value in message.ListFields():
        if field.name in VOLATILE or field.full_name in VOLATILE:
            message.ClearField(field.name)
        elif field.full_name == "kvstored.v1.Lease.slots":
            message.slots = _renumbered(value, seen)
        elif isinstance(value, Message):
            _scrub(value, seen)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and not field.message_type.GetOptions().map_entry:
            for each in value:
                _scrub(each, seen)


def _renumbered(slots, seen):
    renumbered = bytearray()
    for at in range(0, len(slots), 8):
        number = int.from_bytes(slots[at : at + 8], "little")
        segment = seen.setdefault(number >> frames.SLOT_INDEX_BITS, len(seen))
        index = number & ((1 << frames.SLOT_INDEX_BITS) - 1)
        renumbered += (segment << frames.SLOT_INDEX_BITS | index).to_bytes(8, "little")
    return bytes(renumbered)
