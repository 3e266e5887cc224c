import ctypes
import errno
import gc
import itertools
import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstored_client import mapping
from kvstored_client.errors import Unavailable
from kvstored_client.mapping import Mapping, Segments
from kvstored_client.session_page import open_page
from kvstored_client.staging import StagingRing

SIZE = 1 << 16


@pytest.fixture
def memfd():
    fd = os.memfd_create("client-memory-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def mapped():
    with open("/proc/self/maps") as maps:
        return sum("client-memory-test" in line for line in maps)


def test_a_tier_mapping_shows_the_bytes_and_takes_none(memfd):
    os.pwrite(memfd, b"kept", 4096)
    view = Mapping(os.dup(memfd), SIZE, writable=False).view(4096, 4)
    assert bytes(view) == b"kept"
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 0


def test_a_staging_mapping_is_the_daemons_memory(memfd):
    mapping = Mapping(os.dup(memfd), SIZE, writable=True)
    mapping.view(8, 3)[:] = b"abc"
    assert os.pread(memfd, 3, 8) == b"abc"


@pytest.mark.parametrize("size", [2 << 20, (4 << 20) + 4096])
def test_a_large_mapping_starts_where_huge_pages_can_and_leaves_no_reservation(memfd, size):
    os.ftruncate(memfd, size)
    before = reservations()
    mapping = Mapping(os.dup(memfd), size, writable=False)
    assert mapping.address % (2 << 20) == 0
    assert bytes(mapping.view(size - 1, 1)) == b"\0"
    assert reservations() - before == set()
    del mapping
    assert (reservations() - before, mapped()) == (set(), 0)


def reservations():
    """Address space that nobody may use, without that at the heaps and stacks of threads."""
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines if line[1] == "---p" and len(line) == 5]
    return {(first, last) for first, last in ranges if last - first < 8 << 20}


def test_a_view_past_the_end_is_refused(memfd):
    mapping = Mapping(os.dup(memfd), SIZE, writable=False)
    with pytest.raises(ValueError, match="65535 to 65537"):
        mapping.view(SIZE - 1, 2)


def test_a_segment_smaller_than_announced_is_refused_and_its_descriptor_closed_with_the_others(memfd):
    copy, segments = os.dup(memfd), Segments(lambda _: None)
    segments.add(1, copy, 2 * SIZE)
    with pytest.raises(Unavailable, match="smaller"):
        segments.get(1)
    segments.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copy)


@pytest.mark.parametrize("size", [SIZE, 4 << 20])
def test_what_could_not_be_mapped_is_mapped_another_time_and_no_reservation_is_left(memfd, size, monkeypatch):
    os.ftruncate(memfd, size)
    real, before = mapping._LIBC, reservations()

    class Full:
        """No address space for what has a descriptor."""

        munmap, madvise = real.munmap, real.madvise

        @staticmethod
        def mmap(address, length, protection, flags, fd, offset):
            if fd >= 0:
                ctypes.set_errno(errno.ENOMEM)
                return mapping._MAP_FAILED
            return real.mmap(address, length, protection, flags, fd, offset)

    segments, ring = Segments(lambda _: None), StagingRing(os.dup(memfd), size)
    segments.add(1, os.dup(memfd), size)
    with monkeypatch.context() as patch:
        patch.setattr(mapping, "_LIBC", Full)
        for _ in range(2):
            with pytest.raises(Unavailable, match="Cannot allocate memory"):
                segments.get(1)
            with pytest.raises(Unavailable, match="Cannot allocate memory"):
                ring.mapping  # noqa: B018
    assert reservations() - before == set()
    assert segments.get(1).size_bytes == ring.mapping.size_bytes == size
    segments.close()
    ring.close()


@pytest.mark.parametrize("lacking", ["finalize", "ref"])
def test_where_there_is_no_memory_for_a_mapping_its_descriptor_is_closed_once(memfd, monkeypatch, lacking):
    """Closed twice, it would be another file's the second time."""

    def no_memory(*_):
        raise MemoryError

    segments, ring = Segments(lambda _: None), StagingRing(os.dup(memfd), SIZE)
    segments.add(1, os.dup(memfd), SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(mapping.weakref, lacking, no_memory)
        with pytest.raises(MemoryError):
            segments._map(1)
        with pytest.raises(MemoryError):
            ring.mapping  # noqa: B018
    assert mapped() == 0
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    segments.close()
    ring.close()
    for other in others:
        os.close(other)


def test_what_could_not_be_mapped_while_its_session_ended_is_closed(memfd, monkeypatch):
    copies = os.dup(memfd), os.dup(memfd)
    segments, ring = Segments(lambda _: None), StagingRing(copies[1], SIZE)
    segments.add(1, copies[0], SIZE)

    def overtaken(*_):
        segments.close()
        ring.close()
        raise Unavailable("no address space")

    monkeypatch.setattr(mapping, "_map", overtaken)
    with pytest.raises(Unavailable):
        segments.get(1)
    with pytest.raises(Unavailable):
        ring.mapping  # noqa: B018
    for copy in copies:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(copy)


def test_a_session_page_that_cannot_be_mapped_is_closed(memfd):
    copy = os.dup(memfd)
    assert open_page(copy, 2 * SIZE) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copy)


def test_memory_stays_mapped_exactly_as_long_as_something_refers_to_it(memfd):
    mapping = Mapping(os.dup(memfd), SIZE, writable=False)
    array = np.frombuffer(mapping.view(0, 16), np.uint8)
    del mapping
    gc.collect()
    assert mapped() == 1
    assert array.sum() == 0
    del array
    gc.collect()
    assert mapped() == 0


def test_a_segment_is_mapped_at_its_first_use_only(memfd):
    segments = Segments(lambda _: None)
    segments.add(3, os.dup(memfd), SIZE)
    assert (mapped(), segments.unmapped_bytes([3])) == (0, SIZE)
    assert segments.get(3) is segments.get(3)
    assert (mapped(), segments.unmapped_bytes([3])) == (1, 0)
    segments.close()
    assert mapped() == 0


def test_a_retired_segment_is_reported_dropped_when_its_last_view_goes(memfd):
    dropped = []
    segments = Segments(dropped.append)
    segments.add(3, os.dup(memfd), SIZE)
    view = segments.get(3).view(0, 8)
    segments.retire([3])
    assert dropped == []
    view.release()
    assert dropped == [3]
    assert mapped() == 0
    with pytest.raises(Unavailable):
        segments.get(3)


def test_a_retired_segment_that_was_never_used_is_dropped_at_once(memfd):
    dropped = []
    segments = Segments(dropped.append)
    copy = os.dup(memfd)
    segments.add(3, copy, SIZE)
    segments.retire([3, 99])
    assert dropped == [3, 99]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copy)


def test_a_closed_table_reports_nothing(memfd):
    dropped = []
    segments = Segments(dropped.append)
    segments.add(3, os.dup(memfd), SIZE)
    segments.get(3)
    segments.close()
    assert (dropped, mapped()) == ([], 0)


def test_a_forked_child_does_not_have_the_memory(memfd):
    mapping = Mapping(os.dup(memfd), SIZE, writable=False)
    pid = os.fork()
    if pid == 0:
        os._exit(mapped())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert mapped() == 1
    del mapping


def test_a_forked_child_that_drops_a_mapping_unmaps_nothing(memfd):
    mapping = Mapping(os.dup(memfd), SIZE, writable=False)
    pid = os.fork()
    if pid == 0:
        # The range is free in the child; whatever comes to lie there is none of the mapping's business.
        code = 1
        try:
            own = _map_at(mapping.address)
            del mapping
            gc.collect()
            code = 0 if own[0] == 42 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _map_at(address):
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    assert libc.mmap(address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
    own = (ctypes.c_ubyte * SIZE).from_address(address)
    own[0] = 42
    return own


# ---- the staging ring ----


def ring(pages=16):
    return StagingRing(-1, pages * mmap.PAGESIZE)


@pytest.mark.parametrize("used", [False, True])
def test_a_ring_that_another_thread_has_closed_is_unavailable(memfd, used):
    closed = StagingRing(os.dup(memfd), SIZE)
    if used:
        assert closed.mapping.size_bytes == SIZE
    closed.close()
    with pytest.raises(Unavailable):
        _ = closed.mapping


def test_regions_do_not_overlap_and_start_on_pages():
    full = ring(4)
    regions = [full.take(5000), full.take(1), full.take(4096)]
    assert [(r.offset, r.size_bytes) for r in regions[:2]] == [(0, 8192), (8192, 4096)]
    assert regions[2].offset == 12288
    assert full.take(1) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20000)), max_size=60))
def test_whatever_is_taken_and_returned_the_account_adds_up(steps):
    shared, held = ring(), []
    for take, size in steps:
        if take:
            region = shared.take(size)
            if region is not None:
                held.append(region)
        elif held:
            shared.give_back(held.pop(size % len(held)))
        ends = sorted((r.offset, r.offset + r.size_bytes) for r in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert shared.free_bytes + sum(r.size_bytes for r in held) == shared.size_bytes
    for region in held:
        shared.give_back(region)
    assert shared.take(shared.size_bytes) is not None, "returned regions join into one again"
