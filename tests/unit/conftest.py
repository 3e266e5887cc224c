"""A fake daemon, and a client of it, for the tests of the client; a module that wants others has its own."""

import pytest
from fake_daemon import PATIENT, SPEC, STAGING_BYTES, FakeDaemon
from kvstored_client import Client


@pytest.fixture
def daemon(tmp_path):
    fake = FakeDaemon(tmp_path)
    yield fake
    fake.close()


@pytest.fixture
def client(daemon):
    with Client(daemon.address, staging_bytes=STAGING_BYTES, **PATIENT) as made:
        yield made


@pytest.fixture
def namespace(client):
    return client.namespace(SPEC)
