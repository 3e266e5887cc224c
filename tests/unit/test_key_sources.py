"""Where master keys come from, and what is said where there are none."""

import base64
import os
import sys
import time

import pytest
from pydantic import ValidationError

from kvstored.config import tenants as config_tenants
from kvstored.config.tenants import Tenant
from kvstored.encryption.key_sources import KEYS_MAX, KeyUnavailable, parse_keys, read_masters
from kvstored.errors import InvalidArgument
from kvstored.tenancy.merge import parse_fields
from kvstored.testing import process_figures

KEY, OTHER = bytes(range(32)), bytes(range(32, 64))


def tenant(**fields):
    return Tenant(name="t", **fields)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (KEY.hex().encode(), [KEY]),
        (b"# a comment\n\n" + KEY.hex().upper().encode() + b"\r\n", [KEY]),
        (base64.b64encode(KEY) + b"\n" + OTHER.hex().encode(), [KEY, OTHER]),
        (bytes([200]) * 32, [bytes([200]) * 32]),
    ],
)
def test_keys_are_read_as_hex_base64_or_as_they_are(text, keys):
    assert parse_keys(text, "it") == keys


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n# nothing\n",
        b"a passphrase of thirty-two bytes",
        KEY.hex()[:-2].encode(),
        KEY.hex().encode() + b"\nrubbish",
        b"\xff" * 33,
        b"\n".join([KEY.hex().encode()] * (KEYS_MAX + 1)),
    ],
)
def test_anything_else_is_refused_without_being_shown(text):
    with pytest.raises(KeyUnavailable, match="64 hex digits or base64") as raised:
        parse_keys(text, "it")
    assert "passphrase" not in str(raised.value)


def test_a_file_a_credential_and_a_program(tmp_path, monkeypatch):
    (tmp_path / "key").write_text(KEY.hex())
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_masters(tenant(key_file=tmp_path / "key")) == [KEY]
    assert read_masters(tenant(key_credential="key")) == [KEY]
    assert read_masters(tenant(key_command=["cat", str(tmp_path / "key")])) == [KEY]


def test_what_is_missing_is_said_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    for fields, said in [
        ({"key_file": tmp_path / "no"}, "No such file"),
        ({"key_credential": "no"}, "LoadCredential=no:/path"),
        ({"key_command": ["/no/such/program"]}, "cannot be run"),
        ({"key_command": ["false"]}, "exit status 1"),
        ({}, "set key_file"),
    ]:
        with pytest.raises(KeyUnavailable, match=said):
            read_masters(tenant(**fields))


def test_a_pipe_without_a_writer_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "key")
    with pytest.raises(KeyUnavailable, match="no regular file"):
        read_masters(tenant(key_file=tmp_path / "key"))


def test_a_program_that_does_not_end_is_ended_with_what_it_started(tmp_path):
    started = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {started}; wait"
    for timeout_s in (0.5, 5.0, 50.0):  # a busy machine may not have started it by then
        with pytest.raises(KeyUnavailable, match="did not end within key_timeout_s"):
            read_masters(tenant(key_command=["sh", "-c", script], key_timeout_s=timeout_s))
        if started.exists() and started.read_text():
            break
    pid, end_s = int(started.read_text()), time.monotonic() + 60.0
    while not process_figures.ended(pid):
        assert time.monotonic() < end_s, "it still runs"
        time.sleep(0.01)


def test_a_program_that_prints_without_end_is_ended(tmp_path):
    with pytest.raises(KeyUnavailable):
        read_masters(tenant(key_command=[sys.executable, "-c", "while True: print('x' * 1000)"], key_timeout_s=1.0))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"encryption": "aes-256-gcm"}, "needs key_file, key_command or key_credential"),
        ({"key_file": "/k", "key_command": ["x"]}, "one source"),
        ({"encryption": "rot13", "key_file": "/k"}, "aes-256-gcm"),
        ({"key_credential": "../etc/shadow"}, "name of a credential"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        tenant(**fields)


def test_without_the_package_a_tenant_with_a_key_is_refused(monkeypatch):
    monkeypatch.setattr(config_tenants, "CRYPTOGRAPHY_MIN", 1 << 30)
    with pytest.raises(ValidationError, match=r"pip install 'kvstored\[encryption\]'"):
        tenant(encryption="aes-256-gcm", key_file="/k")
    assert tenant().encryption == ""


def test_an_admin_cannot_make_the_daemon_run_a_program():
    with pytest.raises(InvalidArgument, match="configuration file only"):
        parse_fields({"key_command": '["sh", "-c", "id"]'})
    assert parse_fields({"encryption": "aes-256-gcm"}) == {"encryption": "aes-256-gcm"}
