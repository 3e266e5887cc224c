import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.device import memory
from kvstored.device.memory import MODE_CLIENTS_WRITE, PIECE_BYTES, Mapping
from kvstored.errors import DeviceError
from tests.descriptors import descriptors

MIB = 1 << 20


@pytest.fixture
def mapping():
    made = Mapping(2 * MIB, name="test")
    yield made
    made.close()


@pytest.fixture
def other():
    made = Mapping(2 * MIB, name="test")
    yield made
    made.close()


def allocated_bytes(mapping):
    return os.fstat(mapping.fd).st_blocks * 512


# ---- sealing ----


@pytest.mark.parametrize("size", [0, 4096, 4 * MIB])
def test_nobody_can_change_the_size_of_a_mapping(mapping, size):
    with pytest.raises(PermissionError):
        os.ftruncate(mapping.fd, size)


def test_the_seals_cannot_be_added_to(mapping):
    with pytest.raises(PermissionError):
        fcntl.fcntl(mapping.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_read_only_descriptor_cannot_be_mapped_for_writing(mapping):
    fd = mapping.read_only_fd()
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, mapping.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.pwrite(fd, b"x", 0)
    finally:
        os.close(fd)


def test_a_read_only_descriptor_shows_what_is_written_here(mapping):
    fd = mapping.read_only_fd()
    with mmap.mmap(fd, mapping.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as theirs, mapping.view() as ours:
        os.close(fd)
        ours[4096:4101] = b"hello"
        assert theirs[4096:4101] == b"hello"


def test_modes_say_what_clients_may_do_and_nobody_else_may_do_anything(mapping):
    staging = Mapping(4096, name="test", mode=MODE_CLIENTS_WRITE)
    assert os.fstat(mapping.fd).st_mode & 0o7777 == 0o400
    assert os.fstat(staging.fd).st_mode & 0o7777 == 0o600
    staging.close()


REOPEN = """
import os, sys
try:
    os.setgid(65534); os.setuid(65534)
except OSError:
    print("alone"); sys.exit()
try:
    os.open(f"/proc/self/fd/{sys.argv[1]}", os.O_RDWR)
except PermissionError:
    print("refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_a_read_only_descriptor_again_for_writing(mapping):
    fd = mapping.read_only_fd()
    try:
        run = [sys.executable, "-I", "-c", REOPEN, str(fd)]
        done = subprocess.run(run, pass_fds=[fd], capture_output=True, text=True, check=True)
    finally:
        os.close(fd)
    if done.stdout == "alone\n":
        pytest.skip("there is no other user in this namespace")
    assert done.stdout == "refused\n"


def test_descriptors_are_not_inherited_by_programs_that_are_started(mapping):
    fd = mapping.read_only_fd()
    assert not os.get_inheritable(fd)
    assert not os.get_inheritable(mapping.fd)
    os.close(fd)


# ---- memory ----


def test_memory_comes_with_populate_and_goes_with_punch(mapping):
    assert allocated_bytes(mapping) == 0
    mapping.populate()
    assert allocated_bytes(mapping) == mapping.size_bytes
    mapping.punch()
    assert allocated_bytes(mapping) == 0


def test_populating_keeps_what_is_there(mapping):
    ctypes.memset(mapping.address, 7, 4096)
    mapping.populate()
    assert ctypes.string_at(mapping.address, 4096) == b"\7" * 4096


def test_populating_works_on_kernels_without_the_advice_for_it(mapping, monkeypatch):
    def refused(address, size, advice):
        ctypes.set_errno(errno.EINVAL)
        return -1

    ctypes.memset(mapping.address, 7, 4096)
    monkeypatch.setattr(memory, "_madvise", refused)
    mapping.populate()
    assert allocated_bytes(mapping) == mapping.size_bytes
    assert ctypes.string_at(mapping.address, 4096) == b"\7" * 4096


def test_no_memory_is_a_device_error_that_says_so(mapping, monkeypatch):
    def refused(address, size, advice):
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(memory, "_madvise", refused)
    with pytest.raises(DeviceError, match="populating shared memory: Cannot allocate memory"):
        mapping.populate()


def test_a_refused_lock_is_an_answer_and_no_error(mapping, monkeypatch):
    monkeypatch.setattr(memory, "_mlock", lambda address, size: -1)
    assert mapping.lock() is False


def locked_kib():
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmLck:") + 1])


@pytest.mark.skipif(
    os.geteuid() != 0 and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] in range(4096),
    reason="this user may not lock any memory",
)
def test_a_page_can_be_locked():
    gc.collect()  # what earlier tests left is unlocked now, not meanwhile
    made, before = Mapping(4096, name="test"), locked_kib()
    assert made.lock() is True
    assert locked_kib() == before + 4
    made.close()


def test_zero_touches_its_range_only(mapping):
    ctypes.memset(mapping.address, 7, 3 * 4096)
    mapping.zero(4096, 4096)
    assert ctypes.string_at(mapping.address, 3 * 4096) == b"\7" * 4096 + bytes(4096) + b"\7" * 4096
    mapping.zero()
    assert ctypes.string_at(mapping.address, 3 * 4096) == bytes(3 * 4096)


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 2 * MIB + 1), (2 * MIB, 1), (1, -1)])
def test_zeroing_outside_of_a_mapping_is_a_mistake(mapping, offset, size):
    with pytest.raises(AssertionError, match="inside"):
        mapping.zero(offset, size)


def maps_of_this_process():
    return sum("memfd:gone" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_close_unmaps_and_is_harmless_when_repeated():
    made = Mapping(MIB, name="gone")
    fd = made.fd
    assert maps_of_this_process() == 1
    made.close()
    made.close()
    assert maps_of_this_process() == 0
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)


def test_a_forgotten_mapping_is_unmapped():
    Mapping(MIB, name="gone")
    assert maps_of_this_process() == 0


def test_a_mapping_that_cannot_be_made_leaves_nothing(monkeypatch):
    def refused(*args):
        ctypes.set_errno(errno.ENOMEM)
        return memory._MAP_FAILED

    before = descriptors()
    monkeypatch.setattr(memory, "_mmap", refused)
    with pytest.raises(DeviceError, match="making 4096 bytes"):
        Mapping(4096, name="test")
    assert descriptors() == before


def test_without_reserved_or_transparent_huge_pages_it_makes_do_with_small_ones(monkeypatch):
    monkeypatch.setattr(Mapping, "_map_reserved_pages", lambda self, name: False)
    monkeypatch.setattr(memory, "_transparent_pages_allowed", lambda: False)
    monkeypatch.setattr(Mapping, "_collapse", lambda self, size: False)
    made = Mapping(2 * MIB, name="test", huge_pages=True)
    assert made.pages == "4k"
    made.close()


def a_huge_page_is_to_be_had():
    """Whether the kernel makes one of other memory of this process."""
    plain = mmap.mmap(-1, 4 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(plain)) % (2 * MIB)
    plain[first] = 1
    try:
        plain.madvise(memory._MADV_COLLAPSE, first, 2 * MIB)
    except OSError:
        return False
    return True


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1), reason="Linux 6.1 has it")
def test_populating_makes_huge_pages_whatever_the_systems_setting_and_keeps_what_is_there(monkeypatch):
    monkeypatch.setattr(Mapping, "_map_reserved_pages", lambda self, name: False)
    made = Mapping(4 * MIB + 4096, name="test", huge_pages=True)
    memory.view(made.address + 2 * MIB, 5, writable=True)[:] = b"there"
    made.populate()
    if made.pages != "thp" and not a_huge_page_is_to_be_had():
        pytest.skip("the kernel makes no huge page: it has none, or no 2 MiB of memory lie together")
    assert made.pages == "thp"
    assert bytes(memory.view(made.address + 2 * MIB, 5)) == b"there"
    assert bytes(memory.view(made.address, 2 * MIB)) == bytes(2 * MIB)
    made.close()


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [("always [advise] never", True), ("[always] advise never", True), ("always advise [never]", False), (None, False)],
)
def test_transparent_huge_pages_are_reported_only_where_the_kernel_permits_them(
    monkeypatch, tmp_path, setting, allowed
):
    path = tmp_path / "shmem_enabled"
    if setting:
        path.write_text(setting)
    monkeypatch.setattr(memory, "_SHMEM_HUGE", path)
    monkeypatch.setattr(Mapping, "_map_reserved_pages", lambda self, name: False)
    made = Mapping(2 * MIB, name="test", huge_pages=True)
    assert made.pages == ("thp" if allowed else "4k")
    made.close()


def free_huge_pages():
    meminfo = Path("/proc/meminfo").read_text().split()
    return int(meminfo[meminfo.index("HugePages_Free:") + 1]) if "HugePages_Free:" in meminfo else 0


@pytest.mark.skipif(free_huge_pages() < 1, reason="no huge pages are reserved (vm.nr_hugepages)")
def test_reserved_huge_pages_are_used_sealed_and_given_back():
    made = Mapping(2 * MIB, name="test", huge_pages=True)
    made.populate()
    with pytest.raises(PermissionError):
        os.ftruncate(made.fd, 0)
    made.punch()
    os.close(made.read_only_fd())
    assert made.pages == "hugetlb"
    made.close()


def test_reserved_huge_pages_count_as_available(monkeypatch, tmp_path):
    path = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "_MEMINFO", path)
    path.write_text("MemAvailable:  1024 kB\n")
    assert memory.available_bytes() == MIB
    path.write_text("MemAvailable:  1024 kB\nHugePages_Free:  3\nHugepagesize:  2048 kB\n")
    assert memory.available_bytes() == 7 * MIB


# ---- copies and hashes ----


def fill(mapping, data):
    ctypes.memmove(mapping.address, data, len(data))


@settings(deadline=None, max_examples=25)
@given(
    size=st.one_of(st.integers(1, 9000), st.integers(PIECE_BYTES - 2, PIECE_BYTES + 2), st.integers(1, 3 * PIECE_BYTES))
)
def test_copies_are_exact_hashed_and_padded_with_zeros_to_4_kib(size):
    source, target = Mapping(2 * MIB, name="test"), Mapping(2 * MIB, name="test")
    data = os.urandom(4096) * (size // 4096 + 1)
    fill(source, data)
    ctypes.memset(target.address, 7, target.size_bytes)
    content_hash = memory.copy_and_hash(target.address, source.address, size)
    end = -(-size // 4096) * 4096
    assert content_hash == xxhash.xxh3_128_digest(data[:size])
    assert ctypes.string_at(target.address, end + 1) == data[:size] + bytes(end - size) + b"\7"
    source.close()
    target.close()


@pytest.mark.parametrize("size", [5000, PIECE_BYTES + 5000])
def test_the_hash_is_of_what_was_stored_even_where_the_source_changes_meanwhile(mapping, other, monkeypatch, size):
    copy = ctypes.memmove

    def copy_then_scribble(dst, src, count):
        copy(dst, src, count)
        ctypes.memset(src, 0xFF, count)

    fill(mapping, os.urandom(size))
    monkeypatch.setattr(memory.ctypes, "memmove", copy_then_scribble)
    content_hash = memory.copy_and_hash(other.address, mapping.address, size)
    assert content_hash == xxhash.xxh3_128_digest(ctypes.string_at(other.address, size))
    assert content_hash != memory.hash_bytes(mapping.address, size)


def test_batches_answer_in_order(mapping, other):
    fill(mapping, os.urandom(MIB))
    copies = [(other.address + i * 8192, mapping.address + i * 8192, 8000 + i) for i in range(5)]
    hashes = memory.copy_and_hash_many(copies)
    assert hashes == [memory.hash_bytes(src, size) for _, src, size in copies]
    assert hashes == memory.hash_many([(dst, size) for dst, _, size in copies])
    assert len(set(hashes)) == 5


def test_a_plain_copy_copies(mapping, other):
    fill(mapping, b"abc")
    memory.copy(other.address + 1, mapping.address, 3)
    assert ctypes.string_at(other.address, 5) == b"\0abc\0"


def test_a_view_is_writable_only_when_asked(mapping):
    assert memory.view(mapping.address, 10).readonly
    assert not memory.view(mapping.address, 10, writable=True).readonly


def test_a_mapping_that_fails_leaves_the_memory_of_others_alone(monkeypatch):
    real, theirs = memory._map_at, []

    def fails_after_unmapping(address, size, protection, flags, fd):
        if address is None:
            return real(address, size, protection, flags, fd)
        # The kernel unmaps what was there before it fails, and another thread is quick to map there.
        memory._munmap(address, size)
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | memory._MAP_FIXED
        theirs.append((real(address, size, mmap.PROT_READ, anonymous, -1), size))
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(memory, "_map_at", fails_after_unmapping)
    with pytest.raises(DeviceError, match="Cannot allocate memory"):
        Mapping(2 * MIB, name="t")
    ((address, size),) = theirs
    assert memory._madvise(address, size, 0) == 0, "still mapped"
    assert memory._munmap(address, size) == 0


def test_mappings_made_by_threads_at_once_stay_mapped():
    def make_and_use(_):
        made = Mapping(2 * MIB, name="t", huge_pages=True)
        made.populate()
        fill(made, b"abc")
        made.close()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(make_and_use, range(100))) == [None] * 100
