"""What an admin does to tenants and tokens while the daemon serves: checked, kept on disk, then in force.

One change after the other, each a new `Changes` made of the last; what cannot be kept is not done. So
whatever was acknowledged is there after a kill, and what was not is there whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvstored.clock import Clock
from kvstored.config.tenants import Tenant
from kvstored.device.state_directory import StateDirectory
from kvstored.errors import ConfigError, DeviceError, FailedPrecondition, InvalidArgument, LimitExceeded, NotFound
from kvstored.tenancy.file import write_changes
from kvstored.tenancy.merge import Change, Changes, Merged, parse_fields, stored
from kvstored.tenancy.tenants import Tenants, changed_tenant
from kvstored.tenancy.tokens import Token, id_of, make_token

TENANTS_MAX: Final = 4096
TOKENS_MAX: Final = 16384
LABEL_MAX: Final = 64
SECONDS_MAX: Final = 100 * 365 * 86400.0

Plan = Callable[[Changes], Changes]


class TenantChanges:
    """The only one that changes `Tenants`. Every call raises what its docstring says, and then nothing has changed."""

    def __init__(self, tenants: Tenants, state: StateDirectory, clock: Clock) -> None:
        self._tenants = tenants
        self._state = state
        self._clock = clock
        self._one_by_one = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()

    # ---- tenants ----

    async def add(self, name: str, fields: Mapping[str, str]) -> Tenant:
        """A tenant that was not there. Raises InvalidArgument, FailedPrecondition, LimitExceeded or DeviceError."""
        given = parse_fields(fields)

        def plan(changes: Changes) -> Changes:
            if name in self._tenants:
                raise FailedPrecondition(f"there is a tenant {name} already: `set` changes it")
            if name in changes.leaving:
                raise FailedPrecondition(
                    f"the blocks of an earlier tenant {name} are still being taken away: try again in a moment"
                )
            if len(self._tenants) >= TENANTS_MAX:
                raise LimitExceeded(f"there are {TENANTS_MAX} tenants: remove some first")
            configured = self._tenants.configured.get(name)
            change = Change(name, made=configured is None)
            return _with(changes, _with_fields(change, stored(configured, change, given)))

        await self._do(plan)
        return self._present(name)

    async def set(self, name: str, fields: Mapping[str, str], reset: Sequence[str] = ()) -> Tenant:
        """Change fields; those in `reset` are what the configuration says, or their default, again.

        Raises NotFound, InvalidArgument, FailedPrecondition or DeviceError.
        """
        given = parse_fields(fields)
        unknown = [key for key in reset if key not in Tenant.model_fields]
        if unknown or not (fields or reset):
            raise InvalidArgument(f"tenants have no setting {unknown[0]}" if unknown else "nothing to change was given")

        def plan(changes: Changes) -> Changes:
            self._present(name)
            change = changed_tenant(self._tenants, name)
            kept = {key: value for key, value in change.fields.items() if key not in reset}
            change = msgspec.structs.replace(change, fields=kept)
            return _with(changes, _with_fields(change, stored(self._tenants.configured.get(name), change, given)))

        await self._do(plan)
        return self._present(name)

    async def remove(self, name: str) -> None:
        """Its identities count no more, its blocks are to be taken away. Raises NotFound, DeviceError and the like.

        So is one that went with the configuration, and of which changes or tokens are left that count for nothing.
        """

        def plan(changes: Changes) -> Changes:
            if name not in self._tenants.without_configuration:
                self._present(name)
            others = {key: change for key, change in changes.tenants.items() if key != name}
            if name in self._tenants.configured:
                others[name] = Change(name, removed=True)
            tokens = {key: token for key, token in changes.tokens.items() if token.tenant != name}
            return Changes(others, tokens, [*changes.leaving, name])

        await self._do(plan)

    async def left(self, name: str) -> None:
        """Nothing is left of a removed tenant's blocks. Raises DeviceError."""
        await self._do(
            lambda changes: msgspec.structs.replace(changes, leaving=[n for n in changes.leaving if n != name])
        )

    # ---- tokens ----

    async def add_token(self, tenant: str, expires_in_s: float = 0.0, label: str = "") -> tuple[Token, str]:
        """A token for a tenant: its record and, this once, the token. 0 s: it does not expire.

        Raises NotFound, InvalidArgument, LimitExceeded or DeviceError.
        """
        token, text = self._make(tenant, expires_in_s, label)

        def plan(changes: Changes) -> Changes:
            self._present(tenant)
            return _with_tokens(changes, token)

        await self._do(plan)
        return token, text

    async def rotate(self, token_id: str, grace_s: float, expires_in_s: float = 0.0) -> tuple[Token, str]:
        """A token in place of another, which counts for `grace_s` yet (and no longer than it would have).

        0 s: the new one ends when the old one would have. One that has a successor already is not given another,
        unless that was revoked: two would be in its place, and nobody would know of the first.
        Raises NotFound, InvalidArgument, FailedPrecondition, LimitExceeded or DeviceError.
        """
        end_s = self._clock.wall() + _seconds(grace_s, "grace")
        made: list[tuple[Token, str]] = []

        def plan(changes: Changes) -> Changes:
            old = self._known(token_id)
            if self._tenants.token(old.rotated_to) is not None:
                raise FailedPrecondition(
                    f"token {token_id} was rotated already: {old.rotated_to} is in its place: rotate or revoke that one"
                )
            if not expires_in_s and 0 < old.lifetime_end_s <= self._clock.wall():
                raise InvalidArgument(f"token {token_id} has expired: say how long the new one counts (--expires-in)")
            token, text = self._make(old.tenant, expires_in_s, old.label, old.lifetime_end_s)
            made.append((token, text))
            ends = msgspec.structs.replace(
                old,
                expires_s=min(end_s, old.expires_s or end_s),
                rotated_to=token.token_id,
                unrotated_expires_s=old.lifetime_end_s,
            )
            return _with_tokens(changes, token, ends)

        await self._do(plan)
        return made[0]

    async def revoke(self, token_id: str) -> Token:
        """A token counts no more. Raises NotFound, FailedPrecondition or DeviceError."""
        revoked: list[Token] = []

        def plan(changes: Changes) -> Changes:
            revoked.append(self._known(token_id))
            return msgspec.structs.replace(
                changes, tokens={key: token for key, token in changes.tokens.items() if key != token_id}
            )

        await self._do(plan)
        return revoked[0]

    def _make(self, tenant: str, expires_in_s: float, label: str, otherwise_s: float = 0.0) -> tuple[Token, str]:
        """A token that ends after `expires_in_s`; where that is 0 at `otherwise_s`, wall clock (0: never)."""
        if len(label) > LABEL_MAX:
            raise InvalidArgument(f"the label has {len(label)} characters: {LABEL_MAX} are allowed")
        now_s = self._clock.wall()
        expires_s = now_s + _seconds(expires_in_s, "expires-in") if expires_in_s else otherwise_s
        return make_token(tenant, now_s, expires_s=expires_s, label=label)

    # ---- one change ----

    async def _do(self, plan: Plan) -> None:
        """Plan, keep, put in force; to its end, though whoever asked may have left."""
        task = asyncio.ensure_future(self._locked(plan))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.shield(task)

    async def _locked(self, plan: Plan) -> None:
        async with self._one_by_one:
            changes = self._without_old_tokens(plan(self._tenants.changes))
            self._check(self._tenants.merged_with(changes))
            if len(changes.tokens) > TOKENS_MAX:
                raise LimitExceeded(f"there are {TOKENS_MAX} tokens: revoke some first")
            try:
                await asyncio.to_thread(write_changes, self._state, changes)
            except ConfigError as error:  # somebody else's directory
                raise FailedPrecondition(f"the change cannot be kept: {error}") from None
            except DeviceError as error:
                raise DeviceError(f"the change cannot be kept, so it is not made: {error} (server.state_dir)") from None
            self._tenants.become(changes)

    def _without_old_tokens(self, changes: Changes) -> Changes:
        """Where there are too many tokens those go that have expired; whose clock is wrong for a moment keeps them."""
        if len(changes.tokens) <= TOKENS_MAX:
            return changes
        now_s = self._clock.wall()
        tokens = {token_id: token for token_id, token in changes.tokens.items() if not token.expired(now_s)}
        return msgspec.structs.replace(changes, tokens=tokens)

    def _check(self, after: Merged) -> None:
        """Raises FailedPrecondition where nobody could undo the change."""
        now_s = self._clock.wall()
        with_token = {token.tenant for token in after.tokens.values() if not token.expired(now_s)}
        for tenant in after.tenants.values():
            reachable = tenant.uids or tenant.tokens_sha256 or tenant.certificates or tenant.name in with_token
            if tenant.role == "admin" and reachable:
                return
        raise FailedPrecondition("no tenant with the role admin would be left that anybody can be: make another first")

    def _present(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            raise NotFound(f"there is no tenant {name!r}: `kvstorectl tenant ls` shows them")
        return tenant

    def _known(self, token_id: str) -> Token:
        token = self._tenants.token(token_id)
        if token is None and id_of(token_id):
            raise InvalidArgument(
                f"this is a token, of the id {id_of(token_id)}: give the id, and tell nobody the rest"
            )
        if token is None:
            raise NotFound(f"there is no token with the id {token_id!r}: `kvstorectl token ls` shows them")
        return token


def _with(changes: Changes, change: Change) -> Changes:
    return msgspec.structs.replace(changes, tenants={**changes.tenants, change.name: change})


def _with_fields(change: Change, fields: Mapping[str, Any]) -> Change:
    return msgspec.structs.replace(change, fields={**change.fields, **fields})


def _with_tokens(changes: Changes, *tokens: Token) -> Changes:
    return msgspec.structs.replace(changes, tokens={**changes.tokens, **{token.token_id: token for token in tokens}})


def _seconds(seconds: float, what: str) -> float:
    if not 0 <= seconds <= SECONDS_MAX:
        raise InvalidArgument(f"{what} is {seconds:g} s: 0 to 100 years are allowed")
    return seconds
