import ctypes

import pytest

from kvstored.errors import CorruptData, InvalidArgument
from kvstored.tiers import slots
from kvstored.tiers.slots import FREE, READY, WRITING, SlotRecord, SlotRecords

DIGEST, HASH, PARENT, CONTENT = b"d" * 16, b"h" * 32, b"p" * 64, b"c" * 16


@pytest.fixture
def records():
    made = SlotRecords(100, 16384, segment_id=7, tenant="acme", first_generation=0)
    yield made
    made.close()


def written(records, slot, hash_=HASH, parent=PARENT):
    generation = records.begin(slot, 16000, DIGEST, hash_, parent)
    records.commit(slot, CONTENT)
    return generation


def test_a_committed_record_says_what_was_written(records):
    generation = written(records, 99)
    assert records.read(99) == SlotRecord(generation, 16000, CONTENT, DIGEST, HASH, PARENT)
    assert records.content_hash(99) == CONTENT
    assert records.state(99) == READY


@pytest.mark.parametrize(("hash_", "parent"), [(b"x" * 8, b""), (b"x" * 64, b"y" * 64), (b"x\0" * 8, b"\0" * 8)])
def test_hashes_of_every_length_come_back_as_they_were(records, hash_, parent):
    written(records, 0, hash_, parent)
    assert records.read(0)[-2:] == (hash_, parent)


def test_nothing_is_read_from_a_record_that_is_not_ready(records):
    assert records.read(3) is None
    records.begin(3, 16000, DIGEST, HASH, PARENT)
    assert records.state(3) == WRITING
    assert records.read(3) is None
    records.commit(3, CONTENT)
    records.clear(3)
    assert records.state(3) == FREE
    assert records.read(3) is None


def test_every_reuse_and_every_free_has_its_own_generation(records):
    seen = [records.generation(5)]
    for _ in range(3):
        assert written(records, 5) == records.generation(5)
        seen.append(records.generation(5))
        records.clear(5)
        seen.append(records.generation(5))
    assert seen == sorted(set(seen))


def test_clearing_a_free_slot_changes_nothing(records):
    written(records, 5)
    records.clear(5)
    generation = records.generation(5)
    records.clear(5)
    assert records.generation(5) == generation


def test_generations_begin_above_those_that_the_segment_had_before():
    made = SlotRecords(4, 4096, segment_id=1, tenant="acme", first_generation=1000)
    assert made.generation(2) == 1000
    assert written(made, 2) == 1001
    made.close()


def test_only_what_is_being_written_is_committed(records):
    with pytest.raises(AssertionError, match="being written"):
        records.commit(1, CONTENT)
    written(records, 1)
    with pytest.raises(AssertionError, match="being written"):
        records.commit(1, CONTENT)


@pytest.mark.parametrize("offset", [12, 16, 32, 48, 56, 120, 191])
def test_a_changed_byte_under_the_crc_is_found(records, offset):
    written(records, 1)
    at = 2 * slots.RECORD_BYTES + offset
    records._table[at] ^= 1
    with pytest.raises(CorruptData, match="slot 1 "):
        records.read(1)


def test_a_body_of_another_generation_is_found(records):
    written(records, 1)
    records._words[2 * 32] += 1 << 2
    with pytest.raises(CorruptData):
        records.read(1)


def test_records_of_neighbours_do_not_touch(records):
    for slot in (10, 11, 12):
        written(records, slot, bytes([slot]) * 64)
    records.clear(11)
    assert records.read(10).hash == bytes([10]) * 64
    assert records.read(12).hash == bytes([12]) * 64


def test_a_ready_block_may_be_unhashed(records):
    records.begin(0, 1, DIGEST, HASH, b"")
    records.commit(0, bytes(16))
    assert records.read(0).content_hash == b""


def test_a_head_is_the_start_of_the_record(records):
    generation = written(records, 4)
    head = bytes(records.head(4))
    assert len(head) == 32
    assert int.from_bytes(head[:8], "little") == generation << 2 | READY
    assert int.from_bytes(head[12:16], "little") == 16000
    assert head[16:] == CONTENT


def order_of_writes(records, monkeypatch, act):
    """What the word of slot 0 was at each write of body or CRC, and after the act."""
    seen = []

    class Watched:
        def __init__(self, inner):
            self.inner = inner

        def pack_into(self, *args):
            seen.append(records.state(0))
            self.inner.pack_into(*args)

    monkeypatch.setattr(slots, "_BODY", Watched(slots._BODY))
    monkeypatch.setattr(slots, "_CRC", Watched(slots._CRC))
    act()
    return [*seen, records.state(0)]


def test_a_record_is_writing_while_its_body_changes(records, monkeypatch):
    written(records, 0)  # as if the slot was never cleared
    assert order_of_writes(records, monkeypatch, lambda: written(records, 0)) == [WRITING, WRITING, READY]


def test_the_word_is_aligned_to_be_stored_in_one_instruction(records):
    assert ctypes.addressof(ctypes.c_char.from_buffer(records._table)) % 8 == 0
    assert slots.RECORD_BYTES % 8 == 0


def test_the_header_names_format_segment_and_tenant(records):
    magic, version, record_bytes, count, slot_bytes, segment_id, first, length, tenant = slots._HEADER.unpack_from(
        records._table, 0
    )
    assert (magic, version, record_bytes, count) == (b"kvslots\0", 1, 256, 100)
    assert (slot_bytes, segment_id, first, tenant[:length]) == (16384, 7, 0, b"acme")


def test_a_tenant_name_too_long_for_the_header_is_refused():
    with pytest.raises(InvalidArgument, match="199 bytes"):
        SlotRecords(1, 4096, segment_id=1, tenant="t" * 199)


def test_closing_is_harmless_when_repeated():
    made = SlotRecords(1, 4096, segment_id=1, tenant="t")
    made.close()
    made.close()
