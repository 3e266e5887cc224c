"""Keys and namespaces as people type them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

from kvstored_proto.namespace import DIGEST_BYTES
from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

from kvstored_client.ctl.connection import Exit, Failure

HASH_BYTES_MIN: Final = 8
HASH_BYTES_MAX: Final = 64
_FIELDS: Final = frozenset(field.name for field in NamespaceSpec.DESCRIPTOR.fields)


def parse_hash(text: str) -> bytes:
    """A block hash from hex. Raises Failure where it is none."""
    raw = _from_hex(text)
    if raw is None or not HASH_BYTES_MIN <= len(raw) <= HASH_BYTES_MAX:
        raise Failure(
            f"{text!r} is not a block hash: {2 * HASH_BYTES_MIN} to {2 * HASH_BYTES_MAX} hex digits", Exit.USAGE
        )
    return raw


def parse_digest(text: str) -> bytes:
    """A namespace digest from hex. Raises Failure where it is none."""
    raw = _from_hex(text)
    if raw is None or len(raw) != DIGEST_BYTES:
        raise Failure(
            f"{text!r} is not a namespace digest: {2 * DIGEST_BYTES} hex digits, see `kvstorectl namespaces`",
            Exit.USAGE,
        )
    return raw


def parse_key(text: str) -> tuple[bytes, bytes]:
    """Namespace digest (empty: not said) and block hash of `HASH` or `NAMESPACE:HASH`."""
    namespace, separator, block = text.rpartition(":")
    return (parse_digest(namespace) if separator else b"", parse_hash(block))


def parse_spec(assignments: Iterable[str]) -> NamespaceSpec:
    """A namespace from `field=value` texts. Raises Failure for unknown fields and wrong values."""
    spec = NamespaceSpec()
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or name not in _FIELDS:
            raise Failure(f"--field {assignment}: must be FIELD=VALUE{_meant(name)}", Exit.USAGE)
        try:
            setattr(spec, name, type(getattr(spec, name))(text))
        except ValueError as error:
            number = "a whole number" if isinstance(getattr(spec, name), int) else "a number"
            raise Failure(f"--field {assignment}: {name} must be {number}", Exit.USAGE) from error
    return spec


def _from_hex(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def _meant(name: str) -> str:
    close = difflib.get_close_matches(name, _FIELDS, n=1) if name not in _FIELDS else []
    return f"; did you mean {close[0]}?" if close else f", with FIELD one of {', '.join(sorted(_FIELDS))}"
