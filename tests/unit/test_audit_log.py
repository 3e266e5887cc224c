import json
import os

import pytest

from kvstored.catalog.leases import Caller
from kvstored.device.append_file import AppendFile
from kvstored.device.state_directory import StateDirectory
from kvstored.errors import ConfigError, DeviceError
from kvstored.tenancy.audit_log import TEXT_MAX, AuditLog
from kvstored.tenancy.refusal_rate import BURST, BURST_ALL, PEERS_MAX, RefusalRate
from kvstored.testing.node import ManualClock

ROOT = Caller("root", "admin", "session", "kvstorectl", 7, 0, "none", "uid 0")


def records(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The thread that writes gets its CPU in the end."""
    monkeypatch.setattr("kvstored.tenancy.audit_log.SETTLE_S", 60.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.jsonl"


# ---- what is written ----


async def test_lines_say_who_did_what_with_what_and_how_it_ended(path):
    log = AuditLog(path, ManualClock())
    log.record("Flush", ROOT, wait_ms=50)
    log.record("start")
    await log.settled()
    first, second = records(path)
    assert (first["seq"], first["act"], first["outcome"], first["with"]) == (1, "Flush", "ok", {"wait_ms": 50})
    assert first["by"] == {
        "tenant": "root",
        "role": "admin",
        "credential": "uid 0",
        "transport": "session",
        "client": "kvstorectl",
        "pid": 7,
        "uid": 0,
    }
    assert first["time"] == "2023-11-14T22:30:00.000+00:00"
    assert second["seq"] == 2
    assert "by" not in second
    assert path.stat().st_mode & 0o777 == 0o600
    log.close()


async def test_numbers_go_on_over_a_restart_and_text_is_cut(path):
    for number in range(2):
        log = AuditLog(path, ManualClock())
        log.record("act", text="x\n" * TEXT_MAX, number=number)
        log.close()  # without waiting for it
    assert [(r["seq"], r["with"]["number"], len(r["with"]["text"])) for r in records(path)] == [
        (1, 0, TEXT_MAX),
        (2, 1, TEXT_MAX),
    ]


async def test_what_cannot_be_written_is_kept_then_counted_and_said_when_it_can(path):
    refuse = True

    def prepare():
        if refuse:
            raise DeviceError("no space left")

    log = AuditLog(path, ManualClock(), prepare, queue_records=2)
    for number in range(5):
        log.record("act", number=number)
        await log.settled()
    assert "no space left" in log.warning
    assert log.counters["audit_lost"] == 3
    refuse = False
    log.close()
    assert [(r["act"], r.get("records")) for r in records(path)] == [("act", None), ("act", None), ("lost", 3)]
    assert not log.warning


async def test_a_reader_gets_the_last_lines_or_those_after_one(path):
    log = AuditLog(path, ManualClock())
    for number in range(5):
        log.record("act", number=number)
    await log.settled()
    assert [json.loads(line)["seq"] for line in log.read(2)] == [4, 5]
    assert [json.loads(line)["seq"] for line in log.read(1000, after=3)] == [4, 5]
    log.close()


# ---- refusals ----


async def test_a_peer_that_is_refused_again_and_again_fills_nothing(path):
    clock = ManualClock()
    log = AuditLog(path, clock)
    for _ in range(1000):
        log.refused("Flush", "uid 5", "needs role admin")
    clock.now += 10
    log.refused("Flush", "uid 5", "needs role admin", ROOT)
    await log.settled()
    found = records(path)
    assert len(found) == BURST + 1
    assert found[-1]["with"] == {"peer": "uid 5", "held_back": 1000 - BURST}
    assert found[-1]["outcome"] == "refused: needs role admin"
    assert log.counters["audit_refusals_held_back"] == 1000 - BURST
    log.close()


def test_many_peers_together_have_a_rate_too_and_are_forgotten():
    clock = ManualClock()
    rate = RefusalRate(clock)
    admitted = [rate.admit(f"10.0.{n >> 8}.{n & 255}") for n in range(2 * PEERS_MAX)]
    assert admitted.count(0) == BURST_ALL
    assert len(rate._peers) == PEERS_MAX


# ---- the file ----


def test_a_file_that_is_full_steps_aside_and_the_oldest_goes(path):
    file = AppendFile(path, file_bytes=20, files=3)
    for number in range(9):
        file.append([b"%09d\n" % number])
    assert [name.name for name in sorted(path.parent.iterdir())] == [path.name, f"{path.name}.1", f"{path.name}.2"]
    assert file.tail(100) == [b"%09d" % number for number in range(4, 9)]
    assert file.tail(3) == [b"%09d" % number for number in range(6, 9)]
    file.close()


def test_a_file_that_was_moved_away_is_begun_anew(path):
    file = AppendFile(path, file_bytes=1000, files=3)
    file.append([b"a\n"])
    path.rename(path.with_name("elsewhere"))
    file.append([b"b\n"])
    assert path.read_bytes() == b"b\n"
    file.close()


def test_a_line_that_a_power_failure_cut_spoils_no_other(path):
    path.write_bytes(b'{"seq":1}\n{"se')
    file = AppendFile(path, file_bytes=1000, files=3)
    file.append([b"a\n"])
    file.append([b"b\n"])
    assert path.read_bytes() == b'{"seq":1}\n{"se\na\nb\n'
    file.close()


def test_what_was_written_in_part_is_taken_back(path, monkeypatch):
    file = AppendFile(path, file_bytes=1000, files=3)
    file.append([b"whole\n"])
    write, given = os.write, []

    def full_after_three(descriptor, data):
        if given:
            raise OSError(28, "No space left on device")
        given.append(data)
        return write(descriptor, data[:3])

    monkeypatch.setattr(os, "write", full_after_three)
    with pytest.raises(DeviceError, match="No space"):
        file.append([b"broken\n"])
    monkeypatch.undo()
    file.append([b"next\n"])
    assert path.read_bytes() == b"whole\nnext\n"
    file.close()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)])
def test_what_is_no_file_of_lines_is_refused(path, make):
    make(path)
    with pytest.raises(DeviceError):
        AppendFile(path, file_bytes=1000, files=3).append([b"a\n"])


# ---- the directory ----


def test_a_state_directory_is_one_daemons_alone(tmp_path):
    mine, others = StateDirectory(tmp_path / "state"), StateDirectory(tmp_path / "state")
    assert mine.read("file") is None
    assert not mine.path.exists()
    mine.replace("file", b"content")
    assert mine.path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="in use by another"):
        others.replace("file", b"other")
    mine.close()
    others.take()
    others.take()
    assert others.read("file") == b"content"
    others.close()
