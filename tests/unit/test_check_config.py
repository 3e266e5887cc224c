from __future__ import annotations

import json
import os

import pytest

from kvstored import __main__ as command
from kvstored.config.schema import Config, flatten
from kvstored.daemon import process
from kvstored.device.state_directory import StateDirectory
from kvstored.errors import ConfigError
from kvstored.reporting import logs
from kvstored.tenancy.file import FILE_NAME, write_changes
from kvstored.tenancy.merge import Change, Changes


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("KVSTORED_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that would have been served."""
    configs: list[Config] = []

    def run(config: Config) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setattr(logs, "configure", lambda format, level: None)
    return configs


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    return int(stopped.value.code or 0)


def test_it_prints_every_setting_with_its_origin(capsys, monkeypatch):
    monkeypatch.setenv("KVSTORED_LOG__LEVEL", "debug")
    assert run("check-config", "--set", "dram.capacity_bytes=2GiB") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["setting", *(key for key, _ in flatten(Config()))]
    assert ["dram.capacity_bytes", "2147483648", "--set"] in rows
    assert ["log.level", "debug", "environment", "KVSTORED_LOG__LEVEL"] in rows
    assert ["limits.requests_in_flight", "64", "default"] in rows


def test_as_json_it_is_one_object(capsys):
    assert run("check-config", "-o", "json", "--set", "nvme.paths=/a") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["settings"]["nvme.paths"] == {"value": ["/a"], "origin": "--set"}
    assert report["settings"].keys() == {key for key, _ in flatten(Config())}


def test_the_file_comes_from_the_option_or_from_the_environment(capsys, tmp_path, monkeypatch):
    path = tmp_path / "k.toml"
    path.write_text("[server]\nmax_sessions = 3\n")
    assert run("check-config", "--config", str(path)) == 0
    by_option = capsys.readouterr().out
    monkeypatch.setenv("KVSTORED_CONFIG", str(path))
    assert run("check-config") == 0
    assert capsys.readouterr().out == by_option
    assert f"file {path}" in by_option


def test_wrong_settings_are_lines_on_standard_error_and_exit_1(capsys):
    assert run("check-config", "--set", "dram.lock=x", "--set", "server.max_sessions=0") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split()[:2] for line in err.splitlines()] == [
        ["kvstored:", "server.max_sessions"],
        ["kvstored:", "dram.lock"],
    ]


def test_wrong_settings_as_json_are_one_object_and_exit_1(capsys):
    assert run("check-config", "-o", "json", "--set", "dram.lock=x") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["errors"][0].startswith("dram.lock (--set): 'x' must be")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("dram.capacity_bytes=16GiB", "dram.segment_bytes=1MiB"), "16384 segments"),
        (("dram.capacity_bytes=64TiB", "dram.segment_bytes=8GiB"), "at most 4294967296"),
        ((f"nvme.paths={json.dumps([f'/n{n}' for n in range(65)])}",), "64"),
    ],
)
def test_what_no_daemon_could_serve_with_is_wrong_before_one_is_started(capsys, settings, words):
    assert run("check-config", *(f"--set={setting}" for setting in settings)) == 1
    assert words in capsys.readouterr().err


def test_tenants_that_do_not_go_with_those_on_file_are_wrong(capsys, tmp_path):
    state = StateDirectory(tmp_path)
    write_changes(state, Changes({"b": Change("b", made=True, fields={"uids": [5]})}))
    own = ("check-config", "--set", f"server.state_dir={tmp_path}", "--set")
    try:
        assert run(*own, f"tenants={json.dumps([{'name': 'a', 'uids': [6]}])}") == 0, "though a daemon has it"
        assert run(*own, f"tenants={json.dumps([{'name': 'a', 'uids': [5]}])}") == 1
        assert "5 stands in uids of both" in capsys.readouterr().err
        (tmp_path / FILE_NAME).write_bytes(b"{")
        assert run(*own, "log.level=debug") == 1
        assert "damaged" in capsys.readouterr().err
    finally:
        state.close()


def test_only_the_start_of_a_token_digest_is_shown(capsys):
    digest = "0123456789abcdef" * 4
    tenants = json.dumps([{"name": "a", "tokens_sha256": [digest]}])
    for output in ("table", "json"):
        assert run("check-config", "-o", output, "--set", f"tenants={tenants}") == 0
        shown = capsys.readouterr().out
        assert digest[:8] in shown
        assert digest not in shown


@pytest.mark.parametrize("arguments", [(), ("serve",)])
def test_serving_is_the_command_when_none_is_given(served, arguments):
    assert run(*arguments) == 0
    assert served == [Config()]


def test_options_alone_mean_serve(served):
    assert run("--set", "server.max_sessions=5") == 0
    assert served[0].server.max_sessions == 5


def test_a_setting_without_a_value_is_wrong_usage(served, capsys):
    assert run("--set", "server.max_sessions") == 2
    assert "KEY=VALUE" in capsys.readouterr().err
    assert served == []


def test_wrong_settings_stop_the_daemon_with_a_code_of_their_own(served, capsys):
    assert run("serve", "--set", "server.max_sessions=0") == command.EXIT_CONFIG
    assert "server.max_sessions" in capsys.readouterr().err
    assert served == []


def test_what_only_the_machine_can_tell_is_reported_the_same_way(served, monkeypatch, capsys):
    def refuse(config: Config) -> int:
        raise ConfigError("nvme.paths: /x is held by another daemon")

    monkeypatch.setattr(process, "run", refuse)
    assert run("serve") == command.EXIT_CONFIG
    assert capsys.readouterr().err == "kvstored: nvme.paths: /x is held by another daemon\n"


def test_the_exit_status_of_the_daemon_is_passed_on(served, monkeypatch):
    monkeypatch.setattr(process, "run", lambda config: 1)
    assert run("serve") == 1


def test_version_and_help_do_not_serve(served, capsys):
    assert run("version") == 0
    assert run("--help") == 0
    assert "check-config" in capsys.readouterr().out
    assert served == []
