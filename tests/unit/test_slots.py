import ctypes
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.device.memory import Mapping
from kvstored.errors import CorruptData, InvalidArgument
from kvstored.tiers import slots
from kvstored.tiers.slots import FREE, READY, WRITING, SlotRecord, SlotRecords

DIGEST, HASH, PARENT, CONTENT = b"d" * 16, b"h" * 32, b"p" * 64, b"c" * 16


@pytest.fixture
def records():
    made = SlotRecords(100 * 16384, 7)
    made.cut("acme", 100, 16384)
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


def test_generations_go_on_when_the_slots_change_size(records):
    before = written(records, 3)
    records.clear(3)
    records.cut("acme", 50, 32768)
    assert (records.slots, records.slot_bytes, records.tenant) == (50, 32768, "acme")
    assert written(records, 3) > before


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
    head = records.heads(4, 1)
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
    magic, version, record_bytes, room, _, segment_id = slots._HEADER.unpack_from(records._table, 0)
    assert (magic, version, record_bytes, room) == (b"kvslots\0", 2, 256, 400)
    assert (records.slots, records.slot_bytes, segment_id, records.tenant) == (100, 16384, 7, "acme")


def test_a_tenant_name_too_long_for_the_header_is_refused():
    made = SlotRecords(4096, 1)
    with pytest.raises(InvalidArgument, match="199 bytes"):
        made.cut("t" * 199, 1, 4096)
    made.close()


class Torn:
    """A struct whose bytes arrive piece by piece, with a picture of the whole table after each."""

    def __init__(self, inner, picture):
        self.inner, self.picture = inner, picture

    def pack_into(self, table, at, *values):
        data = self.inner.pack(*values)
        for start in range(0, len(data), 48):
            table[at + start : at + min(len(data), start + 48)] = data[start : start + 48]
            self.picture()


class Stores:
    """The words of a table, with a picture of it after each store."""

    def __init__(self, inner, picture):
        self.inner, self.picture = inner, picture

    def __getitem__(self, place):
        return self.inner[place]

    def __setitem__(self, place, value):
        self.inner[place] = value
        self.picture()

    def release(self):
        self.inner.release()


def adopted(data):
    copy = Mapping(len(data), name="copy")
    os.pwrite(copy.fd, data, 0)
    fd = os.dup(copy.fd)
    copy.close()
    return SlotRecords.adopt(fd, 100 * 16384, 7)


STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(8, 64), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_after_any_prefix_of_its_stores_a_record_is_right_or_not_there(steps):
    records = SlotRecords(100 * 16384, 7)
    records.cut("acme", 100, 16384)
    pictures, stored = [], {}

    def picture():
        pictures.append(bytes(records._table))

    def check(*allowed):
        picture()
        for data in pictures:
            found = adopted(data)
            blocks = {block.slot: (block.hash, block.parent, block.content_hash) for block in found.scan()[0]}
            assert blocks in allowed
            assert all(found.state(slot) in (FREE, READY) for slot in range(3))
            found.close()
        pictures.clear()

    records._words = Stores(records._words, picture)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "_BODY", Torn(slots._BODY, picture))
        patch.setattr(slots, "_CRC", Torn(slots._CRC, picture))
        for number, (slot, size, finish) in enumerate(steps):
            before = dict(stored)
            stored.pop(slot, None)
            records.clear(slot)
            records.begin(slot, 16000, DIGEST, bytes([number]) * size, HASH)
            check(before, stored)
            if finish:
                records.commit(slot, bytes([number + 1]) * 16)
                before, stored = stored, {**stored, slot: (bytes([number]) * size, HASH, bytes([number + 1]) * 16)}
                check(before, stored)
    records.close()


def test_what_is_not_ready_is_free_for_the_next_process_with_another_generation(records):
    written(records, 1)
    generation = records.begin(2, 16000, DIGEST, HASH, PARENT)
    found = adopted(bytes(records._table))
    blocks, dropped = found.scan()
    assert [block.slot for block in blocks] == [1]
    assert dropped == {"half_written": 1}
    assert (found.state(2), found.generation(2)) == (FREE, generation + 1)
    found.close()


def test_the_rank_of_a_block_comes_back_and_that_of_an_earlier_one_in_its_slot_does_not(records):
    for slot in (1, 2):
        written(records, slot)
        records.rank(slot, 10 + slot)
    records.clear(2)
    written(records, 2)
    found = adopted(bytes(records._table))
    assert [(block.slot, block.rank) for block in found.scan()[0]] == [(1, 11), (2, 0)]
    found.close()


def test_records_of_another_format_or_segment_are_refused(records):
    data = bytes(records._table)
    with pytest.raises(CorruptData, match="format 99"):
        adopted(data[:8] + (99).to_bytes(4, "little") + data[12:])
    with pytest.raises(CorruptData, match="not this segment's"):
        adopted(data[:24] + (8).to_bytes(8, "little") + data[32:])
    with pytest.raises(CorruptData, match="no header"):
        adopted(bytes(len(data)))


def test_closing_is_harmless_when_repeated():
    made = SlotRecords(4096, 1)
    made.close()
    made.close()
