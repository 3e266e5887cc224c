import struct

import pytest
from kvstored_client.blocks import copy_plan
from kvstored_client.buffers import Spans
from kvstored_client.errors import Unavailable
from kvstored_client.slots import KNOWN_MAX, KnownSlots
from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb


class Memory:
    """Stands for a mapping of 64 slots at an address of its own."""

    def __init__(self, address):
        self.address = address
        self.size_bytes = 64 * 4096


MAPPINGS = {1: Memory(1 << 32), 2: Memory(1 << 33)}


def lease(*blocks):
    """(segment, index, size) of each block."""
    slots = struct.pack(f"<{len(blocks)}Q", *(s << frames.SLOT_INDEX_BITS | i for s, i, _ in blocks))
    heads = b"".join(frames.HEAD.pack(9, 0, size, bytes([n]) * 16) for n, (_, _, size) in enumerate(blocks))
    return pb.Lease(slots=slots, heads=heads)


def slots_of(lease):
    return KnownSlots().of(lease)


def plan(slots, addresses, sizes):
    return copy_plan(slots, MAPPINGS, Spans(addresses, list(sizes), None))


def test_places_sizes_and_hashes_come_out_of_a_lease():
    slots = slots_of(lease((1, 0, 4096), (2, 5, 5000)))
    assert len(slots) == 2
    assert slots.sizes_bytes == (4096, 5000)
    assert slots.place(1) == (2, 5 * 8192, 5000)
    assert slots.content_hashes == [b"\0" * 16, b"\1" * 16]
    assert slots.segment_ids == {1, 2}


def test_a_prefix_in_neighbouring_slots_is_one_run():
    slots = slots_of(lease(*((1, 3 + i, 4096) for i in range(8))))
    assert [(run.first, run.length, run.offset) for run in slots.runs] == [(0, 8, 3 * 4096)]
    runs = plan(slots, range(1000, 1000 + 8 * 4096, 4096), [4096] * 8)
    assert runs == [(1000, MAPPINGS[1].address + 3 * 4096, 8 * 4096)]


@pytest.mark.parametrize(
    "blocks",
    [
        [(1, 3, 4096), (1, 5, 4096)],  # a gap
        [(1, 3, 4096), (1, 2, 4096)],  # backwards
        [(1, 3, 4096), (2, 4, 4096)],  # another segment
        [(1, 3, 4096), (1, 4, 4000)],  # another size
    ],
)
def test_a_run_ends_where_the_next_block_is_elsewhere_or_of_another_size(blocks):
    slots = slots_of(lease(*blocks))
    assert [run.length for run in slots.runs] == [1, 1]
    sizes = [size for _, _, size in blocks]
    expected = [
        (target, MAPPINGS[segment].address + index * 4096, size)
        for target, (segment, index, size) in zip([1000, 90000], blocks, strict=True)
    ]
    assert plan(slots, [1000, 90000], sizes) == expected


def test_blocks_that_do_not_fill_their_slots_are_copied_one_by_one():
    slots = slots_of(lease((1, 0, 4000), (1, 1, 4000)))
    base = MAPPINGS[1].address
    assert plan(slots, range(1000, 9000, 4000), [4000] * 2) == [(1000, base, 4000), (5000, base + 4096, 4000)]


def test_separate_buffers_get_their_own_block_each():
    slots = slots_of(lease((1, 0, 4096), (1, 1, 4096)))
    base = MAPPINGS[1].address
    assert plan(slots, [50000, 1000], [4096] * 2) == [(50000, base, 4096), (1000, base + 4096, 4096)]


def test_a_block_outside_of_its_segment_is_refused():
    slots = slots_of(lease((1, 63, 4096), (1, 64, 4096)))
    with pytest.raises(Unavailable, match="of a segment of 262144 bytes"):
        plan(slots, range(1000, 1000 + 2 * 4096, 4096), [4096] * 2)


@pytest.mark.parametrize("broken", [pb.Lease(slots=b"1234567"), pb.Lease(slots=b"12345678", heads=b"1")])
def test_a_lease_that_is_not_whole_is_refused(broken):
    with pytest.raises(Unavailable, match="not whole"):
        slots_of(broken)


def test_a_lease_like_one_before_is_not_taken_apart_again_and_another_is():
    known = KnownSlots()
    blocks = [(1, 3, 4096), (1, 4, 4096)]
    first = known.of(lease(*blocks))
    assert known.of(lease(*blocks)) is first
    assert known.of(lease(*blocks[:1])).runs[0].length == 1
    moved = lease(*blocks)
    moved.heads = moved.heads[:-1] + b"x"  # another block lies there
    assert known.of(moved).content_hashes[1] == b"\1" * 15 + b"x"


def test_few_leases_are_remembered():
    known = KnownSlots()
    for index in range(3 * KNOWN_MAX):
        known.of(lease((1, index, 4096)))
    assert len(known._known) <= KNOWN_MAX
