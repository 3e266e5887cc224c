"""`kvstored --supervise`, with a stand-in for the daemon that does what the test says."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvstored.descriptor_store import DescriptorStore
from kvstored.supervise import Restarts
from kvstored.testing import process_figures

STAND_IN = Path(__file__).with_name("supervised.py")
TIMEOUT_S = 60


class Life:
    """One life of the stand-in."""

    def __init__(self, connection):
        connection.settimeout(TIMEOUT_S)
        self._stream = connection.makefile("rw")
        connection.close()
        self.hello = self.next()
        self.pid = self.hello["pid"]
        self.inherited = self.hello["inherited"]

    def next(self):
        return json.loads(self._stream.readline())

    def say(self, expression):
        self._stream.write(expression + "\n")
        self._stream.flush()

    def do(self, expression):
        self.say(expression)
        return self.next()["value"]

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def wait_gone(self):
        with contextlib.suppress(ConnectionError):
            assert self._stream.read() == ""


class Supervised:
    """A supervisor as a process, and a socket on which each life of its stand-in says hello."""

    def __init__(self, directory, **options):
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "hello"))
        self._listener.listen()
        self._listener.settimeout(TIMEOUT_S)
        self.temporary = Path(tempfile.mkdtemp(prefix="s-"))  # short, as names of sockets have to be
        arguments = ", ".join(
            f"{name}={value}" for name, value in {"restarts": "Restarts(longest_delay_s=0)", **options}.items()
        )
        program = (
            "import sys; from kvstored.supervise import Restarts, Supervisor; "
            f"sys.exit(Supervisor({[sys.executable, str(STAND_IN), str(directory / 'hello')]}, {arguments}).run())"
        )
        environ = {**os.environ, "TMPDIR": str(self.temporary), "NOTIFY_SOCKET": "/run/further/up"}
        self.process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=environ)

    def life(self):
        return Life(self._listener.accept()[0])

    def signal(self, number):
        self.process.send_signal(number)

    def wait_said(self, text):
        assert any(text in line for line in self.process.stderr)

    def ended(self):
        """Its exit status, and what it wrote."""
        _, said = self.process.communicate(timeout=TIMEOUT_S)
        assert "Traceback" not in said, said
        assert list(self.temporary.iterdir()) == []
        return self.process.returncode, said

    def close(self):
        self._listener.close()
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        shutil.rmtree(self.temporary)


@pytest.fixture
def supervise(tmp_path):
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextlib.closing(Supervised(tmp_path, **options)))


# ---- what is kept ----


def test_what_was_kept_is_there_after_a_kill_again_and_again(supervise):
    supervised = supervise()
    first = supervised.life()
    assert first.inherited == []
    assert "LISTEN_PID" not in first.hello["environment"]
    assert first.do("keep('segment-1', 'bytes of one')")
    assert first.do("keep('segment-2', 'bytes of two')")
    first.kill()
    second = supervised.life()
    assert second.pid != first.pid
    assert second.inherited == ["segment-1", "segment-2"]
    assert second.do("read('segment-1')") == "bytes of one"
    second.do("os.pwrite(inherited['segment-2'], b'BYTES', 0)")
    second.do("manager.keeper.drop('segment-1')")
    assert second.do("keep('segment-3', 'bytes of three')")
    second.kill()
    third = supervised.life()
    assert third.inherited == ["segment-2", "segment-3"]
    assert third.do("read('segment-2')") == "BYTES of two"
    assert third.do("read('segment-3')") == "bytes of three"


def test_thousands_of_descriptors_come_back(supervise):
    supervised = supervise()
    first = supervised.life()
    assert first.do("all(keep(f's{n}', f'bytes {n}') for n in range(2000))")
    first.kill()
    second = supervised.life()
    assert len(second.inherited) == 2000
    assert second.do("all(read(f's{n}') == f'bytes {n}' for n in range(2000))")


def test_each_comes_back_under_its_own_name_whatever_was_dropped_between(supervise):
    supervised = supervise()
    life = supervised.life()
    for generation in range(3):
        assert life.do(
            f"all(keep(f's{{n}}', f'bytes {{n}}') for n in range({20 * generation}, {20 * generation + 40}))"
        )
        assert life.do(f"[manager.keeper.drop(f's{{n}}') for n in range({20 * generation}, {20 * generation + 20})]")
        assert life.do("keep('s999', 'bytes 999')")  # drops go ahead of it
        life.kill()
        life = supervised.life()
        assert len(life.inherited) == 20 + 1
        assert life.do("all(read(name) == f'bytes {name[1:]}' for name in inherited)")


def test_nothing_else_is_inherited(supervise):
    supervised = supervise()
    supervised.life().say("end(1)")
    fds = supervised.life().do("sorted(int(n) for n in os.listdir('/proc/self/fd'))")
    assert len(fds) <= 8, fds  # standard streams, the notify socket, the test's connection, the listing


def test_what_was_said_last_counts(supervise):
    supervised = supervise()
    first = supervised.life()
    first.say("[send_bytes(b'FDSTORE=1\\nFDNAME=last', 1, barrier=False), end(1)]")
    assert supervised.life().inherited == ["last"]


def test_a_further_up_manager_is_not_passed_on(supervise):
    environment = supervise().life()
    assert "NOTIFY_SOCKET" not in environment.hello["environment"], "and the stand-in has taken its own away"


# ---- when it is started again ----


@pytest.mark.parametrize("how", ["end(1)", "os.kill(os.getpid(), 11)"])
def test_a_daemon_that_fails_is_started_again(supervise, how):
    supervised = supervise()
    supervised.life().say(how)
    supervised.life()


@pytest.mark.parametrize("code", [0, 2, 78])
def test_a_daemon_that_ends_otherwise_is_not(supervise, code):
    supervised = supervise()
    supervised.life().say(f"end({code})")
    assert supervised.ended()[0] == code


@pytest.mark.parametrize(("how", "status"), [("end(1)", 1), ("os.kill(os.getpid(), 9)", 137)])
def test_a_daemon_that_dies_too_often_is_given_up(supervise, how, status):
    supervised = supervise(restarts="Restarts(most=2, longest_delay_s=0)")
    for _ in range(3):
        supervised.life().say(how)
    code, said = supervised.ended()
    assert code == status
    assert "too often" in said


def test_a_program_that_is_not_there_is_tried_again_and_given_up(tmp_path):
    program = (
        "import sys; from kvstored.supervise import *; "
        "sys.exit(Supervisor(['/no/such/program'], restarts=Restarts(most=3, longest_delay_s=0)).run())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 1
    assert ended.stderr.count("cannot start /no/such/program") == 4


def test_it_is_tried_again_later_and_later():
    restarts = Restarts(most=6, within_s=100, first_delay_s=1, longest_delay_s=5)
    assert [restarts.delay_s(now) for now in range(7)] == [0, 1, 2, 4, 5, 5, None]
    assert restarts.delay_s(100) is not None, "the first has been forgotten"
    assert restarts.delay_s(1000) == 0, "all have"


def test_a_daemon_whose_loop_is_stuck_is_killed_and_started_again(supervise):
    supervised = supervise(watchdog_s=0.5)
    first = supervised.life()
    assert first.hello["watchdog_s"] == 0.5
    first.say("send('READY=1')")
    second = supervised.life()  # it never says WATCHDOG=1
    assert second.pid != first.pid


def test_a_daemon_that_is_not_ready_yet_has_time(supervise):
    supervised = supervise(watchdog_s=0.1)
    first = supervised.life()
    assert first.do("__import__('time').sleep(0.5)") is None
    assert first.do("os.getpid()") == first.pid


# ---- signals ----


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_every_time(supervise, number):
    supervised = supervise()
    life = supervised.life()
    life.do(f"catch({int(number)})")
    for _ in range(2):
        supervised.signal(number)
        assert life.next() == {"signal": number}
    life.say("end(0)")
    assert supervised.ended()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_that_does_not_catch_signals_yet_ends_in_order_by_one(supervise, number):
    supervised = supervise()
    life = supervised.life()
    life.do(f"default({int(number)})")
    supervised.signal(number)
    life.wait_gone()
    assert supervised.ended()[0] == 0


def test_a_daemon_that_fails_while_it_stops_is_not_started_again(supervise):
    supervised = supervise()
    life = supervised.life()
    life.do(f"catch({int(signal.SIGTERM)}, then_exit=1)")
    supervised.signal(signal.SIGTERM)
    assert supervised.ended()[0] == 1


def test_a_restart_in_order_keeps_what_was_kept_and_counts_as_no_failure(supervise):
    supervised = supervise(restarts="Restarts(most=0)")
    life = supervised.life()
    assert life.do("keep('a', 'bytes')")
    for _ in range(3):
        life.do(f"catch({int(signal.SIGTERM)}, then_exit=0)")
        supervised.signal(signal.SIGHUP)
        assert life.next() == {"signal": signal.SIGTERM}
        life = supervised.life()
        assert life.do("read('a')") == "bytes"


@pytest.mark.parametrize("code", [1, 78])
def test_a_restart_is_refused_where_the_check_before_it_fails(supervise, tmp_path, code):
    script = f"import os, sys; print('never heard'); sys.exit({code} if os.path.exists('{tmp_path}/wrong') else 0)"
    supervised = supervise(check=[sys.executable, "-c", script])
    (tmp_path / "wrong").touch()
    life = supervised.life()
    life.do(f"catch({int(signal.SIGTERM)}, then_exit=0)")
    supervised.signal(signal.SIGHUP)
    supervised.wait_said("restart refused")
    assert life.do("1 + 1") == 2
    (tmp_path / "wrong").unlink()
    supervised.signal(signal.SIGHUP)
    assert life.next() == {"signal": signal.SIGTERM}
    life = supervised.life()
    life.do(f"catch({int(signal.SIGTERM)}, then_exit=0)")
    supervised.signal(signal.SIGTERM)
    assert supervised.ended()[0] == 0


@pytest.mark.parametrize("asked_to", [True, False])
def test_a_daemon_that_refuses_its_next_configuration_costs_nothing_that_was_kept(supervise, asked_to):
    supervised = supervise()
    life = supervised.life()
    assert life.do("keep('a', 'bytes')")
    if asked_to:
        life.do(f"catch({int(signal.SIGTERM)}, then_exit=0)")
        supervised.signal(signal.SIGHUP)
    else:
        life.kill()
    for _ in range(2):
        supervised.life().say("end(78)")
        supervised.wait_said("mend it")
        supervised.signal(signal.SIGHUP)
    life = supervised.life()
    assert life.do("read('a')") == "bytes"
    life.say("end(78)")
    supervised.wait_said("mend it")
    supervised.signal(signal.SIGTERM)
    assert supervised.ended()[0] == 78


def test_a_daemon_that_refuses_its_configuration_during_the_check_of_another_is_tried_again_at_once(supervise):
    script = "import sys, time; print('checking', file=sys.stderr, flush=True); time.sleep(600)"
    supervised = supervise(check=[sys.executable, "-c", script])
    life = supervised.life()
    assert life.do("keep('a', 'bytes')")
    supervised.signal(signal.SIGHUP)
    supervised.wait_said("checking")
    life.say("end(78)")
    assert supervised.life().do("read('a')") == "bytes"


def test_a_daemon_that_dies_during_the_check_is_started_again(supervise):
    script = "import sys, time; print('checking', file=sys.stderr, flush=True); time.sleep(600)"
    supervised = supervise(check=[sys.executable, "-c", script])
    life = supervised.life()
    supervised.signal(signal.SIGHUP)
    supervised.wait_said("checking")
    life.kill()
    life = supervised.life()
    life.do(f"catch({int(signal.SIGTERM)}, then_exit=0)")
    supervised.signal(signal.SIGTERM)
    assert supervised.ended()[0] == 0


def test_a_stop_during_a_restart_is_a_stop_and_no_hurry(supervise):
    supervised = supervise()
    life = supervised.life()
    life.do(f"catch({int(signal.SIGTERM)})")
    supervised.signal(signal.SIGHUP)
    assert life.next() == {"signal": signal.SIGTERM}
    life.do(f"catch({int(signal.SIGINT)}, then_exit=3)")
    supervised.signal(signal.SIGTERM)
    supervised.wait_said("stopping")
    supervised.signal(signal.SIGINT)
    assert life.next() == {"signal": signal.SIGINT}, "the first that asks for the end is what it has been told"
    assert supervised.ended()[0] == 3


def test_a_stop_while_it_waits_to_start_again_ends_it(supervise):
    supervised = supervise(restarts="Restarts(first_delay_s=600, longest_delay_s=600)")
    for _ in range(2):
        life = supervised.life()
        life.say("end(1)")
        life.wait_gone()
    supervised.wait_said('"delay_s": 600')
    supervised.signal(signal.SIGTERM)
    assert supervised.ended()[0] == 1


def test_a_killed_supervisor_takes_its_daemon_along(supervise):
    supervised = supervise()
    life = supervised.life()
    assert life.do("death_signal()") == signal.SIGKILL
    supervised.process.kill()
    life.wait_gone()


def test_what_a_killed_supervisor_left_is_removed_by_the_next_and_what_another_uses_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (used, killed), others = (DescriptorStore(8, print) for _ in range(2)), tmp_path / "kvstored-notify-other"
    others.mkdir()
    killed.socket.close()
    with contextlib.closing(used), contextlib.closing(DescriptorStore(8, print)) as fresh:
        assert set(tmp_path.iterdir()) == {used.path.parent, fresh.path.parent, others}
    assert list(tmp_path.iterdir()) == [others]


def test_what_a_terminal_sends_reaches_the_daemon_once(supervise):
    life = supervise().life()
    assert life.hello["group"] == life.pid


def test_processes_that_the_daemon_left_are_gone_before_the_next_one_starts(supervise):
    supervised = supervise()
    first = supervised.life()
    orphan = first.do("start_orphan()")
    assert os.path.exists(f"/proc/{orphan}")
    first.kill()
    supervised.life()
    assert not os.path.exists(f"/proc/{orphan}")


# ---- nonsense ----


@pytest.mark.parametrize(
    "nonsense",
    [
        "send_bytes(b'')",
        "send_bytes(bytes(range(256)))",
        "send_bytes(b'x' * 60000, 3)",
        "send_bytes(b'FDSTORE=1\\nFDNAME=a:b', 1)",
        "send_bytes(b'FDSTORE=1\\nFDNAME=', 1)",
        "send_bytes(b'FDSTORE=1\\nFDNAME=\\xc3\\xa9', 1)",
        "send_bytes(b'FDSTORE=1\\nFDNAME=a\\x1bb', 1)",
        "send_bytes(b'FDSTORE=1\\nFDNAME=' + b'n' * 256, 1)",
        "send_bytes(b'FDSTORE=1')",
        "send_bytes(b'FDSTOREREMOVE=1\\nFDNAME=none')",
        "send_bytes(b'BARRIER=1')",
        "send_bytes(b'WATCHDOG=trigger\\nREADY=\\nSTATUS=\\xff')",
        "send_bytes(b'X=1', 253)",
    ],
)
def test_nonsense_changes_nothing(supervise, nonsense):
    supervised = supervise()
    life = supervised.life()
    assert life.do("keep('good', 'bytes')")
    before = len(process_figures.descriptors(supervised.process.pid))
    for _ in range(3):
        assert life.do(nonsense)
    assert len(process_figures.descriptors(supervised.process.pid)) == before
    life.kill()
    assert supervised.life().inherited == ["good"]


def test_a_name_by_default_and_several_descriptors_with_one_name(supervise):
    supervised = supervise()
    life = supervised.life()
    life.do("send_bytes(b'FDSTORE=1', 3)")
    life.kill()
    assert supervised.life().inherited == ["stored"]


def test_descriptors_without_end_are_not_taken(supervise):
    supervised = supervise(descriptors_max=16)
    life = supervised.life()
    assert life.do("all(send_bytes(f'FDSTORE=1\\nFDNAME=n{n}'.encode(), 1) for n in range(100))")
    assert life.do("all(send_bytes(b'FDSTORE=1\\nFDNAME=many', 100) for n in range(100))")
    assert len(process_figures.descriptors(supervised.process.pid)) < 16 + 16
    life.kill()
    assert len(supervised.life().inherited) == 16


def test_names_that_would_not_fit_into_an_environment_are_not_taken(supervise):
    supervised = supervise()
    life = supervised.life()
    assert life.do("all(send_bytes(f'FDSTORE=1\\nFDNAME={n:0250}'.encode(), 1) for n in range(600))")
    life.kill()
    assert 400 < len(supervised.life().inherited) < 600


def test_another_process_is_not_listened_to(supervise):
    supervised = supervise()
    life = supervised.life()
    (path,) = supervised.temporary.glob("*/notify")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.connect(str(path))
        fd = os.memfd_create("mine")
        socket.send_fds(other, [b"FDSTORE=1\nFDNAME=foreign"], [fd])
        os.close(fd)
    assert life.do("keep('good', 'bytes')")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.sendto(b"FDSTOREREMOVE=1\nFDNAME=good", str(path))
    assert life.do("keep('more', 'bytes')")
    life.kill()
    assert supervised.life().inherited == ["good", "more"]


# ---- the command ----


def test_the_supervisor_is_small():
    program = "import sys, kvstored.supervise; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    for heavy in ("grpc", "lmdb", "pydantic", "typer", "uvloop", "asyncio", "google.protobuf"):
        assert heavy not in loaded
