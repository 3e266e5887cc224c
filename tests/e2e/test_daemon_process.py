"""The daemon runner itself: it says why a daemon does not start, and what a process costs."""

import os
import subprocess
import sys

import pytest

from kvstored.testing import process_figures
from kvstored.testing.daemon_process import DaemonFailed, DaemonProcess, status


def test_a_daemon_that_cannot_start_says_why_and_leaves_no_directory(tmp_path):
    daemon = DaemonProcess({"dram.no_such_key": "1"}, parent_directory=tmp_path)
    with pytest.raises(DaemonFailed, match="no_such_key"), daemon:
        pass
    assert not list(tmp_path.iterdir())


def test_a_daemon_serves_restarts_and_leaves_no_directory(tmp_path):
    with DaemonProcess({"dram.capacity_bytes": "64MiB"}, parent_directory=tmp_path) as daemon:
        first = daemon.pid
        assert status(daemon.session_socket).pid == first
        daemon.restart()
        assert status(daemon.session_socket).pid == daemon.pid != first
        assert daemon.cpu_s() > 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(DaemonFailed, match="not running"):
        _ = daemon.pid


def test_cpu_seconds_include_those_of_children():
    spin = "import time\nwhile time.process_time() < 0.3: pass\n"
    before = process_figures.cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", spin], check=True)
    assert process_figures.cpu_s(os.getpid()) - before >= 0.2  # ticks are rounded down


def test_cpu_seconds_include_those_of_a_running_child():
    spin = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ntime.sleep(60)"
    before = process_figures.cpu_s(os.getpid())
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        used = process_figures.cpu_s(os.getpid()) - before
        child.kill()
    assert used >= 0.1  # ticks are rounded down


def test_open_descriptors_are_listed(tmp_path):
    file = tmp_path / "f"
    with file.open("w"):
        assert str(file) in process_figures.descriptors(os.getpid())
    assert str(file) not in process_figures.descriptors(os.getpid())
