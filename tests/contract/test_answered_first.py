"""A get of what is in DRAM is answered, and its blocks are held, in one turn of the loop: nothing comes between."""

import asyncio

import pytest

from kvstored.catalog.catalog import Catalog
from kvstored.device.outbox import Outbox
from kvstored.rpc import session as session_module
from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import ACME, chain, get, open_namespace
from kvstored.testing.contract_transports import SocketClient, opening_request
from kvstored.testing.daemon_in_loop import check_nothing_held, eventually, serving
from kvstored.testing.frames_client import ConnectionEnded
from kvstored.testing.waiting import PATIENCE_S


@pytest.fixture
async def daemon(tmp_path):
    async with serving(tmp_path, SETTINGS) as running:
        yield running
        await eventually(lambda: not daemon_holds(running))
        check_nothing_held(running)


@pytest.fixture
async def stored(daemon):
    client = await SocketClient.connect(str(daemon.config.server.session_socket), opening_request(ACME))
    namespace, blocks = await open_namespace(client), chain("answered", 3)
    await client.put(namespace, blocks)
    yield client, namespace, blocks
    await client.end()


def daemon_holds(daemon):
    return any(daemon.context.store.held().values())


def entries_of(daemon, blocks):
    spaces = daemon.context.store.parts.catalog.spaces.values()
    return [space.entries[block.hash] for space in spaces for block in blocks if block.hash in space.entries]


async def test_each_get_is_answered_and_then_held_before_the_next_is_served(stored, monkeypatch):
    client, namespace, blocks = stored
    steps = []

    def noted(owner, name, step):
        whole = getattr(owner, name)

        def wrapper(self, *args, **kwargs):
            steps.append(step)
            return whole(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    await get(client, [namespace], blocks)  # so that no descriptors go with those below
    noted(session_module.Connection, "_dispatch", "served")
    noted(Outbox, "send", "answered")
    noted(Catalog, "lease", "held")
    await asyncio.gather(*(get(client, [namespace], blocks) for _ in range(3)))
    assert steps == ["served", "answered", "held"] * 3


async def test_who_cannot_be_sent_the_answer_to_its_get_holds_nothing(daemon, stored, monkeypatch):
    client, namespace, blocks = stored
    monkeypatch.setattr(Outbox, "send", lambda self, frame, fds=(): self._on_gone())
    with pytest.raises(ConnectionEnded):
        await get(client, [namespace], blocks)
    assert [entry.held for entry in entries_of(daemon, blocks)] == [0, 0, 0]
    assert len(list(entries_of(daemon, blocks)[0].pool.order)) == 3


async def test_who_was_answered_what_could_not_be_held_is_parted_with(daemon, stored, monkeypatch):
    client, namespace, blocks = stored

    def lease(self, space, entries):
        raise MemoryError

    monkeypatch.setattr(Catalog, "lease", lease)
    await get(client, [namespace], blocks)
    await asyncio.wait_for(client._wire.ended, PATIENCE_S)
    assert not daemon_holds(daemon)
