from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.message import Message
from kvstored_client import Client, NamespaceSpec, ctl
from kvstored_client.ctl import connection, files, purge
from kvstored_client.ctl.connection import Exit
from kvstored_client.ctl.keys import parse_spec
from kvstored_client.ctl.token import seconds_of
from kvstored_client.ctl.wear import life_left_years
from kvstored_client.errors import KVStoredClientError, Refused, Timeout, Unavailable
from kvstored_proto import namespace
from kvstored_proto.v1 import admin_pb2 as admin
from kvstored_proto.v1 import kvstored_pb2 as pb
from patient_ctl import be_patient

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
    ("tenant", "add", "a", "uids=1,2"),
    ("tenant", "set", "a", "role=reader", "--reset", "uids"),
    ("tenant", "rm", "a"),
    ("tenant", "ls"),
    ("tenant", "show", "a"),
    ("token", "add", "a"),
    ("token", "rotate", "0123", "--grace", "1d"),
    ("token", "revoke", "0123"),
    ("token", "ls"),
    ("audit",),
    ("wear",),
    ("purge", "--tenant", "a"),
    ("purge", "status"),
    ("purge", "status", "0123"),
    ("session", "ls"),
    ("session", "kill", "s1"),
)
RECEIPT = admin.PurgeReceipt(
    purge_id="0123",
    state="complete",
    by="root",
    selection=admin.PurgeRequest(tenant="a", older_than_ms=90_000),
    dram_blocks=3,
    nvme_blocks=2,
    dram_zeroed_bytes=1 << 20,
    sessions_ended=["s1 a \x1b[2Jclear pid 7"],
    sessions_ended_count=1,
    notes=["begun again after a restart"],
)
TOKEN = admin.TokenReply(info=admin.TokenInfo(id="0123", tenant="a", label="ci", created_s=1.0), token="kvs_0123_x")
TENANT = admin.TenantInfo(
    name="a",
    state="active",
    fields={"role": '"tenant"', "uids": "[1, 2]"},
    origins={"role": "default", "uids": "admin"},
    tokens=[TOKEN.info],
    sessions=3,
)
RECORD = {"seq": 7, "time": "2026-01-02T03:04:05", "act": "Flush", "outcome": "ok", "with": {"wait_ms": 5}}
RECORD["by"] = {"tenant": "a", "credential": "uid 0", "client": "\x1b[2Jclear"}


POLICY = admin.PolicyReply(eviction="lfu", configured_eviction="lru", settings={"policy.admission": "admit_all"})


PINS = admin.ListPinsReply(
    pins=[admin.PinInfo(namespace_digest=DIGEST, tenant="a", hard_blocks=2, hard_bytes=2 << 20, longest_s=30.0)],
    limits=[admin.PinLimit(tenant="a", hard_pinned_bytes=2 << 20, hard_pin_bytes=1 << 30, final_wrong_share=0.25)],
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
            pb.OPERATION_WEAR: [admin.WearReply(paths=[admin.PathWear(path="/d", total_bytes=5 << 30)])],
            pb.OPERATION_POLICY: [POLICY],
            pb.OPERATION_OPEN_NAMESPACE: [pb.OpenNamespaceReply(namespace_id=3)],
            pb.OPERATION_HINT: [pb.HintReply(blocks=4, applied_blocks=3)],
            pb.OPERATION_LIST_PINS: [PINS],
            pb.OPERATION_SET_POLICY: [POLICY],
            pb.OPERATION_DRAIN: [admin.DrainReply(state="draining", written_blocks=4)],
            pb.OPERATION_PURGE: [admin.PurgeReply(receipt=RECEIPT)],
            pb.OPERATION_PURGE_STATUS: [admin.PurgeStatusReply(receipts=[RECEIPT])],
            pb.OPERATION_KILL_SESSION: [admin.KillSessionReply(leases=2, reservations=1, staging_bytes=4096)],
            pb.OPERATION_ADD_TENANT: [admin.TenantReply(tenant=TENANT)],
            pb.OPERATION_SET_TENANT: [admin.TenantReply(tenant=TENANT)],
            pb.OPERATION_REMOVE_TENANT: [admin.RemoveTenantReply(sessions_ended=1)],
            pb.OPERATION_LIST_TENANTS: [admin.ListTenantsReply(tenants=[TENANT])],
            pb.OPERATION_ADD_TOKEN: [TOKEN],
            pb.OPERATION_ROTATE_TOKEN: [TOKEN],
            pb.OPERATION_REVOKE_TOKEN: [admin.RevokeTokenReply(sessions_ended=1)],
            pb.OPERATION_READ_AUDIT: [admin.ReadAuditReply(lines=[json.dumps(RECORD)])],
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
        tenants=[
            pb.TenantStatus(name="a", blocks_asked=8, blocks_hit=6, blocks_looked_up=16, blocks_found=6),
            pb.TenantStatus(name="idle"),
        ],
        sessions=[pb.SessionStatus(id="s1", tenant="a", client="vllm", transport="session")],
        warnings=["dram: not locked"],
        counters={
            "prefetch_lookup_bytes": 10 << 20,
            "prefetch_lookup_useful_bytes": 6 << 20,
            "prefetch_lookup_wasted_bytes": 3 << 20,
        },
        load_costs=pb.LoadCosts(
            copy_bytes_per_s=5 << 30, read_bytes_per_s=2 << 30, read_latency_s=0.0008, ahead_bytes=3 << 20, reads=7
        ),
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    monkeypatch.delenv("KVSTORED_ADDRESS", raising=False)
    monkeypatch.delenv("KVSTORED_TOKEN_FILE", raising=False)
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
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("lookup ")]
    assert row[1::2] == ["10.0", "6.0", "0", "3.0", "0", "1.0"], "begun, useful, late, wasted, dropped, unused yet"
    assert "loads: copies 5.0 GiB/s (assumed), reads 2.0 GiB/s after 0.8 ms, 3.0 MiB ahead" in shown
    for word in ("/mnt/a", "it is gone", "1h 1m ago", "9 s"):
        assert word in shown
    (idle,) = [line for line in shown.splitlines() if line.startswith("idle")]
    assert idle.split()[-1] == "-"
    (busy,) = [line for line in shown.splitlines() if line.startswith("a  ") and "75.0" in line]
    assert busy.split()[-6:] == ["16", "37.5", "%", "8", "75.0", "%"]


def test_status_as_json_has_the_hit_rate_of_each_tenant(fake, capsys):
    assert run("status", "-o", "json") == 0
    tenants = json.loads(capsys.readouterr().out)["tenants"]
    rates = [(tenant["lookup_hit_rate"], tenant["hit_rate"]) for tenant in tenants]
    assert rates == [(0.375, 0.75), (None, None)]


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


def test_verify_exits_3_where_a_limit_is_exceeded_and_says_whose(fake, capsys):
    fake.replies[pb.OPERATION_VERIFY] = [admin.VerifyReply(dram_blocks=3, problems=["t has 5 bytes of DRAM"])]
    assert run("verify") == 3
    assert capsys.readouterr().out.endswith("\nwrong: t has 5 bytes of DRAM\n")


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


# --- hints ---


@pytest.mark.parametrize("option", ["--soft-pin", "--hard-pin", "--ttl"])
@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_times_of_hints_that_are_none_are_refused_by_their_option(fake, capsys, option, seconds):
    assert run("hint", "-n", DIGEST.hex(), "00" * 32, option, seconds) == Exit.USAGE
    assert option in capsys.readouterr().err


def test_a_hint_names_blocks_of_a_namespace_and_says_what_came_of_it(fake, capsys):
    blocks = [bytes([number] * 16).hex() for number in (1, 2)]
    assert run("hint", "-n", DIGEST.hex(), *blocks, "--priority", "2", "--soft-pin", "1.5") == 0
    assert "3 of 4 blocks" in capsys.readouterr().out
    request = fake.requests[-1]
    assert (request.namespace_id, request.hash_bytes, request.priority, request.soft_pin_ms) == (3, 16, 2, 1500)
    assert request.hashes == bytes.fromhex("".join(blocks))
    assert run("hint", "-n", DIGEST.hex(), blocks[0], "--priority", "0") == 0
    assert fake.requests[-1].HasField("priority")
    assert run("hint", "-n", DIGEST.hex(), blocks[0]) == Exit.USAGE
    fake.replies[pb.OPERATION_HINT] = [pb.HintReply(blocks=4)]
    assert run("hint", "-n", DIGEST.hex(), blocks[0], "--final") == Exit.NO


def test_pins_are_listed_by_namespace_with_the_limit(fake, capsys):
    assert run("pins") == 0
    out = capsys.readouterr().out
    assert DIGEST.hex() in out
    assert "30 s" in out
    assert "2.0 MiB of 1.0 GiB pinned hard; 25% of what was final was asked for again" in out
    assert run("pins", "--output", "json") == 0
    assert json.loads(capsys.readouterr().out)["limits"][0]["tenant"] == "a"


# --- policy ---


def test_policy_shows_what_is_in_force_and_that_it_ends_with_a_restart(fake, capsys):
    assert run("policy") == 0
    assert run("policy", "set", "--eviction", "lfu") == 0
    assert fake.requests == [admin.PolicyRequest(), admin.SetPolicyRequest(eviction="lfu")]
    out = capsys.readouterr().out
    assert "policy.admission" in out
    assert out.count("lfu holds until the daemon restarts, then lru again") == 2
    assert run("policy", "set", "--eviction", "random") == Exit.USAGE
    fake.replies[pb.OPERATION_POLICY] = [admin.PolicyReply(eviction="lru", configured_eviction="lru", changing=True)]
    assert run("policy") == 0
    out = capsys.readouterr().out
    assert "still being put in order" in out
    assert "restart" not in out


# --- wear ---

YEAR_S = 365.25 * 86_400


@pytest.mark.parametrize(
    ("wear", "years"),
    [
        ({}, None),  # nobody said what the drive takes
        ({"endurance_bytes": 10**15}, 3.0),
        ({"endurance_bytes": 10**15, "total_bytes": 10**15 + 5}, 0.0),
        ({"endurance_bytes": 10**15, "total_bytes": 10**15, "recent_s": 60.0, "recent_bytes": 0}, 0.0),  # at any rate
        ({"endurance_bytes": 10**15, "recent_bytes": 0}, None),
        ({"endurance_bytes": 10**15, "recent_s": 60.0}, None),  # counted too short a time
    ],
)
def test_the_life_of_a_drive_is_what_is_left_of_its_endurance_at_the_rate_of_the_last_30_days(wear, years):
    month = {"total_bytes": 10**14, "recent_s": YEAR_S / 12, "recent_bytes": 25 * 10**12}
    found = life_left_years(admin.PathWear(**(month | wear)))
    assert found == (years if years is None else pytest.approx(years))


def test_wear_shows_a_line_a_drive_and_says_what_is_overdrawn(fake, capsys):
    path = admin.PathWear(path="/nvme", today_bytes=3 << 30, total_bytes=10**12, endurance_bytes=10**13)
    path.budget_bytes_per_day, path.budget_left_bytes = 100 << 30, -(2 << 30)
    fake.replies[pb.OPERATION_WEAR] = [admin.WearReply(paths=[path])]
    assert run("wear") == 0
    out = capsys.readouterr().out
    assert "/nvme" in out
    assert "3.0 GiB" in out
    assert "10.0 %" in out
    assert "overdrawn by 2.0 GiB of 100.0 GiB a day" in out
    path.stored_bytes, path.reinserted_bytes, path.written_bytes = 4 << 30, 1 << 30, 6 << 30
    fake.replies[pb.OPERATION_WEAR] = [admin.WearReply(paths=[path])]
    assert run("wear") == 0
    assert "1.50, 1.0 GiB written again" in capsys.readouterr().out
    assert run("wear", "--output", "json") == 0
    (found,) = json.loads(capsys.readouterr().out)["paths"]
    assert (found["budget_left_bytes"], found["life_left_years"]) == (-(2 << 30), None)
    path.total_bytes = path.endurance_bytes
    fake.replies[pb.OPERATION_WEAR] = [admin.WearReply(paths=[path])]
    assert run("wear") == 0
    assert "used up" in capsys.readouterr().out


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
    be_patient(monkeypatch)
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


def test_over_grpc_a_file_comes_back_too(real, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KVSTORED_ADDRESS", f"grpc:{real.grpc_target}")
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"inside of messages" * 100_000)
    stored = put(capsys, str(source), "-f", "model=remote")
    assert run("get", f"{stored['namespace']}:{stored['key']}", str(target)) == 0
    assert target.read_bytes() == source.read_bytes()
    target.unlink()
    assert run("get", str(stored["key"]), str(target), "-f", "model=remote") == 0
    assert target.read_bytes() == source.read_bytes()
    capsys.readouterr()
    assert run("get", "ff" * 32, str(target), "-f", "model=remote") == Exit.NO
    assert "not stored here; `kvstorectl explain" in capsys.readouterr().err


def test_over_grpc_a_block_has_the_size_that_it_has_in_its_own_namespace(real, capsys, tmp_path, monkeypatch):
    """Shards of one model have the same keys, for blocks of their own."""
    monkeypatch.setenv("KVSTORED_ADDRESS", f"grpc:{real.grpc_target}")
    source, target, key = tmp_path / "source", tmp_path / "target", "ab" * 32
    for rank in range(2):
        source.write_bytes(bytes([rank]) * (rank + 1) * 5000)
        put(capsys, str(source), key, "-f", "model=shards", "-f", f"tp_rank={rank}")
    for rank in range(2):
        assert run("get", key, str(target), "-f", "model=shards", "-f", f"tp_rank={rank}") == 0
        assert target.read_bytes() == bytes([rank]) * (rank + 1) * 5000
        target.unlink()
    capsys.readouterr()
    assert run("get", key, str(target), "-f", "model=shards", "-f", "tp_rank=2") == Exit.NO
    assert "not stored here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [(ValueError("block 0 has 7 bytes"), Exit.NO, "replaced meanwhile"), (None, Exit.UNREACHABLE, "does not answer")],
)
def test_a_block_that_was_there_a_moment_ago_is_not_said_to_be_missing(
    real, capsys, tmp_path, monkeypatch, raised, code, says
):
    monkeypatch.setenv("KVSTORED_ADDRESS", f"grpc:{real.grpc_target}")
    source = tmp_path / "source"
    source.write_bytes(b"replaced")
    stored = put(capsys, str(source), "-f", "model=replaced")

    def get_into(client: Client, *_: object, **__: object) -> int:
        if raised is not None:
            raise raised
        client._core.failed_open(Unavailable("gone"))
        return 0

    monkeypatch.setattr(Client, "get_into", get_into)
    assert run("get", str(stored["key"]), str(tmp_path / "target"), "-f", "model=replaced") == code
    assert says in capsys.readouterr().err


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


def test_an_engine_that_looks_up_and_gets_nothing_lowers_a_rate_of_status(real, capsys):
    def counts() -> tuple[int, ...]:
        assert run("status", "-o", "json") == 0
        (tenant,) = json.loads(capsys.readouterr().out)["tenants"]
        return tuple(tenant[f"blocks_{name}"] for name in ("looked_up", "found", "asked"))

    before = counts()
    with Client(real.address, timeout_s=60, connect_timeout_s=60) as client:
        assert client.lookup(client.namespace(NamespaceSpec(model="missed")), [HASH, bytes(32)]).prefix_blocks == 0
    assert tuple(map(int.__sub__, counts(), before)) == (2, 0, 0)


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


# --- tenants, tokens, the audit log ---


def test_settings_of_a_tenant_are_key_and_value(fake, capsys):
    assert run("tenant", "add", "a", "uids=1,2", "dram_limit_bytes=8GiB", "certificates=") == 0
    assert fake.requests[0].fields == {"uids": "1,2", "dram_limit_bytes": "8GiB", "certificates": ""}
    assert run("tenant", "set", "a", "--reset", "uids", "--reset", "role") == 0
    assert list(fake.requests[1].reset) == ["uids", "role"]
    assert run("tenant", "set", "a", "uids") == Exit.USAGE
    assert "KEY=VALUE" in capsys.readouterr().err


def test_where_settings_come_from_is_shown(fake, capsys):
    assert run("tenant", "show", "a", "-o", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["fields"]["uids"], shown["origins"]["uids"], shown["tokens"][0]["id"]) == ([1, 2], "admin", "0123")


def test_a_token_stands_alone_on_standard_output_or_in_a_file_of_its_own(fake, capsys, tmp_path):
    assert run("token", "add", "a", "--expires-in", "2d", "--label", "ci") == 0
    assert capsys.readouterr().out == "kvs_0123_x\n"
    assert (fake.requests[0].expires_in_s, fake.requests[0].label) == (2 * 86400, "ci")
    out = tmp_path / "token"
    for arguments in ((), ("-o", "json")):
        assert run("token", "rotate", "0123", "--out", str(out), *arguments) == 0
        shown = capsys.readouterr().out
        assert "0123" in shown
        assert "kvs_" not in shown
    assert (out.read_text(), out.stat().st_mode & 0o777) == ("kvs_0123_x\n", 0o600)
    assert fake.requests[1].grace_s == 3600
    (tmp_path / "blocked.new").mkdir()
    assert run("token", "add", "a", "--out", str(tmp_path / "blocked")) == Exit.NO
    assert "token revoke 0123" in capsys.readouterr().err


def test_no_token_is_made_for_a_file_that_cannot_be(fake, capsys, tmp_path):
    (tmp_path / "file").touch()
    for directory in ("no", "file"):
        assert run("token", "rotate", "0123", "--out", str(tmp_path / directory / "such")) == Exit.USAGE
        assert "no token was made" in capsys.readouterr().err
    assert not fake.requests


def test_a_token_takes_no_files_place_but_that_of_the_one_it_replaces(fake, capsys, tmp_path):
    out = tmp_path / "token"
    for held, command, code in (
        ("kvs_4567_y\n", ("rotate", "0123"), Exit.USAGE),
        ("kvs_0123_y\n", ("add", "a"), Exit.USAGE),
        ("\n", ("rotate", "0123"), Exit.USAGE),
        ("kvs_0123_y\n", ("rotate", "0123"), Exit.OK),
        ("kvs_4567_y\n", ("rotate", "0123", "--force"), Exit.OK),
        ("kvs_4567_y\n", ("add", "a", "--force"), Exit.OK),
    ):
        out.write_text(held)
        fake.requests.clear()
        assert run("token", *command, "--out", str(out)) == code
        assert (out.read_text() == held, bool(fake.requests)) == (code != Exit.OK, code == Exit.OK)
        assert ("--force" in capsys.readouterr().err) == (code != Exit.OK)


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 0), ("90", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400), ("1w", 604800)]
)
def test_times_have_units(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["d", "1y", "soon", "1d2h", "-1", "nan", "inf", "1e30d"])
def test_what_is_no_time_is_said(fake, capsys, text):
    for command in (("token", "add", "a", "--expires-in", text), ("purge", "--older-than", text)):
        assert run(*command) == Exit.USAGE
        assert "90d" in capsys.readouterr().err
    assert not fake.requests


def test_the_audit_log_is_shown_and_a_clients_name_is_no_command_to_the_terminal(fake, capsys):
    assert run("audit", "-n", "5") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "2026-01-02T03:04:05  Flush  wait_ms=5  by a uid 0 ?[2Jclear  ok"
    assert fake.requests[0].limit == 5


def test_following_asks_for_what_comes_after(fake, capsys, monkeypatch):
    def stop(_seconds):
        if len(fake.requests) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", stop)
    with pytest.raises(SystemExit):
        ctl.main(["audit", "-f", "-o", "json"])
    assert [request.after for request in fake.requests] == [0, 7]


def test_the_token_file_comes_from_the_environment(fake, monkeypatch, tmp_path):
    (tmp_path / "token").write_text("kvs_1\n")
    monkeypatch.setenv("KVSTORED_TOKEN_FILE", str(tmp_path / "token"))
    assert run("health") == 0
    assert fake.made_with["token"] == "kvs_1"


@pytest.mark.parametrize("file", ["/dev/zero", "/dev/null", "/nowhere/token"])
def test_a_token_file_that_holds_none_is_a_wrong_usage(fake, capsys, file):
    assert run("--token-file", file, "health") == Exit.USAGE
    assert file in capsys.readouterr().err


# --- purge and session ---


def test_a_purge_is_followed_to_its_receipt(fake, capsys, monkeypatch):
    monkeypatch.setattr(purge, "POLL_S", 0)
    running = admin.PurgeReceipt(purge_id="0123", state="running", phase="making zeros on NVMe", steps_done=1, steps=9)
    fake.replies[pb.OPERATION_PURGE] = [admin.PurgeReply(receipt=running)]
    fake.replies[pb.OPERATION_PURGE_STATUS] = [
        admin.PurgeStatusReply(receipts=[running]),
        admin.PurgeStatusReply(receipts=[RECEIPT]),
    ]
    options = ("--model", "m", "--model-version", "2", "--older-than", "7d", "--deadline", "1.5")
    assert run("purge", "--tenant", "a", "--namespace", "ab" * 16, *options) == 0
    asked = fake.requests[0]
    assert (asked.tenant, asked.namespace_digest.hex(), asked.model, asked.model_version) == ("a", "ab" * 16, "m", "2")
    assert (asked.older_than_ms, asked.deadline_ms, asked.dry_run) == (7 * 86_400_000, 1500, False)
    shown = capsys.readouterr().out
    assert "0123: complete, tenant a, older than 90 s" in shown
    assert "zeroed    1.0 MiB in DRAM" in shown
    assert "\x1b" not in shown


def test_a_purge_that_leaves_something_says_what_and_fails(fake, capsys):
    left = admin.PurgeReceipt(purge_id="0123", state="incomplete", remains=["extent 3 of /mnt/a: it is off"])
    fake.replies[pb.OPERATION_PURGE] = [admin.PurgeReply(receipt=left)]
    assert run("purge", "--tenant", "a") == Exit.NO
    assert "remains   extent 3 of /mnt/a" in capsys.readouterr().out
    fake.replies[pb.OPERATION_PURGE_STATUS] = [admin.PurgeStatusReply(receipts=[left])]
    assert run("purge", "status", "0123") == Exit.NO
    assert run("purge", "status") == Exit.OK


def test_a_purge_goes_on_when_its_command_is_interrupted(fake, capsys, monkeypatch):
    running = admin.PurgeReceipt(purge_id="0123", state="running")
    fake.replies[pb.OPERATION_PURGE] = [admin.PurgeReply(receipt=running)]

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(purge.time, "sleep", interrupted)
    assert run("purge", "--tenant", "a") == Exit.NO
    assert "kvstorectl purge status 0123" in capsys.readouterr().err


def test_a_dry_run_and_no_wait_do_not_wait(fake, capsys):
    running = admin.PurgeReceipt(purge_id="0123", state="running")
    fake.replies[pb.OPERATION_PURGE] = [admin.PurgeReply(receipt=running)]
    assert run("purge", "--tenant", "a", "--no-wait") == 0
    dry = admin.PurgeReceipt(state="dry_run", selection=admin.PurgeRequest(model="m"), dram_blocks=5)
    fake.replies[pb.OPERATION_PURGE] = [admin.PurgeReply(receipt=dry)]
    assert run("purge", "--tenant", "a", "--dry-run") == 0
    assert fake.requests[-1].dry_run
    assert "\ndry run: model m\n" in capsys.readouterr().out
    assert len(fake.requests) == 2


def test_a_namespace_that_is_no_digest_is_a_wrong_usage(fake, capsys):
    assert run("purge", "--namespace", "xyz") == Exit.USAGE
    assert "kvstorectl namespaces" in capsys.readouterr().err


def test_killing_a_session_tells_what_it_held(fake, capsys):
    assert run("session", "kill", "s1") == 0
    assert fake.requests[0].session_id == "s1"
    assert "2 leases, 1 reservations, 4.0 KiB" in capsys.readouterr().out
