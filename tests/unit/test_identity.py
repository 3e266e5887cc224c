import hashlib
import os

import pytest

from kvstored.config_schema import Tenant
from kvstored.errors import Unauthenticated
from kvstored.rpc.identity import Identity

OTHER_UID = 12345


def sha256(token):
    return hashlib.sha256(token.encode()).hexdigest()


TENANTS = [
    Tenant(name="local", uids=[OTHER_UID, os.geteuid()]),
    Tenant(name="remote", tokens_sha256=[sha256("secret"), sha256("old secret")], role="reader"),
    Tenant(name="certified", certificates=["engine-1"], role="admin"),
]


def of_peer(tenants=TENANTS, uid=OTHER_UID, token=""):
    return Identity(tenants).of_peer(uid, 99, token, "engine")


def of_grpc(tenants=TENANTS, token="", certificate="", local=False):
    return Identity(tenants).of_grpc(token, certificate, "engine", local=local)


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
    assert Identity(TENANTS).has_tokens
    assert not Identity(TENANTS[:1]).has_tokens
