"""Who is calling: from what a transport knows of its peer to a tenant and a role.

On the session socket a token decides where one is presented, else the uid. gRPC cannot see the
uid: there a token or a client certificate decides, or, on a Unix socket, the socket itself: the
one that the daemon made with mode 0600 speaks for the tenant of the daemon's own user.

A credential's name (`Caller.credential`) says what was shown without being of use to anybody else.
What it means may change while the daemon serves: `stands` tells whether a caller is still who it was.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from time import time
from typing import Final

from kvstored.catalog.leases import Caller
from kvstored.config.schema import Tenant
from kvstored.errors import Unauthenticated
from kvstored.tenancy import tokens
from kvstored.tenancy.tenants import Tenants

DIGEST_SHOWN: Final = 16  # hex digits of a token's digest: enough to tell tokens apart
_SOCKET: Final = "socket"
_UNKNOWN: Final = "the token is not known: check it, or ask for a new one"
_EXPIRED: Final = "the token has expired: ask for a new one"


class Identity:
    """The tenants and how each is recognised."""

    def __init__(self, tenants: Tenants, wall: Callable[[], float] = time) -> None:
        self._tenants = tenants
        self._wall = wall
        self._uid = os.geteuid()
        self._had_tokens = False
        self._learn("")
        tenants.watch(self._learn)

    def _learn(self, _changed: str) -> None:
        tenants = self._tenants
        self._by_uid = {uid: tenant for tenant in tenants for uid in tenant.uids}
        self._by_certificate = {name: tenant for tenant in tenants for name in tenant.certificates}
        self._tokens = [(token, tenant) for tenant in tenants for token in tenant.tokens_sha256]
        self._had_tokens = self._had_tokens or bool(self._tokens or tenants.tokens)

    @property
    def has_tokens(self) -> bool:
        """Whether any tenant is recognised by a token, or was since the daemon started.

        It stays so: a connection that was let in beside tokens must not be trusted when the last is gone.
        """
        return self._had_tokens

    def of_peer(self, uid: int, pid: int, token: str, client: str) -> Caller:
        """A peer of the session socket. Raises Unauthenticated."""
        if token:
            tenant, credential = self._of_token(token)
        else:
            found, credential = self._by_uid.get(uid), f"uid {uid}"
            if found is None:
                raise Unauthenticated(f"uid {uid} is no tenant's: add it to `uids` of a tenant, or use a token")
            tenant = found
        isolation = "none" if uid in (0, self._uid) else "ok"
        return Caller(tenant.name, tenant.role, "session", client, pid, uid, isolation, credential)

    def of_grpc(self, token: str, certificate: str, client: str, *, local: bool) -> Caller:
        """A peer of gRPC; `local`: it came in by the daemon's own Unix socket. Raises Unauthenticated."""
        tenant: Tenant | None
        if token:
            tenant, credential = self._of_token(token)
        elif certificate:
            tenant, credential = self._by_certificate.get(certificate), f"certificate {certificate}"
        else:
            tenant, credential = self._by_uid.get(self._uid) if local else None, _SOCKET
        if tenant is None:
            raise Unauthenticated("this needs a token or a client certificate of a tenant")
        return Caller(tenant.name, tenant.role, "grpc", client, credential=credential)

    def _of_token(self, token: str) -> tuple[Tenant, str]:
        token_id = tokens.id_of(token)
        known = self._tenants.token(token_id)
        if tokens.matches(known, token) and known is not None:
            if known.expired(self._wall()):
                raise Unauthenticated(_EXPIRED)
            tenant = self._tenants.get(known.tenant)
            if tenant is not None:
                return tenant, f"token {token_id}"
        digest = hashlib.sha256(token.encode()).hexdigest()
        # All are compared, in constant time each: neither a match nor its place shows in the time.
        matches = [tenant for configured, tenant in self._tokens if hmac.compare_digest(configured, digest)]
        if not matches:
            raise Unauthenticated(_UNKNOWN)
        return matches[0], f"digest {digest[:DIGEST_SHOWN]}"

    def stands(self, caller: Caller) -> bool:
        """Whether what the caller showed when it came means the same tenant and role now."""
        kind, _, name = caller.credential.partition(" ")
        if kind == "token":
            known = self._tenants.token(name)
            tenant = self._tenants.get(known.tenant) if known and not known.expired(self._wall()) else None
        elif kind == "digest":
            tenant = next((tenant for digest, tenant in self._tokens if digest.startswith(name)), None)
        elif kind == "certificate":
            tenant = self._by_certificate.get(name)
        elif kind in ("uid", _SOCKET):
            tenant = self._by_uid.get(int(name) if name else self._uid)
        else:  # made by hand, without a transport
            return True
        return tenant is not None and (tenant.name, tenant.role) == (caller.tenant, caller.role)
