"""Slot records: what a restarted daemon has to know about the slots of one segment.

They lie in a memfd of their own beside the segment, which no client ever sees. A table is a
header and one record per slot, 256 bytes each, native byte order (the memory never leaves the
machine). Header:

    0    8s   magic "kvslots\\0"       8   u32  format version     12  u32  bytes per record
    16   u32  slots                   20  u32  bytes per slot     24  u64  segment id
    32   u64  first generation        40  u16  tenant length      42  198s tenant, UTF-8

Record:

    0    u64  word: generation << 2 | state (0 FREE, 1 WRITING, 2 READY)
    8    u32  CRC-32 of bytes 12 to 191, started with the generation's lower 32 bits
    12   u32  size of the block       16  16s  content hash (zeros: not hashed yet)
    32   16s  namespace digest        48  u8   hash length        49  u8   parent length
    56   64s  hash                    120 64s  parent
    184  8s   zeros: room under the CRC (expiry)
    192  64s  zeros: room for what changes in place (heat, epochs, leases)

Order of writes, so that a kill at any point leaves a record that is right or not READY:
to begin, the word becomes WRITING, then the body; to commit, content hash and CRC, then the
word becomes READY in one aligned 8-byte store; to free, the word becomes FREE before any byte
of the slot changes. The generation grows with every begin and every free, and starts above
all that the segment had before when its slots change size.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple
from zlib import crc32

from kvstored.device.memory import CONTENT_HASH_BYTES, PAGE_BYTES, Mapping
from kvstored.errors import CorruptData, InvalidArgument

FORMAT_VERSION: Final = 1
RECORD_BYTES: Final = 256
TENANT_BYTES_MAX: Final = 198

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2

_MAGIC: Final = b"kvslots\0"
_HEADER: Final = struct.Struct("=8sIIIIQQH198s")
_BODY: Final = struct.Struct("=I16s16sBB6x64s64s")
_CRC: Final = struct.Struct("=I")
_BODY_AT: Final = 12
_CRC_AT: Final = 8
_HASH_AT: Final = 16
_HEAD_BYTES: Final = 32
_CHECKED_TO: Final = 192
_WORDS_PER_RECORD: Final = RECORD_BYTES // 8
_UNHASHED: Final = bytes(CONTENT_HASH_BYTES)
_LOW_32: Final = (1 << 32) - 1


@lru_cache(maxsize=64)
def _cutter(count: int) -> struct.Struct:
    return struct.Struct(f"{_HEAD_BYTES}s{RECORD_BYTES - _HEAD_BYTES}x" * count)


class SlotRecord(NamedTuple):
    """One READY record. An empty content hash says that the block was not hashed yet."""

    generation: int
    size_bytes: int
    content_hash: bytes
    digest: bytes
    hash: bytes
    parent: bytes


class SlotRecords:
    """The record table of one segment. Raises DeviceError where there is no memory for it."""

    def __init__(self, slots: int, slot_bytes: int, *, segment_id: int, tenant: str, first_generation: int = 0) -> None:
        name = tenant.encode()
        if len(name) > TENANT_BYTES_MAX:
            raise InvalidArgument(f"tenant name of {len(name)} bytes: {TENANT_BYTES_MAX} are allowed")
        self.slots = slots
        self._first_generation = first_generation
        pages = -(-RECORD_BYTES * (slots + 1) // PAGE_BYTES)
        self._mapping = Mapping(pages * PAGE_BYTES, name=f"kvstored-slots-{segment_id}")
        self._table = self._mapping.view()
        # A cast view stores an item with one machine instruction; struct's standard sizes go byte by byte.
        self._words = self._table.cast("Q")
        _HEADER.pack_into(
            self._table, 0, _MAGIC, FORMAT_VERSION, RECORD_BYTES, slots, slot_bytes, segment_id, first_generation,
            len(name), name,
        )  # fmt: skip

    def begin(self, slot: int, size_bytes: int, digest: bytes, hash_: bytes, parent: bytes) -> int:
        """Note that a block is being written to the slot; returns the slot's new generation."""
        generation = self.generation(slot) + 1
        self._words[(slot + 1) * _WORDS_PER_RECORD] = generation << 2 | WRITING
        _BODY.pack_into(
            self._table, (slot + 1) * RECORD_BYTES + _BODY_AT, size_bytes, _UNHASHED, digest, len(hash_), len(parent),
            hash_, parent,
        )  # fmt: skip
        return generation

    def commit(self, slot: int, content_hash: bytes) -> None:
        """Make the record READY; the block's bytes are in the slot."""
        word = self._words[(slot + 1) * _WORDS_PER_RECORD]
        assert word & 3 == WRITING, "only what is being written is committed"
        at = (slot + 1) * RECORD_BYTES
        self._table[at + _HASH_AT : at + _HASH_AT + CONTENT_HASH_BYTES] = content_hash
        _CRC.pack_into(self._table, at + _CRC_AT, self._checksum(at, word >> 2))
        self._words[(slot + 1) * _WORDS_PER_RECORD] = word >> 2 << 2 | READY

    def clear(self, slot: int) -> None:
        """Note that the slot is free, before any of its bytes changes; harmless when repeated."""
        at = (slot + 1) * _WORDS_PER_RECORD
        word = self._words[at]
        if word & 3 != FREE:
            self._words[at] = ((word >> 2) + 1) << 2 | FREE

    def state(self, slot: int) -> int:
        """FREE, WRITING or READY."""
        return self._words[(slot + 1) * _WORDS_PER_RECORD] & 3

    def generation(self, slot: int) -> int:
        """The slot's generation: it differs between any two blocks that ever were in the slot."""
        return max(self._words[(slot + 1) * _WORDS_PER_RECORD] >> 2, self._first_generation)

    def content_hash(self, slot: int) -> bytes:
        """The content hash of the block in the slot; zeros where it is not hashed yet."""
        at = (slot + 1) * RECORD_BYTES + _HASH_AT
        return self._table[at : at + CONTENT_HASH_BYTES].tobytes()

    def head(self, slot: int) -> memoryview:
        """The first 32 bytes of the record: generation word, CRC, size, content hash."""
        at = (slot + 1) * RECORD_BYTES
        return self._table[at : at + _HEAD_BYTES]

    def heads(self, slot: int, count: int) -> bytes:
        """The heads of `count` slots in a row."""
        cutter = _cutter(count)
        return b"".join(cutter.unpack_from(self._table, (slot + 1) * RECORD_BYTES))

    def read(self, slot: int) -> SlotRecord | None:
        """The record as a restarted daemon would take it; None unless READY. Raises CorruptData."""
        if self.state(slot) != READY:
            return None
        at, generation = (slot + 1) * RECORD_BYTES, self.generation(slot)
        if _CRC.unpack_from(self._table, at + _CRC_AT)[0] != self._checksum(at, generation):
            raise CorruptData(f"the record of slot {slot} has a wrong CRC")
        size, content, digest, hash_len, parent_len, hash_, parent = _BODY.unpack_from(self._table, at + _BODY_AT)
        content = b"" if content == _UNHASHED else content
        return SlotRecord(generation, size, content, digest, hash_[:hash_len], parent[:parent_len])

    def _checksum(self, at: int, generation: int) -> int:
        return crc32(self._table[at + _BODY_AT : at + _CHECKED_TO], generation & _LOW_32)

    def close(self) -> None:
        """Give the table's memory back; harmless when repeated."""
        self._words.release()
        self._table.release()
        self._mapping.close()
