"""`kvstorectl put`: what it says where nothing is stored, to whoever may and may not see why."""

import hashlib
import json
import os
import re

import pytest
from fake_daemon import PATIENT
from kvstored_client import Client, NamespaceSpec, ctl
from kvstored_client.ctl.connection import Exit
from patient_ctl import be_patient

from kvstored.testing.daemon_process import DaemonProcess

SETTINGS = {
    "dram.capacity_bytes": "32MiB",
    "dram.segment_bytes": "2MiB",
    "nvme.capacity_bytes": "256MiB",
    "nvme.extent_bytes": "32MiB",
    "tenants": json.dumps(
        [
            {"name": "boss", "role": "admin", "uids": [os.getuid()]},
            *(
                {"name": f"{role}s", "role": role, "tokens_sha256": [hashlib.sha256(role.encode()).hexdigest()]}
                for role in ("tenant", "reader")
            ),
        ]
    ),
}


@pytest.fixture
def daemon(request, tmp_path, monkeypatch):
    with DaemonProcess(SETTINGS, nvme=getattr(request, "param", True), parent_directory=tmp_path) as process:
        monkeypatch.setenv("KVSTORED_ADDRESS", process.address)
        be_patient(monkeypatch)
        yield process


def put(tmp_path, text, *arguments, role=""):
    """Exit code of putting a file of this text."""
    (tmp_path / "file").write_text(text)
    if role:
        (tmp_path / "token").write_text(role)
        arguments += ("--token-file", str(tmp_path / "token"))
    with pytest.raises(SystemExit) as stopped:
        ctl.main(["put", str(tmp_path / "file"), "-f", "model=m", *arguments])
    return int(stopped.value.code or 0)


def test_a_tenant_that_sees_no_tiers_puts_durably(daemon, tmp_path, capsys):
    assert put(tmp_path, "durable", "--durable", "-o", "json", role="tenant") == Exit.OK
    assert json.loads(capsys.readouterr().out)["durable"] is True


@pytest.mark.parametrize("daemon", [False], indirect=True)
def test_a_daemon_without_nvme_says_so_itself(daemon, tmp_path, capsys):
    assert put(tmp_path, "durable", "--durable", role="tenant") == Exit.NO
    assert "no NVMe tier: set nvme.paths" in capsys.readouterr().err
    assert put(tmp_path, "durable", role="tenant") == Exit.OK


def test_a_reader_is_told_that_it_may_not_write(daemon, tmp_path, capsys):
    assert put(tmp_path, "mine", role="reader") == Exit.NO
    said = capsys.readouterr().err
    assert "reader: it may not write" in said
    assert "MISS" not in said
    with Client(daemon.address, token="reader", **PATIENT) as client:
        result = client.put(client.namespace(NamespaceSpec(model="m")), [bytes(32)], [b"mine"])
    assert result.error is not None
    assert (result.refused, getattr(result.error, "code", 0)) == (1, 7), "PERMISSION_DENIED"
    assert result.error.__traceback__ is None, "it would keep the caller's buffers"


def test_what_cannot_become_durable_is_told_with_the_path_that_is_to_blame(daemon, tmp_path, capsys):
    daemon.nvme_path.rename(tmp_path / "away")
    assert put(tmp_path, "admin's", "--durable", "--timeout", "1") == Exit.NO
    said = capsys.readouterr().err
    # Off where the daemon has looked after it since.
    assert re.search(rf"NVMe takes no writes: {re.escape(str(daemon.nvme_path))} is (read_only|off) \(", said)
    assert "kvstorectl status" in said
    assert put(tmp_path, "tenant's", "--durable", "--timeout", "1", role="tenant") == Exit.NO
    said = capsys.readouterr().err
    assert "full, read-only or off" in said
    assert str(daemon.nvme_path) not in said
    assert "kvstorectl status" in said
