"""The real daemon under `kvstored --supervise`."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstored.testing.daemon_process import status
from tests.e2e.raw_client import eventually

RSS_MAX_KIB = 24 << 10


@pytest.fixture
def supervised(tmp_path):
    """The supervisor and the daemon's session socket."""
    session = tmp_path / "session.sock"
    own = {
        "server.session_socket": session,
        "server.grpc_socket": tmp_path / "grpc.sock",
        "metrics.enabled": "false",
        "dram.capacity_bytes": "16MiB",
    }
    command = [sys.executable, "-m", "kvstored", "--supervise", *(f"--set={key}={value}" for key, value in own.items())]
    config = tmp_path / "config.toml"
    config.touch()
    command.append(f"--config={config}")
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stderr=out, env={**os.environ, "TMPDIR": str(tmp_path)})
    yield process, session
    process.kill()
    process.wait()
    assert "Traceback" not in log.read_text()


def serving_pid(session):
    with contextlib.suppress(OSError):
        reply = status(session)
        return reply.pid if reply.state == "serving" else 0
    return 0


def wait_serving(session, not_pid=0):
    eventually(lambda: serving_pid(session) not in (0, not_pid), "a daemon serves")
    return serving_pid(session)


def rss_kib(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def test_the_daemon_comes_back_after_a_kill_and_ends_in_order(supervised):
    process, session = supervised
    first = wait_serving(session)
    assert first != process.pid
    assert rss_kib(process.pid) < RSS_MAX_KIB < rss_kib(first)
    os.kill(first, signal.SIGKILL)
    second = wait_serving(session, first)
    process.send_signal(signal.SIGHUP)
    third = wait_serving(session, second)
    assert len({first, second, third}) == 3
    process.terminate()
    assert process.wait(100) == 0
    assert not session.exists()


def test_a_restart_for_a_configuration_that_is_wrong_is_refused_and_the_daemon_goes_on(supervised, tmp_path):
    process, session = supervised
    pid = wait_serving(session)
    config = tmp_path / "config.toml"
    config.write_text("no_such_key = 1\n")
    process.send_signal(signal.SIGHUP)
    eventually(lambda: "restart refused" in (tmp_path / "log").read_text(), "it is refused")
    assert "no_such_key" in (tmp_path / "log").read_text()
    assert serving_pid(session) == pid
    config.write_text("[log]\nlevel = 'debug'\n")
    process.send_signal(signal.SIGHUP)
    assert wait_serving(session, pid)
    process.terminate()
    assert process.wait(100) == 0


def test_a_wrong_setting_ends_the_supervisor_too():
    command = [sys.executable, "-m", "kvstored", "--supervise", "--set", "dram.no_such_key=1"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 78
    assert "no_such_key" in ended.stderr
