"""The recorder: what is on record and what is not, limits, and what it does when it cannot keep up."""

import asyncio
import json
import stat
import threading

import pytest

from kvstored import recorder as module
from kvstored.clock import SystemClock
from kvstored.errors import DeviceError, FailedPrecondition, InvalidArgument
from kvstored.policy import recording
from kvstored.policy.trace import parse, parse_calls
from kvstored.recorder import Recorder


class Space:
    def __init__(self, tenant, digest, tokens="16"):
        self.tenant, self.digest = tenant, digest
        self.namespace = type("N", (), {"fields": {"block_tokens": tokens}})()


class Session:
    def __init__(self, name):
        self.session_id = name


ACME, RIVAL = Space("acme-corp", b"a" * 16), Space("rival-inc", b"r" * 16, "")
ONE = Session(b"session-one-id")


def names(*numbers):
    return [f"secret-hash-{number:04}".encode() for number in numbers]


def make(directory, **options):
    return Recorder(directory, SystemClock(), **{"size_bytes_max": 1 << 20, "seconds_max": 60.0, **options})


def text_of(path):
    with open(path) as file:
        return list(file)


def lines_of(path):
    return [json.loads(line) for line in text_of(path)]


async def test_what_was_called_is_read_back_as_calls(tmp_path):
    recorder = make(tmp_path / "traces")
    path = (await recorder.start()).path
    recorder.looked_up(ONE, [ACME], names(1, 2), 0)
    recorder.got(ONE, [ACME], names(1, 2, 3), 1)
    recorder.put(ONE, ACME, names(2, 3), names(1)[0], 2000)
    recorder.put(ONE, ACME, names(4), names(3)[0], 1000)
    recorder.got(ONE, [ACME, RIVAL], names(1, 2), 2)
    ended = await recorder.stop()
    assert (ended.active, ended.calls, ended.dropped_calls, ended.ended) == (False, 5, 0, "stopped")
    assert ended.size_bytes == (tmp_path / "traces").joinpath(path).stat().st_size
    got, put, more, again, other = parse_calls(text_of(path))
    assert (len(got.ids), got.found, got.gets, got.puts) == (3, 1, True, False)
    assert (put.ids, put.start, put.after, put.size_bytes) == (got.ids, 1, 0, 2000)
    assert (more.ids[:3], len(more.ids), more.start, more.after) == (got.ids, 4, 3, -1)
    assert again.ids == got.ids[:2]
    assert not set(other.ids) & set(got.ids)
    assert got.t_ms <= put.t_ms <= other.t_ms


async def test_nothing_that_identifies_anybody_is_in_the_file(tmp_path):
    recorder = make(tmp_path)
    path = (await recorder.start()).path
    assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o600
    recorder.got(ONE, [ACME], names(1, 2), 1)
    recorder.got(ONE, [RIVAL], names(1, 2), 1)
    await recorder.stop()
    data = (tmp_path / path).read_bytes()
    for secret in (b"acme", b"rival", b"secret", b"session-one", b"aaaa", *names(1, 2)):
        assert secret not in data
    calls = [line for line in lines_of(path) if line.get("kind")]
    assert calls[0]["keys"] != calls[1]["keys"], "equal hashes of two tenants look alike"
    spaces = [line for line in lines_of(path) if line.get("namespace")]
    assert [(one["namespace"], one["tenant"], one.get("block_tokens", 0)) for one in spaces] == [(1, 1, 16), (2, 2, 0)]


async def test_keys_of_two_recordings_have_nothing_in_common(tmp_path):
    recorder, found = make(tmp_path), []
    for _ in range(2):
        path = (await recorder.start()).path
        recorder.got(ONE, [ACME], names(1), 1)
        await recorder.stop()
        found.append(next(line["keys"] for line in lines_of(path) if "kind" in line))
    assert found[0] != found[1]


async def test_it_ends_by_itself_at_its_size_and_after_its_time(tmp_path):
    recorder = make(tmp_path)
    for limits, why in (({"size_bytes": 4096}, "size"), ({"seconds": 0.001}, "time")):
        path = (await recorder.start(**limits)).path
        for number in range(200):
            recorder.got(ONE, [ACME], names(number), 0)
        async with asyncio.timeout(60):
            while recorder.on:  # noqa: ASYNC110 - a thread of its own turns it off
                await asyncio.sleep(0.01)
        ended = await recorder.stop()
        assert (ended.active, ended.ended) == (False, why)
        assert lines_of(path)[-1] == {"ended": why}
        assert ended.size_bytes < 4096 + 300 or why == "time"


@pytest.mark.parametrize("limits", [{"seconds": -1.0}, {"seconds": float("nan")}, {"size_bytes": 1}])
async def test_a_limit_that_is_none_is_refused(tmp_path, limits):
    recorder = make(tmp_path)
    with pytest.raises(InvalidArgument):
        await recorder.start(**limits)
    assert not list(tmp_path.iterdir())


async def test_one_at_a_time(tmp_path):
    recorder = make(tmp_path)
    await recorder.start()
    with pytest.raises(FailedPrecondition, match="already"):
        await recorder.start()
    await recorder.stop()


async def test_what_the_writer_cannot_keep_up_with_is_counted_and_on_record(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(module._Encoder, "_keys", lambda self, tenant, hashes: (go.wait(), b"")[1])
    recorder = make(tmp_path, queue_blocks=3)
    path = (await recorder.start()).path
    for _ in range(5):
        recorder.got(ONE, [ACME], names(1), 0)
    go.set()
    ended = await recorder.stop()
    assert ended.dropped_calls >= 1
    assert ended.calls + ended.dropped_calls == 5
    assert sum(line.get("dropped", 0) for line in lines_of(path)) == ended.dropped_calls


async def test_a_file_that_cannot_be_made_leaves_it_off(tmp_path):
    (tmp_path / "traces").write_text("no directory")
    recorder = make(tmp_path / "traces")
    with pytest.raises(DeviceError):
        await recorder.start()
    assert not recorder.on
    assert recorder.status().path == ""


def test_a_recording_that_was_cut_is_read_as_far_as_it_goes():
    whole = ['{"kvstored_recording": 1}\n', '{"kind":"get","namespaces":[1],"keys":"AAAAAAAAAAE="}\n', '{"kind":"ge']
    assert list(parse(whole)) == [[1 << 64 | 1]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"kvstored_recording": 2}\n'], "format 2"),
        (['{"kvstored_recording": 1}\n', "hello\n"], "line 2"),
        (['{"kvstored_recording": 1}\n', '{"kind":"get","namespaces":[1],"keys":"AAA="}\n'], "line 2"),
        (['{"kvstored_recording": 1}\n', '{"kind":"put","namespaces":[],"keys":""}\n'], "line 2"),
    ],
)
def test_a_recording_that_makes_no_sense_is_refused_by_its_line(lines, message):
    with pytest.raises(ValueError, match=message):
        list(parse_calls(lines))


def test_a_block_that_is_asked_for_twice_in_one_call_is_used_once():
    lines = [
        '{"kvstored_recording": 1}\n',
        '{"kind":"get","namespaces":[0],"keys":"AAAAAAAAAAEAAAAAAAAAAQ==","found":2}\n',
    ]
    (call,) = parse_calls(lines)
    assert (call.ids, call.found) == ([1], 1)


def test_keys_are_packed_and_unpacked():
    assert recording.unpack(recording.pack(bytes(range(16)))) == [0x0001020304050607, 0x08090A0B0C0D0E0F]
