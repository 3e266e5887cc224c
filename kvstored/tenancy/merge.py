"""What the configuration says of tenants and what admins changed since, merged into one.

* A field that an admin set counts; what was never set comes from the configuration, else it has its default.
* A tenant that an admin made needs no configuration. One that only the configuration makes goes with it:
  what was changed about it, and its tokens, count for nothing while it does not stand there.
* One that an admin removed stays away, whatever the configuration says, until it is added again; and one whose
  name is new in the configuration while what an earlier one left is still being taken away.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, get_origin

import msgspec
from pydantic import ValidationError

from kvstored.config.tenants import Tenant, check_disjoint
from kvstored.errors import InvalidArgument
from kvstored.tenancy.tokens import Token

_SECRET: Final = frozenset({"tokens_sha256"})  # a wrong value there may be the token itself
Check = Callable[[Sequence[Tenant]], None]

_NOT_CHANGED: Final = frozenset({"name"})
_ONLY_CONFIGURED: Final = frozenset({"key_command"})  # who may manage tenants may not run programs as the daemon
FROM_CONFIG: Final = "configuration"
FROM_ADMIN: Final = "admin"
FROM_DEFAULT: Final = "default"


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What admins made of one tenant."""

    name: str
    made: bool = False  # by an admin: it needs no configuration
    removed: bool = False
    fields: dict[str, Any] = {}


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that admins changed: the content of the file of tenants."""

    tenants: dict[str, Change] = {}
    tokens: dict[str, Token] = {}
    leaving: list[str] = []  # removed, and their blocks are still being taken away


class Merged(msgspec.Struct, frozen=True):
    """The tenants that there are, their tokens by id, and what should be said about them."""

    tenants: dict[str, Tenant]
    tokens: dict[str, Token]
    warnings: list[str]
    without_configuration: list[str]  # went with it, and something that admins made of them is left
    checked: dict[str, tuple[Change, Tenant]]  # what became of each change: not checked again while it is the same


def merge(
    configured: Sequence[Tenant], changes: Changes, before: Merged | None = None, check: Check = check_disjoint
) -> Merged:
    """Apply the rules above. Raises InvalidArgument where two would have the same identity, or a field is wrong.

    `check` raises ValueError where tenants do not go together. `before`: what the same configuration and other
    changes made, so that only what differs has to be checked.
    """
    checked = dict(before.checked) if before is not None else {}
    tenants: dict[str, Tenant] = {}
    warnings: list[str] = []
    gone: list[str] = []
    base = {tenant.name: tenant for tenant in configured}
    for name in dict.fromkeys([*base, *changes.tenants, *(token.tenant for token in changes.tokens.values())]):
        change = changes.tenants.get(name, Change(name))
        if change.removed:
            if name in base:
                warnings.append(f"tenant {name} of the configuration stays away: an admin removed it")
        elif name in changes.leaving:  # it was made by an admin then, and stands in the configuration since
            warnings.append(f"tenant {name} stays away until the blocks of an earlier one of this name are taken away")
        elif name in base or change.made:
            known, tenant = checked.get(name, (None, None))
            if tenant is None or known is not change:
                tenant = _apply(base.get(name), change)
            tenants[name] = tenant
            if name in changes.tenants:
                checked[name] = (change, tenant)
        else:
            gone.append(name)
            warnings.append(
                f"changes of tenant {name} count for nothing: it stands in the configuration no more: "
                f"put it back there, or `kvstorectl tenant rm {name}` forgets them and takes its blocks away"
            )
    try:
        check(list(tenants.values()))
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    tokens = {token_id: token for token_id, token in changes.tokens.items() if token.tenant in tenants}
    with_token = {token.tenant for token in tokens.values()}
    warnings += [
        f"nobody can be tenant {tenant.name}: give it uids, certificates or a token"
        for tenant in tenants.values()
        if not (tenant.uids or tenant.certificates or tenant.tokens_sha256 or tenant.name in with_token)
    ]
    checked = {name: one for name, one in checked.items() if name in changes.tenants}
    return Merged(tenants, tokens, warnings, gone, checked)


def _apply(configured: Tenant | None, change: Change) -> Tenant:
    if configured is not None and not change.fields:
        return configured
    given = configured.model_dump(exclude_unset=True) if configured is not None else {}
    return tenant_of({**given, **change.fields, "name": change.name})


def tenant_of(fields: Mapping[str, Any]) -> Tenant:
    """A tenant of these fields; raises InvalidArgument with what is wrong and what would be right."""
    try:
        return Tenant.model_validate(dict(fields))
    except ValidationError as error:
        raise InvalidArgument("; ".join(_problems(error))) from None


def _problems(error: ValidationError) -> Iterable[str]:
    for item in error.errors():
        key = ".".join(map(str, item["loc"]))
        text = item["msg"].removeprefix("Value error, ").replace("Input should", "must")
        if item["type"] == "extra_forbidden":
            yield f"{key}: tenants have no such setting{_did_you_mean(key)}"
        elif not _SECRET.isdisjoint(item["loc"]) or not key:
            yield f"{key}: {text}" if key else text
        else:
            yield f"{key}: {str(item['input'])[:80]!r} {text}"


def _did_you_mean(key: str) -> str:
    close = difflib.get_close_matches(key, Tenant.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else f" (there are: {', '.join(Tenant.model_fields)})"


def parse_fields(given: Mapping[str, str]) -> dict[str, Any]:
    """Fields from text: lists as JSON or items between commas. Raises InvalidArgument; values are checked later."""
    return {key: _parsed(key, text) for key, text in given.items()}


def _parsed(key: str, text: str) -> Any:
    field = Tenant.model_fields.get(key)
    if key in _NOT_CHANGED:
        raise InvalidArgument(f"{key}: it cannot be changed: add another tenant")
    if key in _ONLY_CONFIGURED:
        raise InvalidArgument(f"{key}: it names a program to run, so it stands in the configuration file only")
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:  # also numbers with too many digits, and too deep a nesting
            raise InvalidArgument(f"{key}: not JSON: {error}") from None
    if field is not None and get_origin(field.annotation) is list:
        return [item.strip() for item in text.split(",") if item.strip()]
    return text


def stored(configured: Tenant | None, change: Change, given: Mapping[str, Any]) -> dict[str, Any]:
    """Given fields as plain JSON types, checked beside what else is said of the tenant: what is kept of them.

    Raises InvalidArgument.
    """
    tenant = _apply(configured, msgspec.structs.replace(change, fields={**change.fields, **given}))
    return {key: value for key, value in tenant.model_dump(mode="json").items() if key in given}


def origin_of(field: str, configured: Tenant | None, change: Change | None) -> str:
    """Where a field of a tenant comes from."""
    if change is not None and field in change.fields:
        return FROM_ADMIN
    return FROM_CONFIG if configured is not None and field in configured.model_fields_set else FROM_DEFAULT
