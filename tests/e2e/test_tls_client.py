"""The Python client over TCP, with TLS: whom it trusts, as whom it is known, and what it never sends in the clear."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from kvstored_client import AsyncClient, Client, NamespaceSpec, Outcome, PagedKV, Refused, Tls, Unavailable

from kvstored.testing.contract_layers import LayersContract
from kvstored.testing.contract_paged import PagedContract, Registered, hashes_of
from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.waiting import PATIENCE_S
from tests.contract.certificates import Authority
from tests.e2e.raw_client import eventually

AUTHORITY = Authority("kvstored test CA")
UNAUTHENTICATED = 16


def token_of(name):
    return f"token of {name}"


def free_port():
    """One that the kernel gives to nobody who asks for any, as a connection to it has just ended; to be named it is."""
    with socket.create_server(("localhost", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            listener.accept()[0].close()  # first: that is the side that the kernel remembers
            assert client.recv(1) == b""
        return listener.getsockname()[1]


class Tcp:
    """A daemon on TCP, and the files of its clients."""

    def __init__(self, directory, **settings):
        self.directory, self.port = directory, free_port()
        self.ca = self.file("ca.pem", AUTHORITY.certificate)
        self.renew(AUTHORITY)
        tenants = [{"name": "root", "uids": [os.getuid()], "role": "admin"}]
        tenants += [
            {"name": name, "tokens_sha256": [hashlib.sha256(token_of(name).encode()).hexdigest()]}
            for name in ("acme", "rival")
        ]
        tenants[1]["role"] = "admin"  # who sees the counters
        tenants.append({"name": "certified", "certificates": settings.pop("certificates", [])})
        server = {
            "server.tcp_address": f"localhost:{self.port}",
            "server.tls_certificate": str(directory / "server.pem"),
            "server.tls_key": str(directory / "server.key"),
        }
        self.daemon = DaemonProcess(
            {**server, "dram.capacity_bytes": "128MiB", "tenants": json.dumps(tenants), **settings}
        )

    def file(self, name, data):
        (self.directory / name).write_bytes(data)
        return self.directory / name

    def renew(self, authority):
        """Another certificate, for the daemon's next start."""
        authority.issue("localhost").server_settings(self.directory)

    def issued(self, common_name, authority=AUTHORITY):
        """A client's certificate."""
        pair = authority.issue(common_name)
        return Tls(
            self.ca, self.file(f"{common_name}.pem", pair.certificate), self.file(f"{common_name}.key", pair.key)
        )

    @property
    def address(self):
        return f"grpc:localhost:{self.port}"

    def client(self, kind=Client, tls=None, **settings):
        tls = tls or Tls(self.ca)
        return kind(self.address, tls=tls, **settings)


@pytest.fixture(scope="module")
def tcp(tmp_path_factory):
    made = Tcp(tmp_path_factory.mktemp("tls"))
    with made.daemon:
        yield made


@pytest.fixture(scope="module")
def mutual(tmp_path_factory):
    """One that asks its clients for a certificate."""
    directory = tmp_path_factory.mktemp("mutual")
    made = Tcp(directory, certificates=["engine-1"], **{"server.tls_client_ca": str(directory / "ca.pem")})
    with made.daemon:
        yield made


class TestInlineOverTls(PagedContract, LayersContract):
    """The contract of paged transfers."""

    @pytest.fixture
    def transfers(self, tcp, request):
        with tcp.client(token=token_of("acme")) as client:
            namespace = client.namespace(NamespaceSpec(model="paged", block_tokens=16, extra=request.node.nodeid))
            yield lambda arrays, axis: Registered(client, namespace, [each.copy(order="K") for each in arrays], axis)


def test_a_token_decides_whose_blocks_these_are(tcp):
    (tcp.directory / "token").write_text(token_of("rival") + "\n")
    with tcp.client(token=token_of("acme")) as acme, tcp.client(token_file=tcp.directory / "token") as rival:
        assert [acme.tenant, rival.tenant] == ["acme", "rival"]
        spec, hashes = NamespaceSpec(model="tokens"), hashes_of(1, 2)
        assert acme.put(acme.namespace(spec), hashes, [b"1" * 5000, b"2" * 5000]).stored == 2
        assert rival.contains(rival.namespace(spec), hashes) == [Outcome.MISS] * 2
        buffers = [bytearray(5000) for _ in hashes]
        assert acme.get_into(acme.namespace(spec), hashes, buffers) == 2
        assert buffers[1] == b"2" * 5000
        assert rival.get_into(rival.namespace(spec), hashes, buffers) == 0
    for token in (None, "nobody's"):
        with tcp.client(token=token) as client:
            assert isinstance(client.connect_error, Refused)
            assert client.connect_error.code == UNAUTHENTICATED
            assert client.put(client.namespace(spec), hashes, [b"1" * 100] * 2).refused == 2


async def test_the_same_in_asyncio(tcp):
    array = np.random.default_rng(1).integers(0, 256, (8, 4096), np.uint8)
    async with tcp.client(AsyncClient, token=token_of("acme")) as client:
        namespace, transfers = client.namespace(NamespaceSpec(model="aio")), client.register(PagedKV(array))
        assert (await transfers.store(namespace, hashes_of(2, 4), range(4))).stored == 4
        assert await transfers.load(namespace, hashes_of(2, 4), range(4, 8)) == 4
        assert transfers.backend == "inline"
        assert (array[4:] == array[:4]).all()


def test_a_daemon_that_cannot_show_who_it_is_gets_nothing(tcp):
    other = tcp.file("other.pem", Authority("another CA").certificate)
    for tls in (Tls(other), Tls()):  # the system's authorities do not know it either
        with tcp.client(tls=tls, token=token_of("acme")) as client:
            assert isinstance(client.connect_error, Unavailable)
            assert "CERTIFICATE_VERIFY_FAILED" in str(client.connect_error)
            assert client.get_into(client.namespace(NamespaceSpec(model="m")), hashes_of(1, 1), [bytearray(8)]) == 0


def test_a_certificate_decides_who_calls(mutual):
    known, unknown = mutual.issued("engine-1"), mutual.issued("engine-2")
    with mutual.client(tls=known) as client:
        assert client.tenant == "certified"
        assert client.put(client.namespace(NamespaceSpec(model="m")), hashes_of(1, 1), [b"x" * 100]).stored == 1
    with mutual.client(tls=known, token=token_of("acme")) as client:
        assert client.tenant == "acme", "who shows a token is meant by it"
    with mutual.client(tls=unknown, token=token_of("acme")) as client:
        assert client.tenant == "acme"
    with mutual.client(tls=unknown) as client:
        assert client.connect_error.code == UNAUTHENTICATED
    stranger = mutual.issued("stranger", Authority("another CA"))
    for tls in (stranger, Tls(mutual.ca)):
        with mutual.client(tls=tls, token=token_of("acme")) as client:
            assert isinstance(client.connect_error, Unavailable)


def test_the_environment_says_it_too(mutual, monkeypatch):
    known = mutual.issued("engine-1")
    for name, path in (("CA", known.ca), ("CERTIFICATE", known.certificate), ("KEY", known.key)):
        monkeypatch.setenv(f"KVSTORED_TLS_{name}", str(path))
    with Client(mutual.address) as client:
        assert client.tenant == "certified"
    command = [sys.executable, "-c", "from kvstored_client.ctl import main; main()"]
    done = subprocess.run([*command, "--address", mutual.address, "health"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.delenv("KVSTORED_TLS_KEY")
    with Client(mutual.address) as client:
        assert "KVSTORED_TLS_CERTIFICATE needs KVSTORED_TLS_KEY" in str(client.connect_error)


def test_files_that_are_renewed_count_at_the_next_connect(tmp_path):
    made = Tcp(tmp_path)
    with made.daemon, made.client(token=token_of("acme")) as client:
        namespace, other = client.namespace(NamespaceSpec(model="renewed")), Authority("the next CA")
        assert client.put(namespace, hashes_of(1, 1), [b"x" * 100]).stored == 1
        made.renew(other)
        made.daemon.restart()
        assert client.put(namespace, hashes_of(2, 1), [b"x" * 100]).refused == 1, "it is not trusted"
        made.file("ca.pem", other.certificate)
        eventually(lambda: client.put(namespace, hashes_of(2, 1), [b"x" * 100]).outcomes == [Outcome.HIT], "it is")


def test_nothing_is_said_in_the_clear():
    """Where a listener speaks no TLS the client's first byte is that of a handshake, and there is no second word."""
    with socket.create_server(("localhost", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        address = f"grpc:localhost:{listener.getsockname()[1]}"
        connecting = threading.Thread(target=lambda: Client(address, token="a secret").__enter__().close())
        connecting.start()
        heard, _ = listener.accept()
        with heard:
            said = heard.recv(1 << 16)
    connecting.join()  # nobody answers
    assert said[0] == 0x16, "a TLS handshake"
    assert b"secret" not in said


def test_what_makes_no_sense_is_told(tcp, tmp_path):
    for wrong in ({"certificate": "c.pem"}, {"key": "c.key"}):
        with pytest.raises(ValueError, match="needs its"):
            Tls(**wrong)
    for address in ("unix:/nonexistent", "grpc:unix:/nonexistent"):
        with pytest.raises(ValueError, match="tls is for an address grpc:HOST:PORT"):
            Client(address, tls=Tls())
    with tcp.client(tls=Tls(tmp_path / "missing.pem")) as client:
        assert "missing.pem for TLS: No such file" in str(client.connect_error)
    with tcp.client(tls=Tls(tcp.file("empty.pem", b"no certificate")), token=token_of("acme")) as client:
        assert isinstance(client.connect_error, Unavailable)
