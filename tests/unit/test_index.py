"""The LMDB index of one volume."""

import pytest

from kvstored.errors import CorruptData, DeviceError
from kvstored.keys import Namespace
from kvstored.tiers.base import Location, Store
from kvstored.tiers.formats import ExtentRow, Placed, State
from kvstored.tiers.index import Index

DIGEST = b"d" * 16


@pytest.fixture
def index(tmp_path):
    made = Index(tmp_path, 0, 1 << 20)
    made.open()
    yield made
    made.close()


def hash_of(number):
    return number.to_bytes(8, "big")


def placed(number, extent=1, generation=1, digest=DIGEST):
    return Placed(extent, generation, 4096 * number, Store(digest, hash_of(number), b"", 0, 4000, b"c" * 16))


def insert(index, numbers, extent=1, generation=1, tenant="t"):
    return index.insert(tenant, [placed(n, extent, generation) for n in numbers], 1.0)


def found(index, numbers, prefix=False):
    records = index.find(DIGEST, [hash_of(n) for n in numbers], prefix=prefix)
    return [record and record.location.offset // 4096 for record in records]


def row(index, extent=1):
    return next(row for row in index.rows() if row.extent == extent)


def test_what_was_inserted_is_found(index):
    assert insert(index, [1, 2]) == {1: (8192, 2)}
    assert found(index, [2, 3, 1]) == [2, None, 1]
    assert found(index, [2, 3, 1], prefix=True) == [2]
    assert row(index).append_bytes == 3 * 4096


def test_a_valid_entry_is_kept_and_the_second_copy_is_dead(index):
    insert(index, [1])
    assert insert(index, [1], extent=2) == {}
    assert index.find(DIGEST, [hash_of(1)], prefix=False)[0].location == Location(0, 1, 1, 4096)
    assert row(index, 2).append_bytes == 2 * 4096


def test_a_void_entry_is_replaced(index):
    insert(index, [1])
    index.recycle(1, 2, [])
    assert insert(index, [1], generation=2) == {1: (4096, 1)}
    assert index.find(DIGEST, [hash_of(1)], prefix=False)[0].location.generation == 2


def test_only_the_owner_removes(index):
    insert(index, [1, 2])
    keys = [DIGEST + hash_of(n) for n in (1, 3)]
    assert index.remove("u", keys) == {}
    assert index.remove("t", keys) == {1: (-4096, -1)}
    assert found(index, [1, 2]) == [None, 2]
    assert row(index).live_blocks == 1


def test_a_record_is_only_dropped_while_it_is_the_same(index):
    insert(index, [1])
    (record,) = index.find(DIGEST, [hash_of(1)], prefix=False)
    index.remove("t", [DIGEST + hash_of(1)])
    insert(index, [1], extent=2)
    assert index.remove_unchanged([(DIGEST + hash_of(1), record)]) == {}
    assert found(index, [1]) == [1]


@pytest.mark.parametrize("known", ["all", "some", "none"])
def test_recycling_removes_every_entry_of_the_extent_and_no_other(index, known):
    insert(index, range(5))
    insert(index, range(5, 8), extent=2)
    numbers = {"all": range(8), "some": [0, 6], "none": []}[known]
    removed, delta = index.recycle(1, 2, [DIGEST + hash_of(n) for n in numbers])
    assert sorted(removed) == [DIGEST + hash_of(n) for n in range(5)]
    assert delta == {1: (-5 * 4096, -5)}
    assert found(index, range(8)) == [None] * 5 + [5, 6, 7]
    assert row(index) == ExtentRow(1, 2, "t", State.FREE)
    assert index.headers(1, 1) == []


def test_headers_of_an_extent_leave_out_what_was_deleted(index):
    insert(index, [1, 2])
    insert(index, [3])
    insert(index, [4], extent=2)
    index.remove("t", [DIGEST + hash_of(2)])
    assert len(index.headers(1, 1)) == 2
    assert index.headers(1, 2) == []


def test_headers_leave_out_the_older_of_two_copies_in_one_extent(index):
    insert(index, [1])
    index.remove("t", [DIGEST + hash_of(1)])
    again = Placed(1, 1, 8192, placed(1).store)
    index.insert("t", [again], 1.0)
    assert len(index.headers(1, 1)) == 1


def test_sealing_forgets_the_journal_and_keeps_the_entries(index):
    insert(index, [1, 2])
    index.seal(ExtentRow(1, 1, "t", State.SEALED, 7))
    assert index.headers(1, 1) == []
    assert (row(index).state, row(index).sequence, row(index).live_blocks) == (State.SEALED, 7, 2)


def test_the_map_grows_when_it_is_full(index):
    for start in range(0, 20_000, 1000):
        insert(index, range(start, start + 1000))
    assert found(index, [0, 19_999]) == [0, 19_999]
    assert row(index).live_blocks == 20_000


def test_everything_is_there_after_opening_again(tmp_path):
    index = Index(tmp_path, 0, 1 << 20)
    index.open()
    insert(index, range(3000))
    namespace = Namespace("t", DIGEST, b"encoding", {"model": "m"})
    index.remember(namespace)
    index.close()
    again = Index(tmp_path, 0, 1 << 16)  # smaller than what there is
    again.open()
    assert found(again, [0, 2999]) == [0, 2999]
    assert again.namespaces() == [namespace]
    again.close()


def test_pages_go_through_a_namespace_in_order(index):
    insert(index, range(5))
    index.insert("t", [placed(9, digest=b"e" * 16)], 1.0)
    first = index.page(DIGEST, b"", 3)
    second = index.page(DIGEST, first[-1][0], 3)
    assert [key for key, _ in first + second] == [DIGEST + hash_of(n) for n in range(5)]
    assert len(index.page(b"", b"", 100)) == 6


def value_of(index, number, change=None, to=None):
    """An entry as it is stored; changed, or put under another key as well."""
    key = DIGEST + hash_of(number)
    with index._env.begin(index._records, write=True) as txn:
        value = txn.get(key)
        if change is not None:
            txn.put(key, value[:change] + bytes([value[change] ^ 0x20]) + value[change + 1 :])
        if to is not None:
            txn.put(DIGEST + hash_of(to), value)
        return value


def test_an_entry_with_a_changed_byte_is_as_good_as_absent(index):
    insert(index, [1, 2, 3])
    for at in range(len(value_of(index, 2))):
        value_of(index, 2, at)
        assert found(index, [1, 2, 3]) == [1, None, 3]
        assert found(index, [1, 2, 3], prefix=True) == [1]
        assert [key for key, _ in index.page(b"", b"", 10)] == [DIGEST + hash_of(1), DIGEST + hash_of(3)]
        value_of(index, 2, at)
    assert found(index, [2]) == [2]


def test_an_entry_does_not_pass_for_another_key_s(index):
    insert(index, [1])
    value_of(index, 1, to=2)
    assert found(index, [1, 2]) == [1, None]


def test_a_block_whose_entry_is_damaged_can_be_deleted_and_stored_again(index):
    insert(index, [1, 2])
    value_of(index, 1, 20)
    value_of(index, 2, 20)
    assert index.remove("t", [DIGEST + hash_of(1)]) == {}
    insert(index, [2], extent=2)
    assert index.find(DIGEST, [hash_of(2)], prefix=False)[0].location.extent == 2


def test_a_damaged_row_is_corrupt_data(index):
    insert(index, [1])
    with index._env.begin(index._extents, write=True) as txn:
        ((key, value),) = list(txn.cursor())
        txn.put(key, value[:-5] + b"x" + value[-4:])
    with pytest.raises(CorruptData):
        index.rows()


def test_a_damaged_environment_is_corrupt_data(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"\xff" * 65536)
    with pytest.raises(CorruptData):
        Index(tmp_path, 0, 1 << 20).open()


def test_an_environment_that_cannot_be_opened_is_a_device_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DeviceError):
        Index(tmp_path / "file", 0, 1 << 20).open()
