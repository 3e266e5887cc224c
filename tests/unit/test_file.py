"""Files and the bounded set of open ones."""

import errno
import os
import threading
from pathlib import Path

import pytest

from kvstored.device.file import AlignedBuffer, FileDevice, NoSpace
from kvstored.device.handles import OpenFiles
from kvstored.errors import DeviceError
from kvstored.testing.faulty import FakeDevice, Faults
from kvstored.testing.simulated_device import SimulatedDevice
from tests.descriptors import descriptors


@pytest.fixture
def device():
    return FileDevice()


def buffer_of(data):
    buffer = AlignedBuffer(len(data))
    buffer.set(0, data)
    return buffer


def test_pieces_are_written_and_read_one_behind_the_other(device, tmp_path):
    file = device.open(tmp_path / "f", direct=device.allows_direct_io(__file__))
    data = os.urandom(5 * 4096)
    source, target = buffer_of(data), AlignedBuffer(len(data))
    device.write(file, 8192, [(source.address, 4096), (source.address + 4096, 4 * 4096)])
    device.read(file, 8192, [(target.address, 3 * 4096), (target.address + 3 * 4096, 2 * 4096)])
    assert target.get(0, len(data)) == data
    assert device.size_bytes(file) == 8192 + len(data)
    device.close(file)


@pytest.mark.parametrize("seed", range(5))
def test_short_reads_and_writes_are_completed(tmp_path, seed):
    device = FakeDevice(seed, Faults(short=0.5))
    file = device.open(tmp_path / "f", direct=False)
    data = os.urandom(3 * 4096)
    source, target = buffer_of(data), AlignedBuffer(len(data))
    pieces = [(0, 4096), (4096, 8192)]
    device.write(file, 0, [(source.address + at, size) for at, size in pieces])
    device.read(file, 0, [(target.address + at, size) for at, size in pieces])
    assert target.get(0, len(data)) == data
    device.close(file)


def test_reading_past_the_end_is_an_error_and_not_zeros(device, tmp_path):
    file = device.open(tmp_path / "f", direct=False)
    device.write_bytes(file, 0, b"x" * 4096)
    with pytest.raises(DeviceError, match="ends here"):
        device.read_bytes(file, 0, 8192)
    device.close(file)


def test_small_bytes_are_padded_with_zeros(device, tmp_path):
    file = device.open(tmp_path / "f", direct=device.allows_direct_io(__file__))
    device.write_bytes(file, 0, b"hello")
    assert device.read_bytes(file, 0, 4096) == b"hello".ljust(4096, b"\0")
    device.close(file)


def test_a_full_file_system_is_told_from_a_broken_one(tmp_path):
    device = FakeDevice(faults=Faults(space_bytes=4096))
    file = device.open(tmp_path / "f", direct=False)
    device.write_bytes(file, 0, b"x" * 4096)
    with pytest.raises(NoSpace):
        device.write_bytes(file, 4096, b"x")
    device.faults = Faults(write_error=1.0)
    with pytest.raises(DeviceError) as raised:
        device.write_bytes(file, 4096, b"x")
    assert not isinstance(raised.value, NoSpace)
    device.close(file)


def test_opening_below_a_file_is_a_device_error(device, tmp_path):
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(DeviceError, match="opening"):
        device.open(tmp_path / "f" / "g", direct=False)
    with pytest.raises(DeviceError, match="making the directory"):
        device.make_directory(tmp_path / "f" / "g")


def test_a_directory_is_locked_once(device, tmp_path):
    lock = device.lock_directory(tmp_path)
    assert device.lock_directory(tmp_path) is None
    device.unlock(lock)
    again = device.lock_directory(tmp_path)
    assert again is not None
    device.unlock(again)


def test_replacing_a_file_leaves_nothing_else_behind(device, tmp_path):
    path = tmp_path / "small"
    assert device.read_whole(path) is None
    device.replace(path, b"one")
    device.replace(path, b"two")
    assert device.read_whole(path) == b"two"
    device.replace(path, b"")
    assert device.read_whole(path) == b""
    assert list(tmp_path.iterdir()) == [path]


# --- open files ---


def test_idle_files_are_closed_beyond_the_limit(device, tmp_path):
    files = OpenFiles(device, direct=False, limit=3)
    before = descriptors()
    for i in range(10):
        with files.use(tmp_path / f"{i}"):
            pass
    assert descriptors() == before + 3
    files.close()
    assert descriptors() == before


def test_a_file_in_use_stays_open_beyond_the_limit(device, tmp_path):
    files = OpenFiles(device, direct=False, limit=1)
    with files.use(tmp_path / "a") as a:
        for i in range(5):
            with files.use(tmp_path / f"{i}"):
                pass
        assert os.fstat(a.descriptor)
        with files.use(tmp_path / "a") as again:
            assert again is a
    files.close()


def test_threads_share_one_descriptor_of_a_file(device, tmp_path):
    files = OpenFiles(device, direct=False, limit=4)
    seen, barrier = [], threading.Barrier(4)

    def use():
        with files.use(tmp_path / "a") as file:
            barrier.wait(60)
            seen.append(file.descriptor)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seen)) == 1
    files.close()


def test_a_small_file_is_replaced_whole_even_by_nothing(device, tmp_path):
    path = tmp_path / "small"
    assert device.read_whole(path) is None
    for data in (b"some bytes", b"", b"others"):
        device.replace(path, data)
        assert device.read_whole(path) == data
    assert os.listdir(tmp_path) == ["small"]


def test_the_name_of_a_new_directory_is_durable(tmp_path):
    class Watched(FileDevice):
        def _sync_directory(self, path):
            synced.append(path)
            super()._sync_directory(path)

    synced = []
    Watched().make_directory(tmp_path / "a" / "b")
    assert [path for path in synced if path != tmp_path.parent] == [tmp_path, tmp_path / "a"]


def failing_sync_of(device, monkeypatch, path, *, error=errno.EROFS):
    """The next sync of that directory fails."""
    sync, failing = device._sync_directory, [path]

    def sync_directory(directory):
        if directory in failing:
            failing.remove(directory)
            raise OSError(error, os.strerror(error))
        sync(directory)

    monkeypatch.setattr(device, "_sync_directory", sync_directory)


@pytest.mark.parametrize("at", ["/", "/a", "/a/b"])
def test_a_directory_whose_name_could_not_be_synced_is_durable_once_making_it_succeeds(monkeypatch, at):
    device, path = SimulatedDevice(), Path("/a/b/c")
    failing_sync_of(device, monkeypatch, Path(at))
    with pytest.raises(DeviceError, match="making the directory"):
        device.make_directory(path)
    device.restarted()  # and the next process knows nothing of it
    failing_sync_of(device, monkeypatch, Path(at))  # it still fails: then it must not be said to be there
    with pytest.raises(DeviceError, match="making the directory"):
        device.make_directory(path)
    device.make_directory(path)
    for folder in (Path("/"), Path("/a"), Path("/a/b")):
        device.disk.folder(folder).power_cut(lambda: False)
    assert device.exists(path)


def test_a_directory_in_one_that_belongs_to_others_is_fine(monkeypatch):
    device, path = SimulatedDevice(), Path("/a/b")
    device.make_directory(path)
    failing_sync_of(device, monkeypatch, Path("/a"), error=errno.EACCES)
    device.make_directory(path)
