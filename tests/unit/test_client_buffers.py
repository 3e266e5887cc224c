import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstored_client.buffers import Addresses, copy_runs, merge, spans_of


def test_neighbours_in_both_places_become_one_memmove():
    assert merge([(100, 10, 5), (105, 15, 5), (110, 20, 2)]) == [(100, 10, 12)]


def test_neighbours_in_one_place_only_stay_apart():
    assert merge([(100, 10, 5), (105, 16, 5)]) == [(100, 10, 5), (105, 16, 5)]
    assert merge([(100, 10, 5), (106, 15, 5)]) == [(100, 10, 5), (106, 15, 5)]
    assert merge([]) == []


@given(st.permutations(range(8)))
def test_merged_runs_move_every_byte_to_its_place(order):
    source = np.arange(8 * 16, dtype=np.uint8)
    target = np.zeros_like(source)
    to, at = target.ctypes.data, source.ctypes.data
    copy_runs(merge((to + i * 16, at + block * 16, 16) for i, block in enumerate(order)))
    assert (target.reshape(8, 16) == source.reshape(8, 16)[list(order)]).all()


@pytest.mark.parametrize("make", [bytearray, lambda data: np.frombuffer(bytearray(data), np.uint8), memoryview, bytes])
def test_addresses_of_all_kinds_of_buffers_lead_to_their_bytes(make):
    blocks = [make(bytes([i]) * 32) for i in range(1, 4)]
    spans = spans_of(blocks, 3, writable=False)
    copy = np.zeros(96, np.uint8)
    copy_runs((copy.ctypes.data + 32 * i, address, 32) for i, address in enumerate(spans.addresses))
    assert copy.tobytes() == b"".join(map(bytes, blocks))
    assert spans.sizes_bytes == [32, 32, 32]


def test_a_contiguous_buffer_is_cut_into_equal_blocks():
    buffer = np.zeros(64, np.uint8)
    base = buffer.ctypes.data
    assert list(spans_of(buffer, 4, writable=True).addresses) == [base, base + 16, base + 32, base + 48]
    assert list(spans_of(buffer, 2, 10, writable=True).addresses) == [base, base + 10]


def test_tensors_are_taken_by_their_pointer():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 8, dtype=torch.bfloat16)
    spans = spans_of([tensor], 1, writable=True)
    assert (spans.addresses[0], spans.sizes_bytes[0]) == (tensor.data_ptr(), 64)
    with pytest.raises(ValueError, match="not contiguous"):
        spans_of([tensor.t()], 1, writable=True)


@pytest.mark.parametrize(
    ("buffers", "count", "block_bytes", "error"),
    [
        ([bytearray(4)], 2, 0, ValueError),  # too few
        (bytearray(10), 3, 0, ValueError),  # no whole blocks
        (bytearray(10), 3, 4, ValueError),  # too small
        ([bytearray(0)], 1, 0, ValueError),
        ([b"fixed"], 1, 0, TypeError),  # read-only
        ([np.zeros((4, 4), np.uint8)[:, ::2]], 1, 0, ValueError),
        ([object()], 1, 0, TypeError),
        (Addresses([4096], 8), 2, 0, ValueError),
    ],
)
def test_buffers_that_do_not_fit_are_refused(buffers, count, block_bytes, error):
    with pytest.raises(error):
        spans_of(buffers, count, block_bytes, writable=True)


def test_raw_addresses_need_positive_numbers_and_one_size_each():
    assert Addresses([4096, 8192], 8).sizes_bytes == [8, 8]
    with pytest.raises(ValueError, match="2 addresses and 1 sizes"):
        Addresses([4096, 8192], [8])
    with pytest.raises(ValueError, match="positive"):
        Addresses([0], 8)
