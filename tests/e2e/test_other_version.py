"""An upgrade and a roll-back: another version's code, started on the memory and the directory that this one left."""

import pytest
from kvstored_client import Client, NamespaceSpec, Outcome

from kvstored.testing.daemon_process import status
from kvstored.testing.kept_daemon import KeptDaemon
from tests.old_code import extract

# The oldest code whose memory and directories this version takes over as they are, and the other way round.
SAME_FORMATS = "f4dd89a"

BLOCK = 64 << 10
SETTINGS = {
    "dram.capacity_bytes": str(64 * BLOCK),
    "dram.segment_bytes": str(1 << 20),
    "dram.huge_pages": "never",
    "limits.staging_bytes_per_session": str(2 << 20),
}


@pytest.fixture
def daemon(tmp_path):
    with KeptDaemon(SETTINGS, nvme=True, parent_directory=tmp_path) as running:
        yield running


def names(prefix):
    return [f"{prefix}-{number:04}".encode().ljust(16, b".") for number in range(8)]


def put(daemon, prefix, durability):
    with Client(daemon.address) as client:
        blocks = [(name * BLOCK)[:BLOCK] for name in names(prefix)]
        result = client.put(
            client.namespace(NamespaceSpec(model="m")), names(prefix), blocks, wait_s=60, durability=durability
        )
        assert set(result.outcomes) == {Outcome.HIT}


def there(daemon, prefix):
    """How many of the blocks are served, each compared with what was put."""
    with (
        Client(daemon.address) as client,
        client.get(client.namespace(NamespaceSpec(model="m")), names(prefix), wait_s=60) as blocks,
    ):
        for name, view in zip(names(prefix), blocks, strict=False):
            assert bytes(view) == (name * BLOCK)[:BLOCK]
        return len(blocks)


def restart_as(daemon, source):
    daemon.kill()
    daemon.source = source
    daemon.start()


def test_what_another_version_left_is_served_and_what_it_is_left_too(daemon, tmp_path):
    other = extract(SAME_FORMATS, tmp_path / "other", "kvstored", "client", "proto")
    restart_as(daemon, other)
    put(daemon, "a", "memory")
    put(daemon, "b", "nvme")
    restart_as(daemon, None)
    assert (there(daemon, "a"), there(daemon, "b")) == (8, 8)
    assert status(daemon.session_socket).counters["dram_adopted_blocks"] == 16
    put(daemon, "c", "memory")
    put(daemon, "d", "nvme")
    restart_as(daemon, other)
    assert [there(daemon, prefix) for prefix in "abcd"] == [8] * 4
    assert status(daemon.session_socket).counters["dram_adopted_blocks"] == 32
