"""A bump that was acknowledged holds: over kill -9, over memory that is kept, over an index that is made anew."""

import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
from kvstored_client import NamespaceSpec, Outcome

from kvstored.testing.daemon_process import status
from kvstored.testing.kept_daemon import KeptDaemon
from tests.e2e import kept_blocks
from tests.e2e.kept_blocks import BLOCK, SETTINGS, client_of, contents, names
from tests.e2e.raw_client import eventually


@pytest.fixture
def daemon(tmp_path):
    with KeptDaemon(SETTINGS, nvme=True, parent_directory=tmp_path) as running:
        yield running


def put(client, model, prefix, count, **options):
    hashes = names(prefix, count)
    space = client.namespace(NamespaceSpec(model=model))
    return set(client.put(space, hashes, contents(hashes), wait_s=60, **options).outcomes)


def found(client, model, prefix, count):
    return kept_blocks.found(client, NamespaceSpec(model=model), names(prefix, count))


def ctl(daemon, *arguments):
    command = [
        sys.executable,
        "-c",
        "from kvstored_client.ctl import main; main()",
        "--address",
        daemon.address,
        "--timeout",
        "60",
        *arguments,
        "-o",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_was_bumped_stays_out_of_reach_after_kill_9_and_the_rest_is_there(daemon):
    with client_of(daemon) as client:
        assert put(client, "m", "a", 40) == put(client, "kept", "a", 40) == {Outcome.HIT}
    ctl(daemon, "flush")
    ctl(daemon, "epoch", "bump", "--model", "m")
    daemon.kill()
    daemon.start()
    with client_of(daemon) as client:
        assert found(client, "m", "a", 40) == 0
        assert found(client, "kept", "a", 40) == 40
        assert put(client, "m", "a", 10) == {Outcome.HIT}
        daemon.kill()
        daemon.start()
    with client_of(daemon) as client:
        assert found(client, "m", "a", 40) == 10
    (epoch,) = ctl(daemon, "epoch", "ls")["epochs"]
    assert (epoch["tenant"], epoch["model"], epoch["model_version"]) == ("default", "m", "")


def test_an_index_made_anew_does_not_bring_it_back_and_the_room_does_come_back(daemon):
    with client_of(daemon) as client:
        for prefix in "abcdef":  # enough to seal an extent
            assert put(client, "m", prefix, 100, durability="nvme") == {Outcome.HIT}
    ctl(daemon, "epoch", "bump", "--model", "m")
    daemon.kill()
    shutil.rmtree(daemon.nvme_path / "index")
    daemon.start()
    with client_of(daemon) as client:
        assert sum(found(client, "m", prefix, 100) for prefix in "abcdef") == 0
    eventually(lambda: not ctl(daemon, "epoch", "ls")["epochs"][0]["taking_back"], "the room is back")
    assert [tier.blocks for tier in status(daemon.session_socket).tiers] == [0, 0]


@pytest.mark.parametrize("name", ["epochs", "epochs.copy"])
def test_one_damaged_copy_is_made_good_and_two_show_nothing_old(daemon, name):
    with client_of(daemon) as client:
        put(client, "m", "a", 10, durability="nvme")
        put(client, "other", "a", 10, durability="nvme")
    ctl(daemon, "epoch", "bump", "--model", "m")
    daemon.stop()
    path = daemon.nvme_path / name
    whole = path.read_bytes()
    path.write_bytes(b"\0" + whole[1:])
    daemon.start()
    with client_of(daemon) as client:
        assert (found(client, "m", "a", 10), found(client, "other", "a", 10)) == (0, 10)
    daemon.stop()
    assert (daemon.nvme_path / "epochs").read_bytes() == (daemon.nvme_path / "epochs.copy").read_bytes()
    for copy in ("epochs", "epochs.copy"):
        (daemon.nvme_path / copy).write_bytes(os.urandom(64))
    daemon.start()
    with client_of(daemon) as client:
        assert (found(client, "m", "a", 10), found(client, "other", "a", 10)) == (0, 0)
        assert put(client, "m", "a", 2, durability="nvme") == {Outcome.HIT}
    daemon.restart()
    with client_of(daemon) as client:
        assert found(client, "m", "a", 10) == 2


def test_readers_see_nothing_old_from_the_answer_on_while_all_goes_on(daemon):
    """A writer puts the number of the epoch that it knows of: what a reader sees is never two bumps behind."""
    hash_, stop, wrong = names("x", 1), threading.Event(), []
    epoch = [0]

    def write():
        with client_of(daemon) as client:
            space = client.namespace(NamespaceSpec(model="m"))
            while not stop.is_set():
                client.put(space, hash_, [epoch[0].to_bytes(8, "big") * (BLOCK // 8)])

    def read():
        with client_of(daemon) as client:
            space = client.namespace(NamespaceSpec(model="m"))
            while not stop.is_set():
                least = epoch[0]
                with client.get(space, hash_, wait_s=0.1) as blocks:
                    if len(blocks) and int.from_bytes(bytes(blocks[0])[:8], "big") + 1 < least:
                        wrong.append((least, int.from_bytes(bytes(blocks[0])[:8], "big")))

    threads = [threading.Thread(target=work) for work in (write, read, read)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 6):
            ctl(daemon, "epoch", "bump", "--model", "m")
            epoch[0] = number
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
