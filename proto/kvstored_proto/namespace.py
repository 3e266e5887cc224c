"""Canonical encoding of a namespace, its digest and the seed of its hash chains.

`proto/README.md` describes it so that another language computes the same, with the test vectors
in `proto/vectors/namespace.json`. In short:

    encoding := b"kvstored.namespace.v1\\0" field*        fields in ascending number
    field    := u16 number | u32 length | value           little endian
    value    := UTF-8 text | u64 | IEEE 754 double (8 bytes)

A field left at its default (empty, 0, 0.0) is omitted, so that a field added later leaves
older digests as they are. Field numbers are those of `NamespaceSpec`; the tenant is field 0.
The digest is the first 16 bytes of SHA-256 over the encoding. The chain seed is the same with
the shard fields (tp_rank, tp_size, pp_rank, pp_size, kv_group, kv_group_kind, window_tokens)
omitted and the prefix b"kvstored.chain.v1\\0": all shards of one model share their block
hashes, and one lookup covers them. The digest, which is part of every key, still keeps them apart.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

DIGEST_BYTES: Final = 16
_SHARD_FIELDS: Final = frozenset(
    {"tp_rank", "tp_size", "pp_rank", "pp_size", "kv_group", "kv_group_kind", "window_tokens"}
)
_FIELDS: Final[list[tuple[int, str]]] = sorted((f.number, f.name) for f in NamespaceSpec.DESCRIPTOR.fields)


def _value(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, float):
        return struct.pack("<d", value)
    assert isinstance(value, int)
    return struct.pack("<Q", value)


def _encode(prefix: bytes, tenant: str, spec: NamespaceSpec, omit: frozenset[str]) -> bytes:
    owner = tenant.encode()
    parts = [prefix, struct.pack("<HI", 0, len(owner)), owner]
    for number, name in _FIELDS:
        value = getattr(spec, name)
        if value and name not in omit:
            raw = _value(value)
            parts += (struct.pack("<HI", number, len(raw)), raw)
    return b"".join(parts)


def encode(tenant: str, spec: NamespaceSpec) -> bytes:
    """The canonical encoding."""
    return _encode(b"kvstored.namespace.v1\0", tenant, spec, frozenset())


def digest(tenant: str, spec: NamespaceSpec) -> bytes:
    """16 bytes that stand for the namespace in every key."""
    return hashlib.sha256(encode(tenant, spec)).digest()[:DIGEST_BYTES]


def chain_seed(tenant: str, spec: NamespaceSpec) -> bytes:
    """16 bytes that start the hash chains of all shards of one model."""
    return hashlib.sha256(_encode(b"kvstored.chain.v1\0", tenant, spec, _SHARD_FIELDS)).digest()[:DIGEST_BYTES]


def fields(spec: NamespaceSpec) -> dict[str, str]:
    """The fields that differ from their default, for people."""
    return {name: str(getattr(spec, name)) for _, name in _FIELDS if getattr(spec, name)}
