"""Descriptors kept by a service manager, and what else the daemon tells it."""

import asyncio
import fcntl
import os
import socket
import threading

import pytest

from kvstored.daemon.notify import Notifier
from kvstored.device import service_manager
from kvstored.device.keeper import NoKeeper
from kvstored.device.service_manager import NAMES_BYTES_MAX, NotifyKeeper, NotifySocket, from_environment
from kvstored.testing.daemon_in_loop import eventually
from kvstored.testing.service_manager import FakeServiceManager


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """These managers answer, whenever their threads have a CPU."""
    monkeypatch.setattr(service_manager, "ANSWER_S", 60.0)


@pytest.fixture
def manager():
    with FakeServiceManager(descriptors_max=8) as manager:
        yield manager


@pytest.fixture
def memory():
    fd = os.memfd_create("block", os.MFD_CLOEXEC)
    os.write(fd, b"bytes of a block")
    yield fd
    os.close(fd)


def close(*fds):
    for fd in fds:
        os.close(fd)


def test_what_is_kept_comes_back_under_its_name_and_is_the_same_memory(manager, memory):
    first = manager.managed().keeper
    assert first.inherited() == {}
    assert first.keep("segment-1", memory)
    found = manager.managed().keeper.inherited()
    assert list(found) == ["segment-1"]
    os.pwrite(memory, b"B", 0)
    assert os.pread(found["segment-1"], 16, 0) == b"Bytes of a block"
    close(*found.values())


def test_inherited_descriptors_are_given_once_and_do_not_pass_to_children(manager, memory):
    manager.managed().keeper.keep("a", memory)
    second = manager.managed().keeper
    found = second.inherited()
    assert not os.get_inheritable(found["a"])
    assert second.inherited() == {}
    close(*found.values())


def test_what_was_dropped_does_not_come_back(manager, memory):
    keeper = manager.managed().keeper
    assert keeper.keep("a", memory)
    assert keeper.keep("b", memory)
    keeper.drop("a")
    keeper.drop("never kept")
    assert keeper.keep("c", memory)  # its barrier comes after the drops
    assert sorted(manager.store.held) == ["b", "c"]


def test_an_inherited_descriptor_can_be_dropped(manager, memory):
    manager.managed().keeper.keep("a", memory)
    second = manager.managed().keeper
    close(*second.inherited().values())
    second.drop("a")
    assert second.keep("b", memory)
    assert list(manager.store.held) == ["b"]


def test_a_name_kept_again_stands_for_the_new_descriptor(manager, memory):
    keeper = manager.managed().keeper
    other = os.memfd_create("other")
    assert keeper.keep("a", memory)
    assert keeper.keep("a", other)
    assert len(manager.store.held) == 1
    assert os.fstat(manager.store.held["a"]).st_ino == os.fstat(other).st_ino
    close(other)


def test_a_full_store_keeps_no_more_and_what_is_in_it(manager, memory):
    keeper = manager.managed().keeper
    assert [keeper.keep(f"s{n}", memory) for n in range(10)] == [True] * 8 + [False] * 2
    assert manager.complaints == []
    keeper.drop("s0")
    assert keeper.keep("s9", memory)
    assert len(manager.store.held) == 8


def test_inherited_descriptors_count_towards_the_limit(manager, memory):
    first = manager.managed().keeper
    for n in range(7):
        assert first.keep(f"s{n}", memory)
    second = manager.managed().keeper
    close(*second.inherited().values())
    assert [second.keep(name, memory) for name in ("t0", "t1")] == [True, False]


def test_names_that_no_environment_would_hold_are_not_kept(memory):
    with FakeServiceManager(descriptors_max=10_000) as manager:
        keeper = manager.managed().keeper
        length = 250
        kept = sum(keeper.keep(f"{n:0{length}}", memory) for n in range(NAMES_BYTES_MAX // length + 10))
        assert kept == NAMES_BYTES_MAX // (length + 1) == len(manager.store.held)
        assert manager.complaints == []


def test_kept_from_many_threads_at_once(manager, memory):
    keeper = manager.managed().keeper
    results = []
    threads = [threading.Thread(target=lambda n=n: results.append(keeper.keep(f"s{n}", memory))) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 4 + [True] * 8
    assert len(manager.store.held) == 8


def test_without_a_manager_that_answers_nothing_is_kept(tmp_path, memory, monkeypatch):
    keeper = NotifyKeeper(NotifySocket(str(tmp_path / "nobody")), {}, None)
    assert not keeper.keep("a", memory)
    monkeypatch.setattr(service_manager, "ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as silent:
        silent.bind(str(tmp_path / "silent"))
        stuck = NotifyKeeper(NotifySocket(str(tmp_path / "silent")), {}, None)
        assert not stuck.keep("a", memory)
        asked = [silent.recv(4096).decode().split("\n")[0] for _ in range(3)]
    assert asked == ["FDSTORE=1", "BARRIER=1", "FDSTOREREMOVE=1"], "what is not kept for sure is taken back"


def test_drops_that_the_manager_had_no_time_for_are_sent_later(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(service_manager, "ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as busy:
        busy.bind(str(tmp_path / "busy"))
        notify = NotifySocket(str(tmp_path / "busy"))
        filled = 0
        while notify.send("X=1"):
            filled += 1
        keeper = NotifyKeeper(notify, {}, None)
        keeper.drop("a")
        for _ in range(filled):
            assert busy.recv(4096) == b"X=1"
        keeper.drop("b")
        assert [busy.recv(4096).decode() for _ in "ab"] == [f"FDSTOREREMOVE=1\nFDNAME={name}" for name in "ab"]


# ---- the environment ----


def row_of_two():
    first = max(map(int, os.listdir("/proc/self/fd"))) + 64  # none that a thread opens meanwhile
    for number in (first, first + 1):
        os.dup2(0, number)
    return first


def listening(pid=None, fds="2", names="a:b", **more):
    return {
        "LISTEN_PID": str(os.getpid()) if pid is None else pid,
        "LISTEN_FDS": fds,
        "LISTEN_FDNAMES": names,
        "NOTIFY_SOCKET": "/run/nobody",
        **more,
    }


def is_open(fd):
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def test_nothing_of_it_is_left_in_the_environment():
    first = row_of_two()
    environ = listening(WATCHDOG_USEC="1", WATCHDOG_PID="1", FDSTORE="7", OTHER="x")
    close(*from_environment(environ, first).keeper.inherited().values())
    assert environ == {"OTHER": "x"}


@pytest.mark.parametrize("pid", ["1", "", "x", "-1"])
def test_descriptors_meant_for_another_process_are_not_touched(pid):
    first = row_of_two()
    assert from_environment(listening(pid), first).keeper.inherited() == {}
    assert is_open(first)
    close(first, first + 1)


@pytest.mark.parametrize("fds", ["", "0", "-2", "two", "1" * 40])
def test_a_count_that_makes_no_sense_means_none(fds):
    assert from_environment(listening(fds=fds), 900).keeper.inherited() == {}


def test_of_several_with_one_name_the_last_is_kept_and_the_others_closed():
    first = row_of_two()
    assert from_environment(listening(names="a:a"), first).keeper.inherited() == {"a": first + 1}
    assert not is_open(first)
    close(first + 1)


def test_descriptors_without_a_name_get_one():
    first = row_of_two()
    assert from_environment(listening(names="a"), first).keeper.inherited() == {"a": first, "unknown": first + 1}
    close(first, first + 1)


def test_fewer_descriptors_than_announced_are_those_that_are_there():
    first = row_of_two()
    found = from_environment(listening(fds="4", names="a:b:c:d"), first).keeper.inherited()
    assert found == {"a": first, "b": first + 1}
    close(*found.values())


def test_without_a_manager_descriptors_are_let_go():
    first = row_of_two()
    found = from_environment(listening(NOTIFY_SOCKET=""), first)
    assert isinstance(found.keeper, NoKeeper)
    assert found.notify is None
    assert not is_open(first)


@pytest.mark.parametrize(("pid", "watchdog_s"), [(None, 2.5), ("1", 0.0)])
def test_the_watchdog_is_that_of_this_process(pid, watchdog_s):
    environ = {"NOTIFY_SOCKET": "@nobody", "WATCHDOG_USEC": "2500000", "WATCHDOG_PID": pid or str(os.getpid())}
    assert from_environment(environ).watchdog_s == watchdog_s


def test_an_abstract_address_is_understood():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind("")  # the kernel chooses an abstract one
        address = "@" + server.getsockname()[1:].decode()
        assert NotifySocket(address).send("READY=1")
        assert server.recv(100) == b"READY=1"


# ---- what it is told ----


async def test_the_manager_hears_how_things_go():
    with FakeServiceManager() as manager:
        managed = manager.managed()
        with Notifier(managed.notify, managed.watchdog_s) as notifier:
            notifier.status("two\nlines")
            notifier.ready("serving")
            notifier.stopping("stopping")
            await asyncio.to_thread(manager.wait_told, "EXTEND_TIMEOUT_USEC")
        assert manager.told[:3] == [
            {"STATUS": "two lines"},
            {"READY": "1", "STATUS": "serving"},
            {"STOPPING": "1", "STATUS": "stopping"},
        ]
        assert not any("WATCHDOG" in said for said in manager.told)


async def test_a_loop_that_turns_says_so_again_and_again():
    with FakeServiceManager(watchdog_s=0.02) as manager:
        managed = manager.managed()
        with Notifier(managed.notify, managed.watchdog_s):
            await eventually(lambda: sum("WATCHDOG" in said for said in list(manager.told)) >= 5)


async def test_without_a_manager_nothing_is_told():
    with Notifier(None, 0.0) as notifier:
        notifier.ready("serving")
        notifier.stopping("stopping")
