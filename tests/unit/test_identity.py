import hashlib
import os

import pytest

from kvstored.config.schema import Tenant
from kvstored.errors import Unauthenticated
from kvstored.rpc.identity import Identity
from kvstored.tenancy.merge import Change, Changes
from kvstored.tenancy.tenants import Tenants
from kvstored.tenancy.tokens import make_token

OTHER_UID = 12345


def sha256(token):
    return hashlib.sha256(token.encode()).hexdigest()


TENANTS = [
    Tenant(name="local", uids=[OTHER_UID, os.geteuid()]),
    Tenant(name="remote", tokens_sha256=[sha256("secret"), sha256("old secret")], role="reader"),
    Tenant(name="certified", certificates=["engine-1"], role="admin"),
]


def of_peer(tenants=TENANTS, uid=OTHER_UID, token=""):
    return Identity(Tenants(tenants)).of_peer(uid, 99, token, "engine")


def of_grpc(tenants=TENANTS, token="", certificate="", local=False):
    return Identity(Tenants(tenants)).of_grpc(token, certificate, "engine", local=local)


# ---- the session socket ----


def test_a_uid_decides_on_the_session_socket():
    caller = of_peer()
    assert (caller.tenant, caller.role, caller.transport) == ("local", "tenant", "session")
    assert (caller.pid, caller.uid, caller.client) == (99, OTHER_UID, "engine")


@pytest.mark.parametrize("token", ["secret", "old secret"])
def test_a_token_decides_over_the_uid(token):
    assert (of_peer(token=token).tenant, of_peer(token=token).role) == ("remote", "reader")


def test_an_unknown_token_is_not_saved_by_a_known_uid():
    with pytest.raises(Unauthenticated, match="token"):
        of_peer(token="secret?")


@pytest.mark.parametrize("uid", [0, 54321])
def test_a_uid_that_no_tenant_names_is_nobody(uid):
    tenants = [Tenant(name="t", uids=[OTHER_UID])]
    with pytest.raises(Unauthenticated, match=f"uid {uid}"):
        of_peer(tenants, uid)


def test_the_hash_of_a_token_is_no_token():
    with pytest.raises(Unauthenticated):
        of_peer(token=sha256("secret"))


@pytest.mark.parametrize(("uid", "isolation"), [(0, "none"), (os.geteuid(), "none"), (OTHER_UID, "ok")])
def test_isolation_is_none_for_root_and_for_the_daemons_own_user(uid, isolation):
    assert of_peer([Tenant(name="t", uids=sorted({0, os.geteuid(), OTHER_UID}))], uid).isolation == isolation


# ---- gRPC ----


def test_a_token_or_a_certificate_decides_on_grpc():
    assert of_grpc(token="secret").tenant == "remote"
    assert (of_grpc(certificate="engine-1").tenant, of_grpc(certificate="engine-1").transport) == ("certified", "grpc")


def test_a_token_decides_over_the_certificate():
    assert of_grpc(token="secret", certificate="engine-1").tenant == "remote"
    with pytest.raises(Unauthenticated):
        of_grpc(token="wrong", certificate="engine-1")


def test_the_daemons_own_socket_speaks_for_the_daemons_user():
    assert of_grpc(local=True).tenant == "local"
    with pytest.raises(Unauthenticated):
        of_grpc([Tenant(name="t", uids=[OTHER_UID + os.geteuid()])], local=True)


@pytest.mark.parametrize("shown", [{}, {"certificate": "engine-2"}, {"certificate": "engine-2", "local": True}])
def test_who_shows_nothing_that_is_known_is_nobody_on_grpc(shown):
    with pytest.raises(Unauthenticated):
        of_grpc(**shown)


def test_it_is_known_whether_tokens_are_in_use():
    assert Identity(Tenants(TENANTS)).has_tokens
    assert not Identity(Tenants(TENANTS[:1])).has_tokens


def test_a_change_of_the_tenants_counts_at_once():
    tenants = Tenants(TENANTS)
    identity = Identity(tenants)
    tenants.become(
        Changes({"remote": Change("remote", removed=True), "fresh": Change("fresh", made=True, fields={"uids": [77]})})
    )
    assert identity.of_peer(77, 99, "", "engine").tenant == "fresh"
    with pytest.raises(Unauthenticated):
        identity.of_peer(OTHER_UID, 99, "secret", "engine")


def test_a_token_that_was_made_counts_until_it_expires():
    now = [100.0]
    token, text = make_token("local", 100.0, expires_s=110.0)
    identity = Identity(Tenants(TENANTS, Changes(tokens={token.token_id: token})), lambda: now[0])
    caller = identity.of_peer(5, 99, text, "engine")
    assert (caller.tenant, caller.credential) == ("local", f"token {token.token_id}")
    assert identity.of_grpc(text, "", "engine", local=False).tenant == "local"
    assert identity.stands(caller)
    with pytest.raises(Unauthenticated, match="not known"):
        identity.of_peer(5, 99, text[:-1] + ("A" if text[-1] != "A" else "B"), "engine")
    now[0] = 110.0
    assert not identity.stands(caller)
    with pytest.raises(Unauthenticated, match="expired"):
        identity.of_peer(5, 99, text, "engine")


@pytest.mark.parametrize(
    ("shown", "change"),
    [
        ({}, {"uids": []}),
        ({}, {"role": "reader"}),
        ({"token": "secret"}, {"tokens_sha256": []}),
        ({"token": "secret"}, {"role": "admin"}),
    ],
)
def test_a_caller_stands_while_what_it_showed_means_the_same(shown, change):
    tenants = Tenants(TENANTS)
    identity = Identity(tenants)
    caller = identity.of_peer(OTHER_UID, 99, shown.get("token", ""), "engine")
    tenants.become(Changes({caller.tenant: Change(caller.tenant, fields={"dram_limit_bytes": 5})}))
    assert identity.stands(caller)
    tenants.become(Changes({caller.tenant: Change(caller.tenant, fields=change)}))
    assert not identity.stands(caller)


def test_certificates_and_the_socket_stand_too():
    tenants = Tenants(TENANTS)
    identity = Identity(tenants)
    certified = identity.of_grpc("", "engine-1", "engine", local=False)
    local = identity.of_grpc("", "", "engine", local=True)
    assert identity.stands(certified)
    assert identity.stands(local)
    tenants.become(Changes({name: Change(name, removed=True) for name in ("certified", "local")}))
    assert not identity.stands(certified)
    assert not identity.stands(local)


def test_a_socket_beside_which_there_were_tokens_is_not_trusted_again():
    tenants = Tenants(TENANTS[:1])
    identity = Identity(tenants)
    token, _ = make_token("local", 0.0)
    tenants.become(Changes(tokens={token.token_id: token}))
    tenants.become(Changes())
    assert identity.has_tokens
