from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message
from kvstored_client import ctl
from kvstored_client.ctl import connection, files
from kvstored_client.ctl.connection import Exit
from kvstored_client.ctl.keys import parse_spec
from kvstored_client.errors import KVStoredClientError, Refused, Timeout, Unavailable
from kvstored_proto import namespace
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.testing.daemon_process import DaemonProcess

HASH = bytes(range(32))
DIGEST = bytes(range(16))
BLOCK = admin.BlockInfo(namespace_digest=DIGEST, hash=HASH, size_bytes=5000, state="ready", tiers="dram")
COMMANDS = (
    ("status",),
    ("health",),
    ("namespaces",),
    ("blocks",),
    ("explain", HASH.hex()),
    ("verify",),
    ("flush",),
    ("drain",),
)


class FakeDaemon:
    """Stands in for the client: answers calls from a table, and notes what it was asked and how it was made."""

    def __init__(self) -> None:
        self.replies: dict[int, list[Message]] = {
            pb.OPERATION_STATUS: [_status("serving")],
            pb.OPERATION_LIST_NAMESPACES: [admin.ListNamespacesReply(namespaces=[_namespace()])],
            pb.OPERATION_LIST_BLOCKS: [admin.ListBlocksReply(blocks=[BLOCK])],
            pb.OPERATION_EXPLAIN: [admin.ExplainReply(verdict="hit", detail="it is in DRAM", blocks=[BLOCK])],
            pb.OPERATION_VERIFY: [admin.VerifyReply(dram_blocks=3, bytes=15000)],
            pb.OPERATION_FLUSH: [admin.FlushReply(written_blocks=2)],
            pb.OPERATION_DRAIN: [admin.DrainReply(state="draining", written_blocks=4)],
        }
        self.connect_error: KVStoredClientError | None = None
        self.call_error: KVStoredClientError | None = None
        self.requests: list[Message] = []
        self.made_with: dict[str, object] = {}
        self.closed = 0

    def make(self, address: str, **settings: object) -> FakeDaemon:
        self.made_with = {"address": address, **settings}
        return self

    def call(self, operation: int, request: Message, reply_type: type[Message]) -> Message:
        self.requests.append(request)
        if self.call_error is not None:
            raise self.call_error
        replies = self.replies[operation]
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        assert isinstance(reply, reply_type)
        return reply

    def close(self) -> None:
        self.closed += 1


def _namespace() -> admin.NamespaceInfo:
    return admin.NamespaceInfo(digest=DIGEST, tenant="a", fields={"model": "m"}, dram_blocks=1, dram_bytes=8192)


def _status(state: str) -> pb.StatusReply:
    return pb.StatusReply(
        version="1.2.3",
        state=state,
        uptime_s=3700,
        tiers=[
            pb.TierStatus(name="dram", health="ok", capacity_bytes=1 << 30, used_bytes=1 << 28),
            pb.TierStatus(
                name="nvme",
                health="off",
                paths=[
                    pb.PathStatus(
                        path="/mnt/a", health="off", reason="it is gone", since_s=time.time() - 3665, retry_in_s=9
                    )
                ],
            ),
        ],
        tenants=[pb.TenantStatus(name="a", blocks_asked=8, blocks_hit=6), pb.TenantStatus(name="idle")],
        sessions=[pb.SessionStatus(id="s1", tenant="a", client="vllm", transport="session")],
        warnings=["dram: not locked"],
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    monkeypatch.delenv("KVSTORED_ADDRESS", raising=False)
    daemon = FakeDaemon()
    monkeypatch.setattr(connection, "Client", daemon.make)
    return daemon


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        ctl.main(arguments)
    return int(stopped.value.code or 0)


# --- how it prints ---


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_one_json_object(fake, capsys, command):
    assert run(*command, "-o", "json") == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)
    assert fake.closed == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_something_for_people(fake, capsys, command):
    assert run(*command) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert err == ""


def test_status_shows_tiers_hit_rates_sessions_and_warnings(fake, capsys):
    assert run("status") == 0
    shown = capsys.readouterr().out
    for word in ("1.2.3", "serving", "1h 1m", "1.0 GiB", "25.0 %", "75.0 %", "vllm", "warning: dram: not locked"):
        assert word in shown
    for word in ("/mnt/a", "it is gone", "1h 1m ago", "9 s"):
        assert word in shown
    (idle,) = [line for line in shown.splitlines() if line.startswith("idle")]
    assert idle.split()[-1] == "-"


def test_status_as_json_has_the_hit_rate_of_each_tenant(fake, capsys):
    assert run("status", "-o", "json") == 0
    tenants = json.loads(capsys.readouterr().out)["tenants"]
    assert [tenant["hit_rate"] for tenant in tenants] == [0.75, None]


def test_bytes_are_hex_and_numbers_are_numbers_in_json(fake, capsys):
    assert run("explain", HASH.hex(), "-o", "json") == 0
    (block,) = json.loads(capsys.readouterr().out)["blocks"]
    assert (block["hash"], block["namespace_digest"]) == (HASH.hex(), DIGEST.hex())
    assert block["size_bytes"] == 5000
    assert block["parent"] == ""


def test_lines_are_not_folded_in_a_narrow_terminal(fake, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert run("blocks") == 0
    assert f"{DIGEST.hex()}  {HASH.hex()}" in capsys.readouterr().out


# --- global options ---


def test_global_options_may_stand_before_or_after_the_command(fake, capsys):
    assert run("--timeout", "7", "--address=unix:/x", "-o", "json", "health") == 0
    before, made_before = capsys.readouterr().out, fake.made_with
    assert run("health", "-ojson", "--timeout=7", "--address", "unix:/x") == 0
    assert capsys.readouterr().out == before
    assert fake.made_with == made_before
    assert (made_before["address"], made_before["timeout_s"]) == ("unix:/x", 7.0)


def test_the_address_comes_from_the_environment_and_may_be_a_bare_path(fake, monkeypatch):
    monkeypatch.setenv("KVSTORED_ADDRESS", "/run/x.sock")
    assert run("health") == 0
    assert fake.made_with["address"] == "unix:/run/x.sock"


def test_the_token_is_read_from_its_file(fake, tmp_path):
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    assert run("health", "--token-file", str(path)) == 0
    assert fake.made_with["token"] == "s3cret"
    assert run("health", "--token-file", str(tmp_path / "absent")) == Exit.USAGE


# --- exit codes ---


@pytest.mark.parametrize(("state", "code"), [("serving", 0), ("draining", 1), ("starting", 1)])
def test_health_says_in_its_exit_code_whether_the_daemon_serves(fake, capsys, state, code):
    fake.replies[pb.OPERATION_STATUS] = [_status(state)]
    assert run("health") == code
    assert capsys.readouterr().out == f"{state}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(Unavailable("connecting: refused"), 4), (Timeout("no answer in 5 s"), 4), (Refused(16, "unknown token"), 1)],
)
@pytest.mark.parametrize("when", ["connect_error", "call_error"])
def test_an_error_is_one_line_with_the_command_and_the_reason(fake, capsys, error, code, when):
    setattr(fake, when, error)
    assert run("status") == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"kvstorectl: getting status: {error}\n"
    assert fake.closed == 1


def test_debug_adds_where_an_error_comes_from(fake, capsys):
    fake.call_error = Unavailable("gone")
    assert run("status", "--debug") == 4
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("kvstorectl: getting status: gone\n")


def test_verify_exits_3_where_something_was_corrupt(fake):
    fake.replies[pb.OPERATION_VERIFY] = [admin.VerifyReply(dram_blocks=3, corrupt=1)]
    assert run("verify") == 3


def test_flush_exits_1_where_something_was_left(fake):
    fake.replies[pb.OPERATION_FLUSH] = [admin.FlushReply(written_blocks=3, left_blocks=1)]
    assert run("flush", "--wait", "1.5") == 1
    assert fake.requests == [admin.FlushRequest(wait_ms=1500)]
    assert fake.made_with["timeout_s"] == 5.0 + 1.5


@pytest.mark.parametrize(("verdict", "code"), [("hit", 0), ("pending", 0), ("evicted", 1), ("never_stored", 1)])
def test_explain_exits_1_where_the_block_is_not_there(fake, capsys, verdict, code):
    fake.replies[pb.OPERATION_EXPLAIN] = [admin.ExplainReply(verdict=verdict, detail="why")]
    assert run("explain", HASH.hex()) == code
    assert capsys.readouterr().out == f"{verdict}: why\n"


def test_drain_asks_to_drain_by_a_deadline_or_to_take_it_back(fake):
    assert run("drain") == 0
    assert run("drain", "--deadline", "2.5") == 0
    assert fake.made_with["timeout_s"] == 5.0 + 2.5
    assert run("drain", "--undo") == run("drain", "--resume") == 0
    undo = admin.DrainRequest(resume=True)
    assert fake.requests == [admin.DrainRequest(deadline_ms=30_000), admin.DrainRequest(deadline_ms=2500), undo, undo]


@pytest.mark.parametrize("unfinished", [{"leases": 1}, {"reservations": 2}, {"left_blocks": 3}])
def test_a_drain_that_did_not_finish_is_exit_1_and_says_what_is_left(fake, capsys, unfinished):
    fake.replies[pb.OPERATION_DRAIN] = [admin.DrainReply(state="draining", **unfinished)]
    assert run("drain", "--deadline", "1") == Exit.NO
    assert str(*unfinished.values()) in capsys.readouterr().out


# --- keys and namespaces ---


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "xyz"),
        ("explain", "00" * 7),
        ("explain", "00" * 65),
        ("explain", f"0011:{HASH.hex()}"),
        ("blocks", "--namespace", "0011"),
        ("blocks", "--limit", "0"),
        ("get", HASH.hex(), "-"),
        ("get", HASH.hex(), "-", "-n", DIGEST.hex(), "-f", "model=m"),
        ("get", HASH.hex(), "-", "-f", "modl=m"),
        ("get", HASH.hex(), "-", "-f", "layers=many"),
        ("status", "-o", "yaml"),
        ("nothing",),
    ],
)
def test_what_makes_no_sense_is_wrong_usage_and_asks_the_daemon_nothing(fake, capsys, arguments):
    assert run(*arguments) == Exit.USAGE
    assert capsys.readouterr().err
    assert fake.requests == []


def test_explain_takes_a_hash_with_or_without_its_namespace(fake):
    assert run("explain", HASH.hex()) == 0
    assert run("explain", f"{DIGEST.hex()}:{HASH.hex()}") == 0
    assert fake.requests == [admin.ExplainRequest(hash=HASH), admin.ExplainRequest(hash=HASH, namespace_digest=DIGEST)]


def test_a_namespace_typed_as_fields_has_the_digest_of_the_one_that_was_listed():
    spec = pb.NamespaceSpec(model="m=1", rope_theta=500000.1, layers=32, rope_scaling='{"factor": 8.0}', tp_size=2)
    listed = namespace.fields(spec)
    typed = parse_spec(f"{name}={value}" for name, value in listed.items())
    assert namespace.digest("a", typed) == namespace.digest("a", spec)


def test_blocks_are_listed_page_by_page_up_to_the_limit(fake, capsys):
    fake.replies[pb.OPERATION_LIST_BLOCKS] = [
        admin.ListBlocksReply(blocks=[BLOCK] * 1000, cursor=b"next"),
        admin.ListBlocksReply(blocks=[BLOCK] * 201, cursor=b"more"),
    ]
    assert run("blocks", "--limit", "1200", "-o", "json", "-n", DIGEST.hex()) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (len(listed["blocks"]), listed["more"]) == (1200, True)
    assert fake.requests == [
        admin.ListBlocksRequest(namespace_digest=DIGEST, limit=1000),
        admin.ListBlocksRequest(namespace_digest=DIGEST, limit=201, cursor=b"next"),
    ]


def test_a_list_that_just_reaches_the_limit_is_complete(fake, capsys):
    assert run("blocks", "--limit", "1", "-o", "json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert (len(listed["blocks"]), listed["more"]) == (1, False)


# --- files ---


@pytest.mark.parametrize(("length", "words"), [(0, "is empty"), (files.BLOCK_BYTES_MAX + 1, "larger than 16.0 MiB")])
def test_a_file_that_is_no_block_is_refused_before_the_daemon_is_asked(fake, capsys, tmp_path, length, words):
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.truncate(length)
    assert run("put", str(path), "-f", "model=m") == Exit.USAGE
    assert words in capsys.readouterr().err
    assert fake.requests == []


def test_an_absent_daemon_is_not_taken_for_a_missing_block(fake, tmp_path):
    fake.call_error = Unavailable("gone")
    assert run("get", HASH.hex(), str(tmp_path / "f"), "-f", "model=m") == Exit.UNREACHABLE


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess({"dram.capacity_bytes": "32MiB", "dram.segment_bytes": "2MiB"}) as process:
        yield process


@pytest.fixture
def real(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> DaemonProcess:
    monkeypatch.setenv("KVSTORED_ADDRESS", daemon.address)
    return daemon


def put(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run("put", *arguments, "-o", "json") == 0
    reply = json.loads(capsys.readouterr().out)
    assert isinstance(reply, dict)
    return reply


def test_a_file_that_was_put_comes_back_by_fields_and_by_digest(real, capsys, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"kv" * 60_001)
    stored = put(capsys, str(source), "-f", "model=m", "-f", "rope_theta=10000.1")
    assert stored["key"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert stored["stored"] is True
    assert run("get", str(stored["key"]), str(target), "-n", str(stored["namespace"])) == 0
    assert target.read_bytes() == source.read_bytes()
    target.unlink()
    assert run("get", str(stored["key"]), str(target), "-f", "model=m", "-f", "rope_theta=10000.1") == 0
    assert target.read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_the_key_that_put_prints_is_all_that_get_needs(real, capsys, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"by its whole key")
    stored = put(capsys, str(source), "-f", "model=whole")
    key = f"{stored['namespace']}:{stored['key']}"
    assert run("get", key, str(target)) == 0
    assert target.read_bytes() == source.read_bytes()
    assert run("get", key, str(target), "-f", "model=whole") == Exit.USAGE
    assert "names its namespace already" in capsys.readouterr().err


def test_a_file_that_is_there_already_is_not_stored_again(real, capsys, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"twice")
    assert put(capsys, str(source), "-f", "model=twice")["stored"] is True
    assert put(capsys, str(source), "-f", "model=twice")["stored"] is False


def test_a_durable_put_without_nvme_is_refused_and_nothing_is_stored(real, capsys, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"durable")
    assert run("put", str(source), "-f", "model=durable", "--durable") == Exit.NO
    assert "nvme.paths" in capsys.readouterr().err
    stored = put(capsys, str(source), "-f", "model=durable")
    assert (stored["stored"], stored["durable"]) == (True, False)


def test_a_block_that_is_not_stored_is_exit_1_and_leaves_no_file(real, capsys, tmp_path):
    assert run("get", "ff" * 32, str(tmp_path / "f"), "-f", "model=m") == Exit.NO
    assert "explain" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_written_is_named(real, capsys, tmp_path):
    source, key = tmp_path / "source", "ab" * 32
    source.write_bytes(b"x" * 100)
    put(capsys, str(source), key, "-f", "model=m")
    assert run("get", key, str(tmp_path / "absent" / "f"), "-f", "model=m") == Exit.NO
    assert "absent" in capsys.readouterr().err


def test_what_is_stored_is_listed_explained_and_verified(real, capsys, tmp_path):
    source: Path = tmp_path / "source"
    source.write_bytes(b"y" * 5000)
    stored = put(capsys, str(source), "-f", "model=listed")
    digest, key = str(stored["namespace"]), str(stored["key"])
    assert run("namespaces") == 0
    assert digest in capsys.readouterr().out
    assert run("blocks", "-n", digest, "-o", "json") == 0
    assert [block["hash"] for block in json.loads(capsys.readouterr().out)["blocks"]] == [key]
    assert run("explain", f"{digest}:{key}") == 0
    assert run("explain", "00" * 32) == Exit.NO
    assert run("verify") == 0
    assert run("health") == 0


def test_a_draining_daemon_is_not_healthy_and_refuses_files(real, capsys, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"z" * 100)
    assert run("drain") == 0
    try:
        assert run("health") == Exit.NO
        assert run("put", str(source), "-f", "model=drained", "--timeout", "0.5") == Exit.NO
        said = capsys.readouterr().err
        assert "THROTTLED" in said
        assert "kvstorectl drain --undo" in said
    finally:
        assert run("drain", "--resume") == 0
    capsys.readouterr()
    assert put(capsys, str(source), "-f", "model=drained")["stored"] is True


def test_no_daemon_on_the_socket_is_exit_4_with_the_reason(capsys, tmp_path):
    assert run("health", "--address", f"unix:{tmp_path}/absent.sock") == Exit.UNREACHABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert "absent.sock" in line
    assert "is kvstored running" in line
