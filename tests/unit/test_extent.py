"""The extent table, the formats on disk, and how blocks are cut into runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored.tiers.base import Location, Record, Store
from kvstored.tiers.extent import ExtentTable
from kvstored.tiers.formats import (
    ExtentRow,
    Placed,
    State,
    footer_bytes,
    header_bytes,
    lies_in,
    pack_extent_key,
    pack_header,
    pack_record,
    pack_row,
    unpack_headers,
    unpack_record,
    unpack_row,
)
from kvstored.tiers.runs import Block, cut
from kvstored.tiers.trailer import Trailer, pack_footer, unpack_trailer

EXTENT_BYTES = 64 << 10
HASHES = st.binary(min_size=8, max_size=64)


def store(number, size=4096, parent=b""):
    return Store(b"d" * 16, number.to_bytes(8, "big"), parent, 0, size, b"c" * 16)


def placed_in(table, tenant, count, size=4096):
    placed = table.place(tenant, [store(i, size) for i in range(count)])
    table.audit()
    return placed


def settle(table, placed):
    delta = {}
    for p in placed:
        bytes_, blocks = delta.get(p.extent, (0, 0))
        delta[p.extent] = (bytes_ + 4096, blocks + 1)
    table.settle(placed, delta)
    table.audit()


def opened(limit=4, *tenants):
    table = ExtentTable(EXTENT_BYTES, limit)
    for tenant in tenants:
        table.open(table.take_free(), tenant)
    return table


# --- the table ---


def test_blocks_of_a_call_lie_one_behind_the_other():
    table = opened(4, "t")
    assert [p.offset for p in placed_in(table, "t", 3, 4097)] == [0, 8192, 16384]


def test_room_for_the_footer_is_kept():
    table = opened(4, "t")
    placed = placed_in(table, "t", 100)
    headers = sum(header_bytes(p.store) for p in placed)
    assert 4096 * len(placed) + footer_bytes(headers) <= EXTENT_BYTES
    assert 4096 * (len(placed) + 1) + footer_bytes(headers) > EXTENT_BYTES
    assert table.place("t", [store(0)]) == []


def test_a_tenant_never_gets_a_place_in_another_tenants_extent():
    table = opened(4, "t", "u")
    assert {p.extent for p in placed_in(table, "t", 2)}.isdisjoint(p.extent for p in placed_in(table, "u", 2))


def test_what_is_not_alive_after_settling_is_dead():
    table = opened(4, "t")
    placed = placed_in(table, "t", 3)
    assert table.usage().used_bytes == 3 * 4096
    table.settle(placed, {placed[0].extent: (4096, 1)})
    table.audit()
    usage = table.usage()
    assert (usage.used_bytes, usage.dead_bytes, usage.blocks) == (4096, 2 * 4096, 1)


def fill_and_seal(table, tenant):
    if (extent := table.take_free()) is None:
        extent = table.victim(tenant)
        table.recycle(extent)
        table.recycled(extent, {extent.number: (-extent.live_bytes, -extent.live_blocks)})
    table.open(extent, tenant)
    settle(table, placed_in(table, tenant, 100))
    for full in table.sealable():
        table.sealed(full, table.seal(full))
    table.audit()
    return extent


def test_the_oldest_sealed_extent_is_the_victim():
    table = ExtentTable(EXTENT_BYTES, 3)
    order = [fill_and_seal(table, "t").number for _ in range(9)]
    assert order == [1, 2, 3] * 3


def test_a_pinned_extent_is_no_victim():
    table = ExtentTable(EXTENT_BYTES, 3)
    first = fill_and_seal(table, "t")
    fill_and_seal(table, "t")
    record = Record(Location(0, first.number, first.generation, 0), 4096, b"", b"", 0.0)
    table.pin(record)
    assert table.victim("t") is not first
    table.unpin(record)
    assert table.victim("t") is first


def test_an_extent_without_live_blocks_goes_before_older_ones():
    table = ExtentTable(EXTENT_BYTES, 3)
    fill_and_seal(table, "t")
    empty = fill_and_seal(table, "t")
    table.apply({empty.number: (-empty.live_bytes, -empty.live_blocks)})
    assert table.victim("t") is empty


def test_an_extent_that_is_being_written_is_no_victim():
    table = opened(1, "t")
    placed = placed_in(table, "t", 1)
    assert table.victim("u") is None
    settle(table, placed)
    assert table.victim("u").number == placed[0].extent
    assert table.victim("t") is None


def test_a_record_of_a_recycled_extent_has_no_owner():
    table = ExtentTable(EXTENT_BYTES, 2)
    extent = fill_and_seal(table, "t")
    record = Record(Location(0, extent.number, extent.generation, 0), 4096, b"", b"", 0.0)
    assert table.owner(record) == "t"
    table.recycle(extent)
    assert table.owner(record) is None


def test_the_audit_sees_a_wrong_count():
    table = opened(4, "t")
    settle(table, placed_in(table, "t", 3))
    table._live_bytes += 4096
    with pytest.raises(AssertionError):
        table.audit()


def test_of_two_open_extents_of_a_tenant_the_emptier_goes_on():
    rows = [ExtentRow(i, 1, "t", State.OPEN, append_bytes=at) for i, at in ((1, 4096), (2, 40960), (3, 8192))]
    table = ExtentTable(EXTENT_BYTES, 3, rows)
    assert placed_in(table, "t", 1)[0].extent == 1
    assert {e.number for e in table.sealable()} == {2, 3}


# --- formats ---


@given(HASHES, HASHES, st.integers(1, 16 << 20), st.floats(0, 1e10))
def test_a_record_comes_back_from_its_index_entry(hash_, parent, size, created_s):
    placed = Placed(7, 3, 1 << 40, Store(b"d" * 16, hash_, parent, 0, size, b"c" * 16))
    value = pack_record(placed, created_s)
    assert unpack_record(b"d" * 16 + hash_, value, 2) == Record(
        Location(2, 7, 3, 1 << 40), size, b"c" * 16, parent, created_s
    )
    assert lies_in(value, 7, 3)
    assert not lies_in(value, 7, 4)
    assert not lies_in(value, 8, 3)


def test_a_row_comes_back_from_its_index_entry():
    row = ExtentRow(7, 3, "tenant ü", State.SEALED, 9, 1 << 33, 500, 1 << 32, 77)
    assert unpack_row(pack_extent_key(7), pack_row(row)) == row


@given(st.lists(st.tuples(HASHES, st.binary(max_size=64), st.integers(1, 1 << 24)), max_size=50))
def test_a_footer_tells_all_about_its_extent(records):
    stores = [Store(b"d" * 16, hash_, parent, 0, size, b"c" * 16) for hash_, parent, size in records]
    headers = [pack_header(Placed(7, 3, 4096 * i, s), 1.5) for i, s in enumerate(stores)]
    row = ExtentRow(7, 3, "t", State.SEALED, 9)
    footer = pack_footer(row, b"v" * 16, b"".join(headers), len(headers))
    trailer = unpack_trailer(footer[-4096:])
    assert trailer[:7] == Trailer("t", b"v" * 16, 7, 3, 9, sum(map(len, headers)), len(headers), 0)[:7]
    assert len(footer) == footer_bytes(trailer.header_bytes)
    found = [header for header, _ in unpack_headers(footer[: trailer.header_bytes])]
    assert [(h.hash, h.parent, h.size_bytes) for h in found] == records
    assert [h.offset for h in found] == [4096 * i for i in range(len(records))]


@given(st.integers(0, 4095), st.integers(1, 255))
def test_a_trailer_with_any_byte_changed_is_none(at, flip):
    footer = bytearray(pack_footer(ExtentRow(7, 3, "t"), b"v" * 16, b"", 0))
    assert unpack_trailer(bytes(footer)) is not None
    footer[at] ^= flip
    assert unpack_trailer(bytes(footer)) is None


# --- runs ---


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), unique=True, max_size=60),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_runs_hold_every_block_once_and_only_neighbours(places, run_mib, threads):
    size = 512 << 10
    blocks = [Block(extent, slot * size, 0, size, b"", i) for i, (extent, slot) in enumerate(places)]
    runs = cut(blocks, run_mib << 20, threads)
    assert sorted(b.position for run in runs for b in run.blocks) == list(range(len(places)))
    for run in runs:
        assert [(b.extent, b.offset) for b in run.blocks] == [
            (run.extent, run.offset + i * size) for i in range(len(run.blocks))
        ]
        assert run.bytes <= run_mib << 20


def test_a_block_larger_than_a_run_is_a_run():
    (run,) = cut([Block(1, 0, 0, 16 << 20, b"", 0)], 4 << 20, 4)
    assert run.bytes == 16 << 20


def test_few_blocks_are_shared_among_the_threads():
    blocks = [Block(1, i << 19, 0, 1 << 19, b"", i) for i in range(8)]
    assert len(cut(blocks, 4 << 20, 4)) == 4
