import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.device.memory import Mapping
from kvstored.errors import CorruptData, DeviceError
from kvstored.keys import Namespace
from kvstored.tiers import registry as layout
from kvstored.tiers.registry import Registry
from tests.watched import Watched


def namespace(number, tenant="acme", size=40):
    return Namespace(tenant, bytes([number]) * 16, bytes([number]) * size, {"model": str(number)})


def reopened(data):
    """A registry over a copy of the bytes, as the next process finds them."""
    copy = Mapping(len(data), name="copy")
    os.pwrite(copy.fd, data, 0)
    fd = os.dup(copy.fd)
    copy.close()
    return Registry.adopt(fd)


def state(log):
    return log.boot, log.last_segment_id, dict(log.segments), dict(log.namespaces)


def test_the_next_process_reads_what_was_noted():
    log = Registry()
    assert log.note_boot(3)
    assert log.note_segment(7, "thp")
    assert log.note_segment(9, "4k")
    assert log.note_gone(9)
    assert log.note_namespace(namespace(1))
    found = reopened(bytes(log._table))
    assert state(found) == state(log) == (3, 9, {7: "thp"}, {bytes([1]) * 16: namespace(1)})
    assert found.note_segment(10, "4k")
    assert reopened(bytes(found._table)).segments == {7: "thp", 10: "4k"}
    for each in (log, found):
        each.close()


ENTRIES = st.lists(
    st.one_of(
        st.tuples(st.just("note_boot"), st.tuples(st.integers(1, 1 << 40))),
        st.tuples(st.just("note_segment"), st.tuples(st.integers(1, 50), st.sampled_from(["thp", "4k", "hugetlb"]))),
        st.tuples(st.just("note_gone"), st.tuples(st.integers(1, 50))),
        st.tuples(
            st.just("note_namespace"), st.tuples(st.builds(namespace, st.integers(0, 99), size=st.integers(0, 90)))
        ),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(ENTRIES)
def test_a_kill_between_any_two_stores_leaves_all_that_was_noted_before(entries):
    log = Registry(4096)
    log._table[16 + 8 : 16 + 8 + 64] = b"\1" * 64  # as an entry that was never finished may have left it
    pictures = []
    table, words = log._table, log._words
    log._table, log._words = Watched(table, table, pictures, 7), Watched(words, table, pictures, 7)
    allowed = [state(log)]
    for name, args in entries:
        getattr(log, name)(*args)
        allowed.append(state(log))
        for picture in pictures:
            found = reopened(picture)
            assert state(found) in allowed[-2:]
            found.close()
        pictures.clear()
    log.close()


def test_a_full_log_says_so_and_goes_on_in_a_larger_one():
    log = Registry(4096)
    number = 0
    while log.note_namespace(namespace(number, size=200)):
        number += 1
    log.note_gone(77)
    larger = log.compacted(200)
    assert state(larger) == state(log)
    assert larger.size_bytes > log.size_bytes
    assert larger.note_namespace(namespace(number, size=200))
    log.close()
    larger.close()


def test_a_newer_format_is_refused_with_both_numbers():
    log = Registry(4096)
    struct.pack_into("=I", log._table, 8, layout.FORMAT_VERSION + 1)
    with pytest.raises(CorruptData, match=r"format 2, this daemon reads 1"):
        reopened(bytes(log._table))
    log.close()
    with pytest.raises(CorruptData, match="no header"):
        reopened(bytes(4096))


def test_kinds_that_only_a_newer_daemon_knows_are_passed_over():
    log = Registry(4096)
    log._append(200, b"from the future")
    log.note_segment(1, "4k")
    assert reopened(bytes(log._table)).segments == {1: "4k"}
    log.close()


def test_a_descriptor_of_anything_else_is_refused_and_closed():
    reading, writing = os.pipe()
    with pytest.raises(DeviceError, match="no memfd"):
        Registry.adopt(reading)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
    os.close(writing)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(DeviceError, match="none of ours"):
        Registry.adopt(unsealed)
