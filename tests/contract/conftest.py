"""A daemon on the session socket and its clients, for the modules that want no other."""

import asyncio

import pytest

from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import ACME
from kvstored.testing.contract_transports import SocketClient, opening_request
from kvstored.testing.daemon_in_loop import check_nothing_held, serving


@pytest.fixture
async def daemon(tmp_path):
    """Afterwards nothing may be held."""
    async with serving(tmp_path, SETTINGS) as running:
        yield running
        await asyncio.sleep(0)
        check_nothing_held(running)


@pytest.fixture
async def connect(daemon):
    """Open a session; the arguments are fields of OpenSessionRequest."""
    clients = []

    async def connecting(**fields):
        path = str(daemon.config.server.session_socket)
        clients.append(await SocketClient.connect(path, opening_request(ACME, **fields)))
        return clients[-1]

    yield connecting
    for client in clients:
        await client.end()
