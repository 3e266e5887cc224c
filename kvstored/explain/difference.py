"""In which fields two namespaces differ, and which of several is nearest to one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kvstored.keys import Namespace

UNSET: Final = "unset"
VALUE_CHARS_MAX: Final = 80
# Part of the digest, but not of the seed of the hash chains: the shards of one model have the same block hashes.
SHARD_FIELDS: Final = ("tp_rank", "tp_size", "pp_rank", "pp_size", "kv_group", "kv_group_kind", "window_tokens")


class Difference(msgspec.Struct, frozen=True):
    """One field, and its value on either side."""

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field} {_short(self.ours)} / {_short(self.theirs)}"


def differences(ours: Namespace, theirs: Namespace) -> list[Difference]:
    """The fields in which they differ, by name; the tenant is no field."""
    return fields_differ(ours.fields, theirs.fields)


def fields_differ(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[Difference]:
    """The same of fields as `Namespace.fields` has them: those that differ from their default."""
    return [
        Difference(name, ours.get(name, UNSET), theirs.get(name, UNSET))
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]


def told(found: Iterable[Difference]) -> str:
    """All of them in one line: `dtype bf16 / fp16, layout a / b`."""
    return ", ".join(map(str, found))


def same_model(one: Namespace, other: Namespace) -> bool:
    """Whether they name the same model."""
    return one.fields.get("model") == other.fields.get("model")


def shard_of(namespace: Namespace) -> tuple[str | None, ...]:
    """Which part of its model it holds."""
    return tuple(namespace.fields.get(name) for name in SHARD_FIELDS)


def _short(value: str) -> str:
    return value if len(value) <= VALUE_CHARS_MAX else f"{value[: VALUE_CHARS_MAX - 3]}..."
