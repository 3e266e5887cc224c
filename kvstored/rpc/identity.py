"""Who is calling: from what a transport knows of its peer to a tenant and a role.

On the session socket a token decides where one is presented, else the uid. gRPC cannot see the
uid: there a token or a client certificate decides, or, on a Unix socket, the socket itself: the
one that the daemon made with mode 0600 speaks for the tenant of the daemon's own user.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence

from kvstored.config_schema import Tenant
from kvstored.errors import Unauthenticated
from kvstored.leases import Caller


class Identity:
    """The configured tenants and how each is recognised."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self._by_uid = {uid: tenant for tenant in tenants for uid in tenant.uids}
        self._by_certificate = {name: tenant for tenant in tenants for name in tenant.certificates}
        self._tokens = [(token, tenant) for tenant in tenants for token in tenant.tokens_sha256]
        self._uid = os.geteuid()

    @property
    def has_tokens(self) -> bool:
        """Whether any tenant is recognised by a token."""
        return bool(self._tokens)

    def of_peer(self, uid: int, pid: int, token: str, client: str) -> Caller:
        """A peer of the session socket. Raises Unauthenticated."""
        tenant = self._of_token(token) if token else self._by_uid.get(uid)
        if tenant is None:
            raise Unauthenticated(
                f"uid {uid} is no tenant's: add it to `uids` of a tenant in the daemon's configuration, or use a token"
            )
        isolation = "none" if uid in (0, self._uid) else "ok"
        return Caller(tenant.name, tenant.role, "session", client, pid, uid, isolation)

    def of_grpc(self, token: str, certificate: str, client: str, *, local: bool) -> Caller:
        """A peer of gRPC; `local`: it came in by the daemon's own Unix socket. Raises Unauthenticated."""
        if token:
            tenant: Tenant | None = self._of_token(token)
        elif certificate:
            tenant = self._by_certificate.get(certificate)
        else:
            tenant = self._by_uid.get(self._uid) if local else None
        if tenant is None:
            raise Unauthenticated("this needs a token or a client certificate that a tenant in the configuration names")
        return Caller(tenant.name, tenant.role, "grpc", client)

    def _of_token(self, token: str) -> Tenant:
        digest = hashlib.sha256(token.encode()).hexdigest()
        # All are compared, in constant time each: neither a match nor its place shows in the time.
        matches = [tenant for known, tenant in self._tokens if hmac.compare_digest(known, digest)]
        if not matches:
            raise Unauthenticated("the token is not known: check it, or ask for a new one")
        return matches[0]
