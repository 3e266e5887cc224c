"""A whole daemon in this process for fuzzing: requests that make sense, what to change in them, and what must hold."""

import asyncio
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

from kvstored.catalog.catalog import STATE_NAMES
from kvstored.daemon.daemon import Daemon
from kvstored.errors import KVStoredError
from kvstored.rpc import servicers, session
from kvstored.testing.contract import SETTINGS
from kvstored.testing.contract_client import ACME, ROOT, Block, block, hashes_of, open_namespace
from kvstored.testing.contract_transports import SocketClient, opening_request
from kvstored.testing.daemon_in_loop import check_nothing_held, config_in, tenant
from tests.contract.walk import METHODS, requests_of
from tests.fuzz.choices import Choices

BLOCK_BYTES = 4096
END_S = 60.0  # for all that a program started to come to its end
BELOW = 16  # in the first byte of a program: for the daemon with NVMe
LIMIT_BYTES = 12 * BLOCK_BYTES  # of its DRAM: so little that blocks move
STAGING_BYTES = 1 << 16
SMALL = {
    "dram": {"capacity_bytes": 256 * BLOCK_BYTES, "segment_bytes": 16 * BLOCK_BYTES},
    "tenants": [tenant(ACME, dram_limit_bytes=LIMIT_BYTES), tenant(ROOT, role="admin")],
}
CHECK_EVERY = 50  # an honest client is served, and what is stored is removed
FD_GROWTH_MAX = 32
CHAIN = [Block(each.hash, each.data) for each in (block(f"fuzz {i}", BLOCK_BYTES) for i in range(6))]


class Service:
    """The daemon, its loop, and a look at it after each program."""

    def __init__(self, sections=None, *, nvme=False):
        self.loop = asyncio.new_event_loop()
        self.unexpected = []
        self.programs = 0
        self.fds = 0
        self._directory = tempfile.TemporaryDirectory(prefix="fuzz-")
        directory = Path(self._directory.name)
        (directory / "nvme").mkdir()
        limits = {**SETTINGS["limits"], "get_wait_max_s": 0.05, "put_wait_max_s": 0.05}
        settings = {**SETTINGS, "limits": limits, "log": {"level": "error"}, **(sections or {})}
        config = config_in(directory, settings, nvme=nvme)
        self.path = str(config.server.session_socket)
        self.loop.set_exception_handler(self._on_error)
        for module in (session, servicers):
            module.describe = self._described(module.describe)
        self.loop.run_until_complete(self._start(config))

    async def _start(self, config):
        self.daemon = Daemon(config)
        await self.daemon.start()

    def close(self):
        """Stop the daemon, and forget what it left."""
        self.loop.run_until_complete(self.daemon.stop(flush=False))
        self.loop.close()
        self._directory.cleanup()

    def _on_error(self, loop, context):
        self.unexpected.append(context.get("exception") or RuntimeError(context["message"]))

    def _described(self, describe):
        def noted(error):
            if not isinstance(error, KVStoredError):
                self.unexpected.append(error)
            return describe(error)

        return noted

    def run(self, program):
        """Run a coroutine to its end, and look whether all is as before."""
        self.loop.run_until_complete(self._whole(program))

    async def _whole(self, program):
        # Nothing is left of the program before, and its numbers mean nothing: what this one names is what it made.
        self.daemon.context.store.parts.sessions._next_id.clear()
        try:
            await asyncio.wait_for(program, END_S)
        finally:
            self._raise_unexpected()
        self.programs += 1
        await self._given_back()
        if self.programs % CHECK_EVERY == 1:
            await asyncio.wait_for(self._honest(), END_S)
            self._count_descriptors()
        self._raise_unexpected()

    def _raise_unexpected(self):
        unexpected, self.unexpected[:] = list(self.unexpected), []
        for error in unexpected:
            raise error

    async def _given_back(self):
        """Slots come back a moment after who held them has gone, when no thread is at them any more.

        Where there is NVMe, too, when nothing moves for a moment.
        """
        wrong = self.daemon.context.store.quota_audit.check()
        assert not wrong, wrong
        until_s = self.loop.time() + END_S
        while True:
            try:
                check_nothing_held(self.daemon)
                return _check_at_rest(self.daemon.context.store.parts)
            except AssertionError:
                if self.loop.time() >= until_s:
                    raise
            await asyncio.sleep(0.001)

    async def _honest(self):
        drains = self.daemon.context.store.drains
        if self.daemon.context.state == "draining":
            drains.end()
            self.daemon.context.state = "serving"
        client = await SocketClient.connect(self.path, opening_request(ACME))
        namespace = await open_namespace(client, adapter="honest")
        found, wanted = [], [each.data for each in CHAIN]
        while found != wanted:  # where room has to be made first, a put is told to come again
            await client.put(namespace, CHAIN)
            found = await client.read(namespace, hashes_of(CHAIN))
            assert found == wanted[: len(found)]
        await client.end()
        for space in list(self.daemon.context.store.parts.catalog.spaces.values()):
            for entry in list(space.entries.values()):
                if not entry.holds:
                    self.daemon.context.store.parts.room.forget(entry)

    def _count_descriptors(self):
        count = len(os.listdir("/proc/self/fd"))
        self.fds = self.fds or count
        assert count <= self.fds + FD_GROWTH_MAX, f"{count} descriptors, {self.fds} in the beginning"


def _check_at_rest(parts):
    """AssertionError while blocks move between DRAM and NVMe, or where one that did is held still."""
    if parts.below is not None:
        spaces = [*parts.catalog.spaces.values(), *parts.catalog.retired]
        entries = [entry for space in spaces for entry in space.entries.values()]
        held = [(STATE_NAMES[entry.state], entry.holds) for entry in entries if entry.holds]
        assert not held, held
        blocks = parts.dram.usage().blocks
        assert blocks == len(entries), f"{blocks} slots for {len(entries)} blocks"
        assert not any(volume.table.pinned for volume in parts.below.tier._volumes.values())


class Target:
    """A function over bytes: what `program` makes of them, with a daemon of its own."""

    def __init__(self, program, sections=None, *, nvme=False):
        """`sections` of the daemon's configuration."""
        self._service = Service(sections, nvme=nvme)
        self._program = program

    def __call__(self, data):
        self._service.run(self._program(self._service, Choices(data)))

    def close(self):
        """See `Service.close`."""
        self._service.close()


class Both(Target):
    """Programs choose by their first byte between two daemons, one of which has NVMe."""

    def __init__(self, program):
        super().__init__(program)
        self._below = Target(program, SMALL, nvme=True)

    def __call__(self, data):
        if data[:1] and data[0] & BELOW:
            self._below(data)
        else:
            super().__call__(data)

    def close(self):
        super().close()
        self._below.close()


class Own(SimpleNamespace):
    """What the walk asks a victim for. Whatever else it comes to ask for is the id of nothing."""

    def __getattr__(self, name):
        return "0" * 16


# What a client may have: ids are small numbers, so that a program names what it made a moment ago.
OWN = Own(
    handles=[1, 2],
    digests=[bytes(16)],
    hashes=hashes_of(CHAIN),
    gone=[hashes_of([block("never", BLOCK_BYTES)])[0]],
    lease_ids=[1, 2, 3, 4],
    reservation_ids=[1, 2, 3, 4],
    prefetch_ids=[1, 2, 3],
    group_id=bytes(16),
    client_id=b"client",
    cursors=[b"d" + bytes(12), b"n" + bytes(4) + b"\0" + bytes(48)],
    segment_ids=[1, 2],
    session_ids=[bytes(16)],
    tenant=ACME,
    token_id="0" * 16,
    spec_fields=[{}, {"adapter": "other"}],
)


def templates(names):
    """Requests that make sense, by method, in an order that does not change."""
    return {name: requests_of(METHODS[name], OWN)[:16] for name in names}


def opening(who):
    """As a client opens a session, with all that there is to ask for."""
    return opening_request(
        who, staging_bytes=STAGING_BYTES, features=["session_page", "groups", "prefetch", "durability"]
    )
