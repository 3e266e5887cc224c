"""Which thread the kernel runs first: asked for without privilege, and never required."""

import os
import platform
import struct
import threading
from unittest.mock import Mock

import pytest

from kvstored.device import scheduling
from kvstored.tiers.threads import real_pool

LINUX_WITH_SLICES = (6, 12)
SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())


def on_a_thread(initializer, work):
    found = []

    def run():
        initializer()
        found.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def slice_ns():
    attributes = bytearray(48)
    buffer = (scheduling.ctypes.c_char * 48).from_buffer(attributes)
    assert scheduling.ctypes.CDLL(None).syscall(SCHED_GETATTR, 0, buffer, 48, 0) == 0
    return struct.unpack_from("=Q", attributes, 24)[0]


def kernel_has_slices():
    version = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    return SCHED_GETATTR is not None and version >= LINUX_WITH_SLICES


@pytest.mark.skipif(not kernel_has_slices(), reason="slices of threads came with Linux 6.12")
@pytest.mark.parametrize("initializer", [scheduling.compute_in_long_slices, scheduling.give_way])
def test_a_thread_that_computes_asks_for_longer_slices_than_whoever_wakes_beside_it(initializer):
    assert on_a_thread(initializer, slice_ns) == scheduling.LONG_SLICE_NS
    assert slice_ns() < scheduling.LONG_SLICE_NS  # the loop's thread is not touched


@pytest.mark.skipif(not kernel_has_slices(), reason="slices of threads came with Linux 6.12")
@pytest.mark.parametrize("gives_way", [True, False])
def test_every_pool_of_a_volume_computes_in_long_slices(gives_way):
    pool = real_pool(1, "t", gives_way=gives_way)
    try:
        assert pool.submit(slice_ns).result(60) == scheduling.LONG_SLICE_NS
    finally:
        pool.shutdown()


def test_a_long_slice_keeps_the_nice_value_and_the_policy():
    nice = max(7, os.getpriority(os.PRIO_PROCESS, 0) + 1)

    def both():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)

    def nicer():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        scheduling.compute_in_long_slices()

    assert on_a_thread(nicer, both) == (nice, os.SCHED_BATCH)


def test_another_policy_is_left_alone(monkeypatch):
    monkeypatch.setattr(os, "sched_getscheduler", Mock(return_value=os.SCHED_IDLE))
    monkeypatch.setattr(scheduling, "_libc", Mock())
    scheduling.compute_in_long_slices()
    assert not scheduling._libc.syscall.called


def test_a_refusal_is_no_error(monkeypatch):
    monkeypatch.setattr(scheduling, "_libc", Mock(syscall=Mock(return_value=-1)))
    scheduling.compute_in_long_slices()
    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_getscheduler", Mock(side_effect=PermissionError(1, "Operation not permitted")))
        scheduling.compute_in_long_slices()
    monkeypatch.setattr(scheduling, "_SET_ATTRIBUTES", None)  # a machine whose number of the call is not known here
    scheduling.compute_in_long_slices()


def apart_on_a_thread(index, count, work=lambda: None):
    def run():
        with scheduling.apart(index, count):
            return work()

    return on_a_thread(lambda: None, run)


def test_things_that_compute_together_have_cpus_of_their_own_and_all_of_them_afterwards(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5, 7, 11})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: asked.append((pid, set(cpus))))
    for index in range(2):
        apart_on_a_thread(index, 2)
    assert asked == [(0, {2, 5, 11}), (0, {2, 3, 5, 7, 11}), (0, {3, 7}), (0, {2, 3, 5, 7, 11})]


def test_cpus_that_come_meanwhile_are_used_afterwards(monkeypatch):
    cpus, asked = [0, 1], []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus) if pid == os.getpid() else {0})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, given: asked.append(set(given)))
    apart_on_a_thread(0, 2, lambda: cpus.append(2))
    assert asked == [{0}, {0, 1, 2}]


def test_with_fewer_cpus_than_things_they_run_where_they_are_put(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4})
    monkeypatch.setattr(os, "sched_setaffinity", Mock(side_effect=AssertionError))
    apart_on_a_thread(1, 2)


def test_the_main_thread_runs_where_it_is_put(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", Mock(side_effect=AssertionError))
    with scheduling.apart(0, 1):
        pass


def test_where_cpus_may_not_be_chosen_it_computes_all_the_same(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", Mock(side_effect=PermissionError))
    assert apart_on_a_thread(0, 1, lambda: True)


def test_what_fails_apart_gets_its_cpus_back():
    allowed, seen = os.sched_getaffinity(0), []

    def fail():
        with scheduling.apart(0, len(allowed)):
            seen.append(len(os.sched_getaffinity(0)))
            raise ZeroDivisionError

    def run():
        with pytest.raises(ZeroDivisionError):
            fail()
        return os.sched_getaffinity(0)

    assert on_a_thread(lambda: None, run) == allowed
    assert seen == [1]
