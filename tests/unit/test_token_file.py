from pathlib import Path

import pytest
from kvstored_client import AsyncClient, Client
from kvstored_client.errors import Unavailable
from kvstored_client.token_file import TOKEN_FILE_VARIABLE, read_token_file, token_path


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv(TOKEN_FILE_VARIABLE, raising=False)


def test_a_file_that_is_named_counts_over_the_environment_and_a_token_over_both(monkeypatch):
    assert token_path(None, None) is None
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, "/from/environment")
    assert token_path(None, None) == Path("/from/environment")
    assert token_path(None, "/named") == Path("/named")
    assert token_path("t", None) is None
    assert token_path("", None) is None


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_token_and_a_file_exclude_each_other(kind):
    with pytest.raises(ValueError, match="exclude each other"):
        kind("unix:/nowhere", token="t", token_file="/f")


def test_the_white_space_around_a_token_is_not_part_of_it(tmp_path):
    (tmp_path / "token").write_text(" kvs_1\n\n")
    assert read_token_file(tmp_path / "token") == "kvs_1"


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"x" * 5000])
def test_what_is_no_token_is_said_without_showing_it(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(Unavailable, match=f"token file {path}") as said:
        read_token_file(path)
    assert "xxx" not in str(said.value)


def test_a_client_without_its_file_goes_on_without_the_daemon(tmp_path):
    with Client("unix:/nowhere", token_file=tmp_path / "absent") as client:
        assert not client.connected
