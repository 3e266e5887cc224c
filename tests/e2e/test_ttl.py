"""TTLs as a client asks for them, over kill -9, kept memory, and an index that is made anew."""

import shutil
import time

import pytest
from kvstored_client import NamespaceSpec, Outcome

from kvstored.testing.daemon_process import status
from kvstored.testing.kept_daemon import KeptDaemon
from tests.e2e import kept_blocks
from tests.e2e.kept_blocks import BLOCK, SETTINGS, client_of, contents, names
from tests.e2e.raw_client import eventually

SPEC = NamespaceSpec(model="m")


@pytest.fixture
def daemon(tmp_path):
    with KeptDaemon(SETTINGS, nvme=True, parent_directory=tmp_path) as running:
        yield running


def put(client, prefix, count, **terms):
    hashes = names(prefix, count)
    done = client.put(client.namespace(SPEC), hashes, contents(hashes), wait_s=60, **terms)
    assert set(done.outcomes) == {Outcome.HIT}


def found(client, prefix, count, wait_s=60.0):
    return kept_blocks.found(client, SPEC, names(prefix, count), wait_s)


def test_a_ttl_of_a_put_and_of_a_namespace_and_one_that_slides(daemon):
    with client_of(daemon) as client:
        put(client, "short", 4, ttl_s=1.0)
        put(client, "long", 4, ttl_s=3600)
        short = client.namespace(SPEC, ttl_s=1.0)
        client.put(short, names("by-handle", 2), [bytes(BLOCK)] * 2)
        put(client, "slides", 1, ttl_s=4.0, sliding=True)
        end_s = time.monotonic() + 6.0
        while time.monotonic() < end_s:
            assert found(client, "slides", 1) == 1
            time.sleep(0.2)
        assert found(client, "short", 4, 0.0) == 0
        assert client.contains(client.namespace(SPEC), names("by-handle", 2)) == [Outcome.MISS] * 2
        assert found(client, "long", 4) == 4
        eventually(lambda: not found(client, "slides", 1) or time.sleep(4.5), "what is not used ends")
        eventually(lambda: status(daemon.session_socket).tiers[0].blocks == 4, "the room comes back")


@pytest.mark.parametrize("durability", ["memory", "nvme"])
def test_ends_count_over_kill_9_and_a_block_that_is_put_again_lasts(daemon, durability):
    with client_of(daemon) as client:
        put(client, "short", 8, ttl_s=5.0, durability=durability)
        put(client, "long", 8, ttl_s=3600, durability=durability)
        began_s = time.monotonic()
    daemon.kill()
    daemon.start()
    with client_of(daemon) as client:
        assert found(client, "long", 8) == 8
        time.sleep(max(0.0, began_s + 5.0 - time.monotonic()))
        assert found(client, "short", 8, 0.0) == 0
        put(client, "short", 4, durability=durability)
    daemon.kill()
    daemon.start()
    with client_of(daemon) as client:
        assert found(client, "short", 8) == 4
        assert found(client, "long", 8) == 8


def test_an_index_that_is_made_anew_brings_back_nothing_that_has_ended(daemon):
    with client_of(daemon) as client:
        for prefix in "abcdef":  # enough to seal an extent
            put(client, prefix, 100, ttl_s=8.0, durability="nvme")
        began_s = time.monotonic()
        put(client, "kept", 10, durability="nvme")
    daemon.kill()
    shutil.rmtree(daemon.nvme_path / "index")
    daemon.start()
    with client_of(daemon) as client:
        time.sleep(max(0.0, began_s + 8.0 - time.monotonic()))
        assert sum(found(client, prefix, 100, 0.0) for prefix in "abcdef") == 0
        eventually(lambda: status(daemon.session_socket).tiers[1].blocks <= 10, "the sweep takes them")
