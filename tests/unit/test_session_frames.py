import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstored_proto import frames
from kvstored_proto.frames import Frame, FrameReader, ProtocolError, encode


def read_all(reader, data, fds=()):
    return list(reader.feed(data, fds))


@pytest.fixture
def fds():
    """Three descriptors that nobody else has."""
    made = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    yield made
    for fd in made:
        if is_open(fd):
            os.close(fd)


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_the_header_is_as_documented():
    data = encode(0x0102, 0x1122334455667788, b"body", frames.REPLY, fd_count=3)
    assert data == bytes.fromhex("04000000 0201 01 03 8877665544332211") + b"body"


# ---- bytes ----

FRAMES = st.lists(
    st.builds(
        Frame,
        operation=st.integers(0, 2**16 - 1),
        flags=st.integers(0, 255),
        request_id=st.integers(0, 2**64 - 1),
        body=st.binary(max_size=60),
        fds=st.just(()),
    ),
    max_size=8,
)


@given(FRAMES, st.lists(st.integers(1, 40)))
def test_frames_come_out_as_they_went_in_however_they_are_cut(sent, cuts):
    data = b"".join(encode(f.operation, f.request_id, f.body, f.flags) for f in sent)
    reader, received = FrameReader(), []
    for cut in cuts:
        received += read_all(reader, data[:cut])
        data = data[cut:]
    assert received + read_all(reader, data) == sent


def test_a_frame_comes_out_with_its_last_byte_and_not_before():
    reader, data = FrameReader(), encode(5, 1, b"abc")
    for i in range(len(data) - 1):
        assert read_all(reader, data[i : i + 1]) == []
    assert read_all(reader, data[-1:]) == [Frame(5, 0, 1, b"abc")]


def test_what_was_received_may_change_afterwards():
    reader, buffer = FrameReader(), bytearray(encode(5, 1, b"abc"))
    (frame,) = read_all(reader, memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert frame.body == b"abc"


@given(st.binary(max_size=200))
def test_noise_is_frames_or_a_protocol_error(noise):
    try:
        received = read_all(FrameReader(), noise)
    except ProtocolError:
        return
    assert sum(frames.HEADER.size + len(frame.body) for frame in received) <= len(noise)


def test_a_body_over_the_limit_is_refused_by_its_header_alone():
    reader = FrameReader(max_body_bytes=10)
    assert read_all(reader, encode(1, 1, bytes(10)))
    with pytest.raises(ProtocolError, match="11 bytes: the limit is 10"):
        read_all(reader, encode(1, 1, bytes(11))[: frames.HEADER.size])


def test_the_limit_of_a_body_is_the_documented_one():
    assert read_all(FrameReader(), encode(1, 1, bytes(frames.MAX_BODY_BYTES)))
    with pytest.raises(ProtocolError):
        read_all(FrameReader(), encode(1, 1, bytes(frames.MAX_BODY_BYTES + 1)))


def test_frames_before_a_broken_one_still_come():
    received = []
    with pytest.raises(ProtocolError):
        received.extend(FrameReader(max_body_bytes=4).feed(encode(7, 1, b"good") + encode(8, 2, b"too long")))
    assert [frame.operation for frame in received] == [7]


# ---- descriptors ----


def test_descriptors_go_to_the_frames_that_announce_them(fds):
    data = encode(1, 0, b"", fd_count=2) + encode(2, 0, b"") + encode(3, 0, b"", fd_count=1)
    received = read_all(FrameReader(), data, fds)
    assert [frame.fds for frame in received] == [tuple(fds[:2]), (), (fds[2],)]


def test_descriptors_that_came_with_the_first_byte_wait_for_the_rest_of_their_frame(fds):
    reader, data = FrameReader(), encode(1, 0, b"body", fd_count=3)
    assert read_all(reader, data[:1], fds) == []
    (frame,) = read_all(reader, data[1:])
    assert frame.fds == tuple(fds)


def test_announced_descriptors_that_did_not_come_break_the_protocol(fds):
    with pytest.raises(ProtocolError, match="announces 2 descriptors, 1 came"):
        read_all(FrameReader(), encode(1, 0, b"", fd_count=2), fds[:1])


def test_descriptors_that_no_frame_announces_are_limited_and_closed_at_the_end(fds):
    reader = FrameReader(max_fds=2)
    assert read_all(reader, b"", fds[:2]) == []
    with pytest.raises(ProtocolError, match="more than 2 descriptors"):
        reader.feed(b"", fds[2:])
    reader.close()
    assert not any(map(is_open, fds))


def test_a_descriptor_that_a_frame_took_is_the_frames(fds):
    reader = FrameReader()
    (frame,) = read_all(reader, encode(1, 0, b"", fd_count=1), fds[:1])
    reader.close()
    assert frame.fds == (fds[0],)
    assert is_open(fds[0])


# ---- runs of slots ----


def runs_one_by_one(slots):
    """What `slot_runs` answers, by looking at every slot."""
    ends = [i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1]
    return list(zip([0, *ends], [*ends, len(slots)], strict=True)) if slots else []


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=6), st.booleans())
def test_runs_of_slots_are_those_that_looking_at_every_slot_finds(stretches, as_tuple):
    slots = [slot for start, count in stretches for slot in range(start, start + count)]
    assert list(frames.slot_runs(tuple(slots) if as_tuple else slots)) == runs_one_by_one(slots)


@given(st.lists(st.integers(0, 12), max_size=40))
def test_runs_of_slots_in_any_order(slots):
    assert list(frames.slot_runs(slots)) == runs_one_by_one(slots)


def test_slots_that_only_seem_to_follow_one_another_are_no_run():
    assert list(frames.slot_runs([1, 3, 2, 4])) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert list(frames.slot_runs([1, 2, 4, 3, 5])) == [(0, 2), (2, 3), (3, 4), (4, 5)]
