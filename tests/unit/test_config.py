from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from kvstored.config.config import load_config
from kvstored.config.schema import Config, flatten
from kvstored.config.types import split_address
from kvstored.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "systemd" / "kvstored.toml"
DIGEST = "ab" * 32


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("KVSTORED_")]:
        monkeypatch.delenv(name)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvstored.toml"
    path.write_text(text)
    return path


def problems(path: Path | None = None, **overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, {key.replace("__", "."): value for key, value in overrides.items()})
    return str(caught.value).splitlines()


def test_without_any_setting_everything_has_its_default():
    loaded = load_config(None, {})
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.origins.keys() == {key for key, _ in flatten(loaded.config)}


def test_the_default_tenant_is_root_and_the_daemons_own_user():
    (tenant,) = Config().tenants
    assert (tenant.name, tenant.role) == ("default", "admin")
    assert set(tenant.uids) == {0, os.geteuid()}


def test_command_line_beats_environment_beats_file_beats_default(tmp_path, monkeypatch):
    path = write(tmp_path, "[mover]\nqueue_blocks = 100\nhigh_watermark = 0.8\n[limits]\nleases_per_session = 7\n")
    monkeypatch.setenv("KVSTORED_MOVER__QUEUE_BLOCKS", "200")
    monkeypatch.setenv("KVSTORED_MOVER__HIGH_WATERMARK", "0.85")
    loaded = load_config(path, {"mover.queue_blocks": "300"})
    assert loaded.config.mover.queue_blocks == 300
    assert loaded.config.mover.high_watermark == 0.85
    assert loaded.config.limits.leases_per_session == 7
    assert loaded.origins["mover.queue_blocks"] == "--set"
    assert loaded.origins["mover.high_watermark"] == "environment KVSTORED_MOVER__HIGH_WATERMARK"
    assert loaded.origins["limits.leases_per_session"] == f"file {path}"
    assert loaded.origins["mover.low_watermark"] == "default"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("8GiB", 8 << 30), ("512 mib", 512 << 20), ("1.5GiB", 3 << 29), ("4096000", 4096000), ("4096KB", 4096000)],
)
def test_sizes_are_integers_or_text_with_a_unit(text, size_bytes):
    assert load_config(None, {"dram.capacity_bytes": text}).config.dram.capacity_bytes == size_bytes


def test_lists_are_json_or_items_between_commas(monkeypatch):
    monkeypatch.setenv("KVSTORED_NVME__PATHS", "/a,/b")
    assert load_config(None, {}).config.nvme.paths == [Path("/a"), Path("/b")]
    assert load_config(None, {"nvme.paths": '["/c, d"]'}).config.nvme.paths == [Path("/c, d")]
    assert load_config(None, {"nvme.paths": ""}).config.nvme.paths == []


def test_tenants_come_from_the_environment_as_json(monkeypatch):
    monkeypatch.setenv("KVSTORED_TENANTS", '[{"name": "search", "uids": [7], "dram_limit_bytes": "1GiB"}]')
    loaded = load_config(None, {})
    assert loaded.config.tenants[0].dram_limit_bytes == 1 << 30
    assert loaded.origins["tenants"] == "environment KVSTORED_TENANTS"


def test_variables_of_the_clients_are_not_settings(monkeypatch):
    monkeypatch.setenv("KVSTORED_ADDRESS", "unix:/somewhere")
    monkeypatch.setenv("KVSTORED_TRACES", "/traces")
    assert load_config(None, {}).config == Config()


def test_an_empty_text_turns_off_what_may_be_absent():
    assert load_config(None, {"server.grpc_socket": ""}).config.server.grpc_socket is None


def test_the_socket_mode_is_octal():
    assert load_config(None, {"server.socket_mode": "0600"}).config.server.socket_mode_bits == 0o600


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("dram.capacity_bytes", "lots", "size in bytes"),
        ("dram.capacity_bytes", "4097KiB4", "size in bytes"),
        ("dram.capacity_bytes", "8193KB", "multiple of 4096"),
        ("dram.capacity_bytes", "-1", "size in bytes"),
        ("dram.capacity_bytes", str(1 << 63), "less than 8 EiB"),
        ("dram.capacity_bytes", "9" * 400 + ".5GiB", "less than 8 EiB"),
        ("dram.capacity_bytes", "9" * 5000, "less than 8 EiB"),
        ("server.state_dir", "/a\0b", "zero byte"),
        ("nvme.paths", "/a\0b", "zero byte"),
        ("dram.huge_pages", "yes", "'auto' or 'never'"),
        ("dram.require_lock", "perhaps", "valid boolean"),
        ("nvme.extent_bytes", "16MiB", "greater than or equal to 33554432"),
        ("server.socket_mode", "rw", "octal"),
        ("server.tcp_address", "localhost", "host:port"),
        ("server.tcp_address", "localhost:99999", "host:port"),
        ("server.session_socket", "/" + "x" * 107, "at most 107 bytes"),
        ("mover.high_watermark", "1.1", "less than or equal to 1"),
        ("log.level", "loud", "'debug', 'info', 'warning' or 'error'"),
        ("policy.eviction", "random", "'lru'"),
    ],
)
def test_a_wrong_value_names_the_key_the_value_and_what_is_right(key, value, right):
    (line,) = problems(**{key: value})
    assert key in line
    assert repr(value)[1:-1][:40] in line
    assert "(--set)" in line
    assert right in line


def test_every_wrong_value_gets_a_line_of_its_own(tmp_path):
    path = write(tmp_path, '[dram]\nlock = "maybe"\n[server]\nmax_sessions = 0\n')
    lines = problems(path)
    assert [line.split()[0] for line in lines] == ["server.max_sessions", "dram.lock"]
    assert all(f"file {path}" in line for line in lines)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("dram.capcity_bytes", "dram.capacity_bytes"),
        ("drm.capacity_bytes", "dram"),
        ("eviction", "policy.eviction"),
        ("limits.lease_per_session", "limits.leases_per_session"),
    ],
)
def test_an_unknown_key_is_an_error_with_a_suggestion(key, meant):
    (line,) = problems(**{key: "1"})
    assert line.endswith(f"no such setting; did you mean {meant}?")


def test_an_unknown_variable_of_a_section_is_an_error(monkeypatch):
    monkeypatch.setenv("KVSTORED_DRAM__SIZE", "1")
    (line,) = problems()
    assert line == "dram.size (environment KVSTORED_DRAM__SIZE): no such setting"


def test_an_unknown_key_of_a_tenant_is_an_error_with_a_suggestion(tmp_path):
    path = write(tmp_path, '[[tenants]]\nname = "a"\nuids = [1]\ntoken_sha256 = []\n')
    (line,) = problems(path)
    assert line.endswith("did you mean tenants.0.tokens_sha256?")


def test_a_value_in_place_of_a_section_is_an_error(tmp_path):
    (line,) = problems(write(tmp_path, "dram = 8\n"), dram__capacity_bytes="1GiB")
    assert "dram" in line
    assert "must be a section" in line


def test_a_token_in_place_of_its_digest_is_not_repeated(tmp_path):
    path = write(tmp_path, '[[tenants]]\nname = "a"\ntokens_sha256 = ["hunter2"]\n')
    (line,) = problems(path)
    assert "SHA-256" in line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mover.low_watermark": "0.95"}, ["mover.low_watermark (0.95)", "mover.high_watermark (0.9)"]),
        ({"nvme.capacity_bytes": "256MiB"}, ["nvme.capacity_bytes", "twice nvme.extent_bytes"]),
        ({"nvme.paths": "/a,/a"}, ["nvme.paths", "twice"]),
        ({"dram.segment_bytes": "2GiB"}, ["dram.segment_bytes", "dram.capacity_bytes"]),
        ({"dram.lock": "never", "dram.require_lock": "true"}, ["dram.require_lock", '"auto"']),
        ({"dram.huge_pages": "never", "dram.require_huge_pages": "true"}, ["dram.require_huge_pages", '"auto"']),
        ({"limits.staging_bytes_per_session": "5GiB"}, ["staging_bytes_per_session", "limits.staging_bytes_total"]),
        ({"server.tcp_address": "[::1]:50051"}, ["server.tcp_address", "server.tls_certificate", "server.tls_key"]),
        ({"tenants": '[{"name": "a", "uids": [1]}, {"name": "b", "uids": [1]}]'}, ["uids", "'a'", "'b'"]),
        ({"tenants": '[{"name": "a", "uids": [1]}, {"name": "a", "uids": [2]}]'}, ["name", "'a'"]),
        ({"tenants": "[]"}, ["tenants", "at least 1"]),
        ({"tenants": "[{"}, ["tenants", "JSON"]),
    ],
)
def test_settings_that_contradict_each_other_are_named_together(settings, words):
    (line,) = problems(**settings)
    assert [word for word in words if word not in line] == []


def test_two_tenants_with_one_token_are_refused_without_showing_it():
    tenants = f'[{{"name": "a", "tokens_sha256": ["{DIGEST}"]}}, {{"name": "b", "tokens_sha256": ["{DIGEST}"]}}]'
    (line,) = problems(tenants=tenants)
    assert "a token" in line
    assert DIGEST not in line


def test_certificates_of_a_tenant_need_the_authority_that_signs_them():
    tenants = f'[{{"name": "a", "tokens_sha256": ["{DIGEST}"], "certificates": ["a.example"]}}]'
    tls = {"server.tcp_address": "h:1", "server.tls_certificate": "/c", "server.tls_key": "/k", "tenants": tenants}
    (line,) = problems(**tls)
    assert "tenants.certificates needs server.tls_client_ca" in line


def test_a_file_that_is_absent_or_no_toml_is_named(tmp_path):
    assert "No such file" in problems(tmp_path / "absent.toml")[0]
    path = write(tmp_path, "[dram\n")
    assert str(path) in problems(path)[0]
    assert "line 1" in problems(path)[0]


def test_an_address_may_be_a_name_or_either_kind_of_number():
    assert split_address("localhost:1") == ("localhost", 1)
    assert split_address("[::1]:9464") == ("::1", 9464)


def test_the_example_file_holds_every_setting_with_its_default(tmp_path):
    shipped = EXAMPLE.read_text()
    assert load_config(write(tmp_path, shipped), {}).config == Config()
    settings = re.sub(r"(?m)^#(?=[a-z_0-9]+ = |\[\[)", "", shipped)
    document = tomllib.loads(settings)
    assert set(document.pop("tenants")[0]) == set(type(Config().tenants[0]).model_fields)
    assert {f"{section}.{key}" for section in document for key in document[section]} | {"tenants"} == {
        key for key, _ in flatten(Config())
    }
    own = settings[: settings.index("[[tenants]]")]
    assert load_config(write(tmp_path, own), {}).config == Config()
