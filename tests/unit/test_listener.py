import os
import socket
import stat

import pytest

from kvstored.rpc.listener import bind_unix, clear_stale


@pytest.fixture
def path(tmp_path):
    return tmp_path / "below" / "s.sock"


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_a_socket_has_exactly_its_mode(path, mode):
    old = os.umask(0o077)
    try:
        with bind_unix(path, mode):
            assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        assert os.umask(old) == 0o077


def test_a_socket_that_nobody_answers_on_is_replaced(path):
    bind_unix(path, 0o600).close()
    with bind_unix(path, 0o600), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_socket_that_somebody_answers_on_stays(path):
    with bind_unix(path, 0o600):
        with pytest.raises(FileExistsError, match="another process serves"):
            bind_unix(path, 0o600)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_listener_with_a_full_backlog_is_somebody(path):
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        waiting = []
        for _ in range(3):
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            client.connect_ex(str(path))
            waiting.append(client)
        with pytest.raises(FileExistsError, match="another process serves"):
            clear_stale(path)
        for client in waiting:
            client.close()


def test_a_file_that_is_no_socket_is_not_touched(path):
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="not a socket"):
        bind_unix(path, 0o600)
    assert path.read_text() == "precious"


def test_a_link_is_not_followed(path, tmp_path):
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="not a socket"):
        clear_stale(path)


def test_a_directory_that_cannot_be_made_is_told_with_the_settings_that_choose_it(tmp_path):
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(OSError, match=r"server\.session_socket"):
        clear_stale(tmp_path / "file" / "below" / "s.sock")


def test_nothing_is_in_the_way_of_a_new_socket(path):
    clear_stale(path)
    assert path.parent.is_dir()
