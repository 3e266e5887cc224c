"""What an index must do, whatever it keeps its entries in.

A subclass has a fixture `harness`: an `IndexHarness` whose index is open and empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import pytest

from kvstored.keys import Namespace
from kvstored.tiers.base import Location, Record, Store
from kvstored.tiers.formats import ExtentRow, Placed, State
from kvstored.tiers.index import Index

DIGEST = b"d" * 16
OTHER_DIGEST = b"e" * 16
BLOCK = 4096


class IndexHarness(Protocol):
    """One index that can be opened again."""

    index: Index

    def reopen(self) -> None:
        """Close it and open what it left, as a restart does."""
        ...


def block_hash(number: int) -> bytes:
    """The hash of a block."""
    return number.to_bytes(8, "big")


def key_of(number: int, digest: bytes = DIGEST) -> bytes:
    """The key of a block."""
    return digest + block_hash(number)


def placed(number: int, extent: int = 1, generation: int = 1, digest: bytes = DIGEST) -> Placed:
    """A block that lies at its number times 4 KiB."""
    store = Store(digest, block_hash(number), b"parent", 0, 4000, b"c" * 16)
    return Placed(extent, generation, BLOCK * number, store)


def insert(
    harness: IndexHarness, numbers: Iterable[int], extent: int = 1, generation: int = 1, tenant: str = "t"
) -> dict[int, tuple[int, int]]:
    """Insert blocks in one transaction."""
    return dict(harness.index.insert(tenant, [placed(n, extent, generation) for n in numbers], 1.5))


def find(harness: IndexHarness, numbers: Iterable[int]) -> list[Record | None]:
    """The entries of blocks."""
    return harness.index.find(DIGEST, [block_hash(n) for n in numbers], prefix=False)


def is_found(harness: IndexHarness, numbers: Iterable[int]) -> list[bool]:
    """Which blocks have an entry."""
    return [record is not None for record in find(harness, numbers)]


def row_of(harness: IndexHarness, extent: int = 1) -> ExtentRow:
    """The row of an extent."""
    return next(row for row in harness.index.rows() if row.extent == extent)


class IndexContract:
    """Entries, pages, the life of extents, namespaces, and all of it after opening again."""

    def test_an_entry_says_where_the_block_is_and_what_it_is(self, harness: IndexHarness) -> None:
        assert insert(harness, [3]) == {1: (BLOCK, 1)}
        (record,) = find(harness, [3])
        assert record is not None
        assert record.location == Location(0, 1, 1, 3 * BLOCK)
        assert (record.size_bytes, record.content_hash, record.parent) == (4000, b"c" * 16, b"parent")
        assert record.created_s == 1.5

    def test_a_prefix_ends_before_the_first_miss(self, harness: IndexHarness) -> None:
        insert(harness, [1, 2, 4])
        hashes = [block_hash(n) for n in (1, 2, 3, 4)]
        assert len(harness.index.find(DIGEST, hashes, prefix=True)) == 2
        assert is_found(harness, [1, 2, 3, 4]) == [True, True, False, True]

    def test_the_digest_is_part_of_the_key(self, harness: IndexHarness) -> None:
        insert(harness, [1])
        assert harness.index.find(OTHER_DIGEST, [block_hash(1)], prefix=False) == [None]

    def test_a_valid_entry_stays_and_the_second_copy_counts_as_nothing(self, harness: IndexHarness) -> None:
        insert(harness, [1])
        assert insert(harness, [1], extent=2) == {}
        (record,) = find(harness, [1])
        assert record is not None
        assert record.location.extent == 1
        assert row_of(harness, 2).live_blocks == 0

    def test_an_entry_of_an_earlier_generation_is_replaced(self, harness: IndexHarness) -> None:
        insert(harness, [1])
        harness.index.recycle(1, 2, [])
        assert insert(harness, [1], generation=2) == {1: (BLOCK, 1)}
        (record,) = find(harness, [1])
        assert record is not None
        assert record.location.generation == 2

    def test_rows_count_what_is_alive(self, harness: IndexHarness) -> None:
        insert(harness, [1, 2, 5])
        harness.index.remove("t", [key_of(2)])
        row = row_of(harness)
        assert (row.tenant, row.state, row.generation) == ("t", State.OPEN, 1)
        assert (row.live_blocks, row.live_bytes, row.append_bytes) == (2, 2 * BLOCK, 6 * BLOCK)

    def test_only_the_owner_removes(self, harness: IndexHarness) -> None:
        insert(harness, [1, 2])
        assert harness.index.remove("u", [key_of(1)]) == {}
        assert harness.index.remove("t", [key_of(1), key_of(9)]) == {1: (-BLOCK, -1)}
        assert is_found(harness, [1, 2]) == [False, True]

    def test_a_record_that_was_replaced_meanwhile_is_not_dropped(self, harness: IndexHarness) -> None:
        insert(harness, [1, 2])
        first, second = find(harness, [1, 2])
        assert first is not None
        assert second is not None
        harness.index.remove("t", [key_of(1)])
        insert(harness, [1], extent=2)
        dropped = harness.index.remove_unchanged([(key_of(1), first), (key_of(2), second)])
        assert dropped == {1: (-BLOCK, -1)}
        assert is_found(harness, [1, 2]) == [True, False]

    @pytest.mark.parametrize("known", [[], [0, 9], [0, 1, 2, 3, 4]])
    def test_recycling_removes_all_of_the_extent_and_nothing_else(
        self, harness: IndexHarness, known: list[int]
    ) -> None:
        insert(harness, range(5))
        insert(harness, range(5, 8), extent=2)
        removed, delta = harness.index.recycle(1, 2, [key_of(n) for n in known])
        assert sorted(removed) == [key_of(n) for n in range(5)]
        assert delta == {1: (-5 * BLOCK, -5)}
        assert is_found(harness, range(8)) == [False] * 5 + [True] * 3
        row = row_of(harness)
        assert (row.generation, row.state, row.live_blocks) == (2, State.FREE, 0)

    def test_the_headers_of_an_open_extent_are_those_of_its_live_blocks(self, harness: IndexHarness) -> None:
        insert(harness, [1, 2])
        insert(harness, [3])
        insert(harness, [4], extent=2)
        harness.index.remove("t", [key_of(2)])
        assert len(harness.index.headers(1, 1)) == 2
        assert harness.index.headers(1, 2) == []

    def test_sealing_keeps_entries_and_forgets_headers(self, harness: IndexHarness) -> None:
        insert(harness, [1, 2])
        harness.index.seal(ExtentRow(1, 1, "t", State.SEALED, 7))
        assert is_found(harness, [1, 2]) == [True, True]
        assert harness.index.headers(1, 1) == []
        row = row_of(harness)
        assert (row.state, row.sequence, row.live_blocks) == (State.SEALED, 7, 2)

    def test_entries_that_are_unchanged_are_moved(self, harness: IndexHarness) -> None:
        insert(harness, [1, 2, 3])
        one, two, three = find(harness, [1, 2, 3])
        assert one is not None
        assert two is not None
        assert three is not None
        harness.index.remove("t", [key_of(2)])
        harness.index.remove("t", [key_of(3)])
        insert(harness, [3], extent=4)  # put anew
        target = [placed(n, extent=2) for n in (1, 2, 3)]
        moved = list(zip([one, two, three], target, strict=True))
        assert harness.index.move("t", moved) == {1: (-BLOCK, -1), 2: (BLOCK, 1)}
        first, second, third = find(harness, [1, 2, 3])
        assert first is not None
        assert (first.location.extent, first.created_s) == (2, one.created_s)
        assert second is None, "what was deleted stays so"
        assert third is not None
        assert third.location.extent == 4
        assert harness.index.move("t", moved[:1]) == {}
        assert len(harness.index.headers(2, 1)) == 1
        assert [(row.extent, row.live_blocks) for row in harness.index.rows()] == [(1, 0), (2, 1), (4, 1)]
        harness.index.recycle(1, 2, [])
        assert is_found(harness, [1, 2, 3]) == [True, False, True]

    def test_an_extent_that_is_forgotten_has_no_row(self, harness: IndexHarness) -> None:
        insert(harness, [1])
        insert(harness, [2], extent=2)
        harness.index.recycle(1, 2, [])
        harness.index.forget(1)
        assert [row.extent for row in harness.index.rows()] == [2]

    def test_pages_go_through_everything_in_order(self, harness: IndexHarness) -> None:
        insert(harness, range(5))
        harness.index.insert("t", [placed(9, digest=OTHER_DIGEST)], 1.0)
        first = harness.index.page(DIGEST, b"", 3)
        second = harness.index.page(DIGEST, first[-1][0], 3)
        assert [key for key, _ in first + second] == [key_of(n) for n in range(5)]
        assert [key for key, _ in harness.index.page(b"", b"", 100)][-1] == key_of(9, OTHER_DIGEST)
        assert harness.index.page(b"", key_of(9, OTHER_DIGEST), 100) == []

    def test_the_map_grows_when_it_is_full(self, harness: IndexHarness) -> None:
        for start in range(0, 12_000, 2000):
            insert(harness, range(start, start + 2000))
        assert is_found(harness, [0, 11_999]) == [True, True]
        assert row_of(harness).live_blocks == 12_000

    def test_everything_is_there_after_opening_again(self, harness: IndexHarness) -> None:
        insert(harness, range(20))
        harness.index.remove("t", [key_of(3)])
        harness.index.recycle(7, 2, [])
        namespace = Namespace("t", DIGEST, b"encoding", {"model": "m"})
        harness.index.remember(namespace)
        rows, records, headers = harness.index.rows(), find(harness, range(20)), harness.index.headers(1, 1)
        harness.reopen()
        assert harness.index.namespaces() == [namespace]
        assert (harness.index.rows(), find(harness, range(20))) == (rows, records)
        assert harness.index.headers(1, 1) == headers
