"""What a client is told that makes no sense: one clear error, where it is told, daemon or no daemon."""

import pytest
from fake_daemon import PATIENT, FakeDaemon
from kvstored_client import AsyncClient, Client, NamespaceSpec, PagedKV, Tls
from kvstored_client.engines.vllm.settings import UnsupportedError, settings_from

SPEC = NamespaceSpec(model="m", block_tokens=4)
HASHES = [b"h" * 32]
NAN = float("nan")


@pytest.mark.parametrize(
    ("told", "error", "says"),
    [
        ({"certificate": "c.pem"}, ValueError, "needs its key"),
        ({"key": "c.key"}, ValueError, "needs its key"),
        ({"certificate": "c.pem", "key": ""}, ValueError, "key is an empty path"),
        ({"certificate": "", "key": "c.key"}, ValueError, "certificate is an empty path"),
        ({"certificate": "", "key": ""}, ValueError, "certificate is an empty path"),
        ({"certificate": ""}, ValueError, "certificate is an empty path"),
        ({"ca": ""}, ValueError, "ca is an empty path"),
        ({"ca": b"-----BEGIN CERTIFICATE-----"}, TypeError, "ca is a bytes"),
        ({"certificate": "c.pem", "key": b"secret"}, TypeError, "key is a bytes"),
    ],
)
def test_files_of_tls_that_are_none(told, error, says):
    with pytest.raises(error, match=says) as raised:
        Tls(**told)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["KVSTORED_TLS_CERTIFICATE", "KVSTORED_TLS_KEY"])
def test_half_a_certificate_in_the_environment_is_said(tmp_path, monkeypatch, name):
    (tmp_path / "file").write_text("PEM")
    other = {"KVSTORED_TLS_CERTIFICATE", "KVSTORED_TLS_KEY"} - {name}
    monkeypatch.setenv(name, str(tmp_path / "file"))
    monkeypatch.setenv(other.pop(), "")
    with Client("grpc:localhost:1", **PATIENT) as client:
        assert "KVSTORED_TLS_CERTIFICATE needs KVSTORED_TLS_KEY" in str(client.connect_error)


@pytest.mark.parametrize("path", ["no\0path", "x" * 5000])
def test_a_path_that_cannot_be_one_is_said_and_raises_nothing(path):
    with Client("grpc:localhost:1", tls=Tls(ca=path), **PATIENT) as client:
        assert "for TLS: " in str(client.connect_error)
    with Client("unix:/nowhere", token_file=path, **PATIENT) as client:
        assert "nowhere" in str(client.connect_error)


def test_a_token_file_that_cannot_be_one_is_a_miss(tmp_path):
    daemon = FakeDaemon(tmp_path)
    with Client(daemon.address, token_file="no\0path", **PATIENT) as client:
        assert "token file" in str(client.connect_error)
        assert client.lookup(client.namespace(SPEC), HASHES).prefix_blocks == 0
    daemon.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("told", "error", "says"),
    [
        ({"address": 7}, TypeError, "address is a int"),
        ({"tls": "ca.pem", "address": "grpc:localhost:1"}, TypeError, "tls is a str"),
        ({"token_file": ""}, ValueError, "token_file is an empty path"),
        ({"token": b"secret"}, TypeError, "token is a bytes"),
        ({"token": "\udcff"}, ValueError, "surrogates"),
        ({"name": 7}, TypeError, "name is a int"),
        ({"join_group": "g"}, TypeError, "join_group is a str"),
        ({"staging_bytes": -1}, ValueError, "staging_bytes is -1"),
        ({"staging_bytes": 1 << 64}, ValueError, "staging_bytes is"),
        ({"staging_bytes": 1e6}, TypeError, "float"),
        ({"timeout_s": 0}, ValueError, "timeout_s is 0"),
        ({"timeout_s": NAN}, ValueError, "timeout_s is nan"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s is inf"),
        ({"connect_timeout_s": -1.0}, ValueError, "connect_timeout_s is -1"),
        ({"connect_timeout_s": "1"}, TypeError, "str"),
    ],
)
def test_settings_that_are_none(kind, told, error, says):
    with pytest.raises(error, match=says) as raised:
        kind(**{"address": "unix:/nowhere", **told})
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_none_is_as_if_it_was_not_given(kind):
    told = dict.fromkeys(("address", "token", "token_file", "tls", "name", "join_group"))
    assert kind(**told)._core.settings == kind()._core.settings


@pytest.fixture(params=[True, False], ids=["daemon", "no daemon"])
def client(request, tmp_path):
    daemon = FakeDaemon(tmp_path)
    daemon.features = ["hints"]
    address = daemon.address if request.param else "unix:/nowhere"
    with Client(address, **PATIENT) as made:
        yield made
    daemon.close()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda c, n, t: c.get(n, HASHES, NAN), ValueError, "wait_s is nan"),
        (lambda c, n, t: c.get_into(n, HASHES, [bytearray(8)], NAN), ValueError, "wait_s is nan"),
        (lambda c, n, t: c.put(n, HASHES, [bytes(8)], wait_s=NAN), ValueError, "wait_s is nan"),
        (lambda c, n, t: c.stage(n, HASHES, 8, wait_s=NAN), ValueError, "wait_s is nan"),
        (lambda c, n, t: c.stage(n, HASHES, 8, wait_s="1"), TypeError, "str"),
        (lambda c, n, t: t.load(n, HASHES, [0], NAN), ValueError, "wait_s is nan"),
        (lambda c, n, t: t.start_load(n, HASHES, [0], NAN), ValueError, "wait_s is nan"),
        (lambda c, n, t: t.store(n, HASHES, [0], wait_s=NAN), ValueError, "wait_s is nan"),
        (lambda c, n, t: t.start_store(n, HASHES, [0], wait_s=NAN), ValueError, "wait_s is nan"),
        (lambda c, n, t: c.put(n, HASHES, [bytes(8)], parent="p"), TypeError, "parent is a str"),
        (lambda c, n, t: c.attach(-1), ValueError, "lease_id is -1"),
        (lambda c, n, t: c.attach("1"), TypeError, "str"),
        (lambda c, n, t: c.cancel_prefetch(1 << 64), ValueError, "prefetch_id is"),
        (lambda c, n, t: c.prefetch(n, HASHES, priority=1 << 31), ValueError, "priority is"),
        (lambda c, n, t: c.prefetch(n, HASHES, priority=0.5), TypeError, "float"),
        (lambda c, n, t: c.hint(n, HASHES, priority="high"), TypeError, "str"),
        (lambda c, n, t: c.hint(n, HASHES, priority=1 << 40), ValueError, "hint priority"),
        (lambda c, n, t: c.hint(n, HASHES, final="yes"), TypeError, "str"),
        (lambda c, n, t: c.hint("n", HASHES, final=True), TypeError, "not a namespace"),
        (lambda c, n, t: c.put(n, HASHES, [bytes(8)], hint={"priority": "high"}), TypeError, "str"),
    ],
)
def test_arguments_that_are_none(client, call, error, says):
    np = pytest.importorskip("numpy")
    transfers = client.register(PagedKV([np.zeros((4, 8), np.uint8)]))
    with pytest.raises(error, match=says):
        call(client, client.namespace(SPEC), transfers)


def test_what_numpy_says_of_a_hint_is_as_good(tmp_path):
    np = pytest.importorskip("numpy")
    daemon = FakeDaemon(tmp_path)
    daemon.features = ["hints"]
    with Client(daemon.address, **PATIENT) as client:
        said = {"priority": np.int64(3), "soft_pin_s": np.float32(1)}
        client.hint(client.namespace(SPEC), HASHES, continues=np.bool_(True), **said)
        assert client.stats.misses_unavailable == 0
        client.put(client.namespace(SPEC), HASHES, [bytes(8)], hint={"final": np.bool_(False), **said})
    daemon.close()


@pytest.mark.parametrize(
    ("told", "variable", "says"),
    [
        ({"address": "grpc:localhost:1"}, "", "shared memory"),
        ({}, "grpc:localhost:1", "shared memory"),
        ({"address": "tcp:localhost:1"}, "", "must be unix:PATH"),
        ({"timeout_s": NAN}, "", "timeout_s is nan"),
    ],
)
def test_settings_of_vllm_that_are_none(told, variable, says, monkeypatch):
    monkeypatch.setenv("KVSTORED_ADDRESS", variable)
    with pytest.raises(UnsupportedError, match=says):
        settings_from(told)
