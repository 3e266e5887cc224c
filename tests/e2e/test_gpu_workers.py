"""When device workers start, and that they start again: by the configuration, on the fake driver."""

import os
import signal
import time

import pytest

from kvstored.testing.daemon_process import DaemonProcess, status
from tests import fakecuda
from tests.e2e.raw_client import eventually

pytestmark = pytest.mark.skipif(bool(fakecuda.MISSING), reason=fakecuda.MISSING)

UUIDS = [(b"fakecuda" + bytes(7) + bytes([ordinal])).hex() for ordinal in range(3)]


def said(daemon):
    """What status says of each GPU."""
    return dict(status(daemon.session_socket).gpus)


def running(daemon, uuids):
    """Whether exactly these devices' workers run, none of them only starting."""
    found = {uuid: text for uuid, text in said(daemon).items() if uuid in UUIDS}
    return found.keys() == set(uuids) and all("copies by" in text for text in found.values())


def workers(daemon):
    return set(fakecuda.workers_of(daemon.pid))


@pytest.fixture
def several(driver, monkeypatch):
    monkeypatch.setenv("FAKECUDA_DEVICES", "3")


@pytest.mark.parametrize("wanted", [UUIDS, UUIDS[1:2]])
def test_workers_start_with_the_daemon_and_start_again(several, wanted):
    settings = {"gpu.start": "now", "dram.capacity_bytes": "64MiB"}
    if len(wanted) < len(UUIDS):
        settings["gpu.devices"] = (
            f"GPU-{wanted[0][:8]}-{wanted[0][8:12]}-{wanted[0][12:16]}-{wanted[0][16:20]}-{wanted[0][20:]}"
        )
    with DaemonProcess(settings) as daemon:
        eventually(lambda: running(daemon, wanted), "all that are wanted run")
        assert len(workers(daemon)) == len(wanted), "and no other"
        before = workers(daemon)
        for worker in before:
            os.kill(worker, signal.SIGKILL)
        eventually(lambda: len(workers(daemon) - before) == len(wanted), "they run again")
        eventually(lambda: running(daemon, wanted), "and say so")
        assert all("2 starts" in said(daemon)[uuid] for uuid in wanted), said(daemon)
        daemon.restart()
        eventually(lambda: running(daemon, wanted), "so they do with the next daemon")


def test_a_worker_that_starts_with_the_daemon_pins_the_tier_before_it_is_needed(several):
    capacity_bytes = 160 << 20
    with DaemonProcess({"gpu.start": "now", "gpu.devices": UUIDS[0], "dram.capacity_bytes": "160MiB"}) as daemon:

        def all_pinned():
            return f", {capacity_bytes} of {capacity_bytes} bytes pinned" in said(daemon).get(UUIDS[0], "")

        eventually(all_pinned, "all of it is")
        (worker,) = workers(daemon)
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: worker not in workers(daemon) and all_pinned(), "so does the one that follows")


def test_a_tier_that_cannot_be_pinned_ahead_is_told(several, monkeypatch):
    monkeypatch.setenv("FAKECUDA_HOSTREG_MAX", str(32 << 20))
    with DaemonProcess({"gpu.start": "now", "gpu.devices": UUIDS[0], "dram.capacity_bytes": "160MiB"}) as daemon:
        eventually(lambda: "not pinned ahead: cuMemHostRegister" in said(daemon).get(UUIDS[0], ""), "it is told")


def test_a_worker_that_cannot_be_had_is_told_and_the_daemon_serves_and_stops(several):
    settings = {"gpu.start": "now", "gpu.devices": f"{UUIDS[0]},{'ab' * 16}", "dram.capacity_bytes": "64MiB"}
    with DaemonProcess(settings) as daemon:
        eventually(lambda: "no device with UUID" in said(daemon).get("ab" * 16, ""), "it is told")
        eventually(lambda: running(daemon, UUIDS[:1]), "the other runs")


def test_without_a_driver_it_is_told_and_the_daemon_serves_and_stops(monkeypatch):
    monkeypatch.setenv("KVSTORED_LIBCUDA", "libcuda-of-nowhere.so.1")
    with DaemonProcess({"gpu.start": "now", "dram.capacity_bytes": "64MiB"}) as daemon:
        eventually(lambda: "cannot be loaded" in str(said(daemon)), "it is told")
        eventually(lambda: not workers(daemon), "the one that looked has gone")


def test_a_daemon_may_stop_while_its_workers_start(several):
    daemon = DaemonProcess({"gpu.start": "now", "dram.capacity_bytes": "64MiB"})
    try:
        for seconds in (0.0, 0.1, 0.4):
            daemon.start()
            time.sleep(seconds)
            before = fakecuda.workers_of(daemon.pid)
            daemon.stop()
            assert not any(fakecuda.is_worker(worker) for worker in before)
    finally:
        daemon.wipe()


def test_by_default_none_starts_before_it_is_used(driver):
    with DaemonProcess({"dram.capacity_bytes": "64MiB"}) as daemon:
        assert not workers(daemon)
        assert "no engine has registered" in said(daemon)["state"]
