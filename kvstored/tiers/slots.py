"""Slot records: what a restarted daemon has to know about the slots of one segment.

They lie in a memfd of their own beside the segment, which no client ever sees. A table is a
header and 256 bytes for each slot that the segment could have, native byte order (the memory
never leaves the machine). It is as long as the smallest slots need, and what no slot uses was
never touched and takes no memory; so the table is made, and kept by whoever keeps it, once and
long before anything depends on it, and a new slot size costs one store. Header:

    0    8s   magic "kvslots\0"       8   u32  format version     12  u32  bytes per record
    16   u32  records there is room for                           24  u64  segment id
    32   u64  cut: slots << 32 | bytes per slot (0: not cut yet)
    40   u16  tenant length           42  198s tenant, UTF-8, set for good before the first cut

Record:

    0    u64  word: generation << 2 | state (0 FREE, 1 WRITING, 2 READY)
    8    u32  CRC-32 of bytes 12 to 191, started with the generation's lower 32 bits
    12   u32  size of the block       16  16s  content hash (zeros: not hashed yet)
    32   16s  namespace digest        48  u8   hash length        49  u8   parent length
    56   64s  hash                    120 64s  parent
    184  u64  when it ends, and its sliding TTL (`Expiry.word`); 0: it does not
    192  u64  rank: generation's lower 32 bits << 32 | place in the eviction order, changed in place
    200  u64  a later, or earlier, end: seconds since 1970 << 32 | CRC-32 of them and the generation
    208  u64  the limit of a sliding end, likewise
    216  40s  zeros: room for more that changes in place

Order of writes, so that a kill at any point leaves a record that is right or not READY:
to begin, the word becomes WRITING, then the body; to commit, content hash and CRC, then the
word becomes READY in one aligned 8-byte store; to free, the word becomes FREE before any byte
of the slot changes. The generation grows with every begin and every free. A segment is cut when
all its slots are FREE.
"""

from __future__ import annotations

import struct
from collections import Counter
from functools import lru_cache
from typing import Final, NamedTuple, Self
from zlib import crc32

from kvstored.device.inherited import InheritedMapping
from kvstored.device.memory import CONTENT_HASH_BYTES, PAGE_BYTES, Mapping
from kvstored.errors import CorruptData, InvalidArgument
from kvstored.keys import HASH_BYTES_MAX, SLOT_ALIGN_BYTES
from kvstored.lifetime import Expiry

FORMAT_VERSION: Final = 2
RECORD_BYTES: Final = 256
TENANT_BYTES_MAX: Final = 198

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2

_MAGIC: Final = b"kvslots\0"
_HEADER: Final = struct.Struct("=8sIIIIQ")
_TENANT: Final = struct.Struct("=H198s")
_RECORD: Final = struct.Struct("=QII16s16sBB6x64s64sQQQQ40x")
_BODY: Final = struct.Struct("=I16s16sBB6x64s64sQ")
_CRC: Final = struct.Struct("=I")
_BODY_AT: Final = 12
_CRC_AT: Final = 8
_HASH_AT: Final = 16
_HEAD_BYTES: Final = 32
_CHECKED_TO: Final = 192
_WORDS_PER_RECORD: Final = RECORD_BYTES // 8
_CUT_WORD: Final = 4
_TENANT_AT: Final = 40
_EXPIRY_WORD: Final = 23
_RANK_WORD: Final = 24
_END_WORD: Final = 25
_LIMIT_WORD: Final = 26
_SEALED: Final = struct.Struct("=IQ")
_UNHASHED: Final = bytes(CONTENT_HASH_BYTES)
_GENERATIONS: Final = (1 << 62) - 1  # a damaged word may hold the last one: then they begin anew
_LOW_32: Final = (1 << 32) - 1


@lru_cache(maxsize=64)
def _cutter(count: int) -> struct.Struct:
    return struct.Struct(f"{_HEAD_BYTES}s{RECORD_BYTES - _HEAD_BYTES}x" * count)


def _checked(value: int, generation: int) -> int:
    """A number that changes in place, with what shows that it is this block's and whole."""
    return value << 32 | crc32(_SEALED.pack(value, generation))


def _read_checked(word: int, generation: int) -> int | None:
    value = word >> 32
    return value if word == _checked(value, generation) else None


def _expiry(word: int, end: int, limit: int, generation: int) -> Expiry | None:
    """What a record says of its block's end; one whose limit is damaged ends as it was put."""
    limit_s, end_s = _read_checked(limit, generation), _read_checked(end, generation)
    expiry = Expiry.of(word, limit_s or 0)
    if expiry is not None and expiry.sliding_s and limit_s is None:
        return Expiry(expiry.expires_s)
    if end_s is None:
        return expiry
    return Expiry(float(end_s)) if expiry is None else Expiry(float(end_s), expiry.sliding_s, expiry.limit_s)


class SlotRecord(NamedTuple):
    """One READY record. An empty content hash says that the block was not hashed yet."""

    generation: int
    size_bytes: int
    content_hash: bytes
    digest: bytes
    hash: bytes
    parent: bytes


class Found(NamedTuple):
    """One slot's record as a restarted daemon finds it; `rank` 0 is a block that was in no order yet."""

    slot: int
    rank: int
    size_bytes: int
    content_hash: bytes
    digest: bytes
    hash: bytes
    parent: bytes
    expiry: Expiry | None = None


class SlotRecords:
    """The record table of one segment. Raises DeviceError where there is no memory for it."""

    def __init__(self, segment_bytes: int, segment_id: int) -> None:
        self.room = segment_bytes // SLOT_ALIGN_BYTES
        size = -(-RECORD_BYTES * (self.room + 1) // PAGE_BYTES) * PAGE_BYTES
        self._open(Mapping(size, name=f"kvstored-slots-{segment_id}"))
        _HEADER.pack_into(self._table, 0, _MAGIC, FORMAT_VERSION, RECORD_BYTES, self.room, 0, segment_id)

    def _open(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._table = mapping.view()
        # A cast view stores an item with one machine instruction; struct's standard sizes go byte by byte.
        self._words = self._table.cast("Q")

    @classmethod
    def adopt(cls, fd: int, segment_bytes: int, segment_id: int) -> Self:
        """The table that an earlier process left; takes the descriptor. Raises CorruptData or DeviceError."""
        made = cls.__new__(cls)
        made._open(InheritedMapping(fd))
        made.room = segment_bytes // SLOT_ALIGN_BYTES
        try:
            made._check(segment_id)
        except CorruptData:
            made.close()
            raise
        return made

    def _check(self, segment_id: int) -> None:
        magic, version, record_bytes, room, _, named = _HEADER.unpack_from(self._table, 0)
        if magic != _MAGIC:
            raise CorruptData("the slot records have no header")
        if version != FORMAT_VERSION:
            raise CorruptData(f"slot records of format {version}, this daemon reads {FORMAT_VERSION}")
        fits = RECORD_BYTES * (room + 1) <= len(self._table) and self.slots <= room
        if (record_bytes, room, named) != (RECORD_BYTES, self.room, segment_id) or not fits:
            raise CorruptData("the slot records are not this segment's")

    @property
    def fd(self) -> int:
        """The table's descriptor, for who keeps it; it stays the table's."""
        return self._mapping.fd

    @property
    def slots(self) -> int:
        """How many slots the segment is cut into; 0: it is not cut."""
        return self._words[_CUT_WORD] >> 32

    @property
    def slot_bytes(self) -> int:
        """Their size."""
        return self._words[_CUT_WORD] & _LOW_32

    @property
    def tenant(self) -> str:
        """Whose segment it is. Raises CorruptData where the name is none."""
        length, name = _TENANT.unpack_from(self._table, _TENANT_AT)
        try:
            return str(name[:length], "utf-8")
        except UnicodeDecodeError:
            raise CorruptData("the name of a tenant is not UTF-8") from None

    def cut(self, tenant: str, slots: int, slot_bytes: int) -> None:
        """Note that the segment is divided anew; every slot is FREE. Raises InvalidArgument."""
        name = tenant.encode()
        if len(name) > TENANT_BYTES_MAX:
            raise InvalidArgument(f"tenant name of {len(name)} bytes: {TENANT_BYTES_MAX} are allowed")
        assert slots <= self.room, "there is a record for each"
        if not self._words[_CUT_WORD]:
            _TENANT.pack_into(self._table, _TENANT_AT, len(name), name)
        self._words[_CUT_WORD] = slots << 32 | slot_bytes

    def begin(
        self, slot: int, size_bytes: int, digest: bytes, hash_: bytes, parent: bytes, expiry: Expiry | None = None
    ) -> int:
        """Note that a block is being written to the slot; returns the slot's new generation."""
        generation = (self.generation(slot) + 1) & _GENERATIONS
        self._words[(slot + 1) * _WORDS_PER_RECORD] = generation << 2 | WRITING
        _BODY.pack_into(
            self._table, (slot + 1) * RECORD_BYTES + _BODY_AT, size_bytes, _UNHASHED, digest, len(hash_), len(parent),
            hash_, parent, 0 if expiry is None else expiry.word,
        )  # fmt: skip
        if expiry is not None and expiry.sliding_s:
            self._words[(slot + 1) * _WORDS_PER_RECORD + _LIMIT_WORD] = _checked(expiry.limit_s, generation)
        return generation

    def commit(self, slot: int, content_hash: bytes) -> None:
        """Make the record READY; the block's bytes are in the slot."""
        word = self._words[(slot + 1) * _WORDS_PER_RECORD]
        assert word & 3 == WRITING, "only what is being written is committed"
        at = (slot + 1) * RECORD_BYTES
        self._table[at + _HASH_AT : at + _HASH_AT + CONTENT_HASH_BYTES] = content_hash
        _CRC.pack_into(self._table, at + _CRC_AT, self._checksum(at, word >> 2))
        self._words[(slot + 1) * _WORDS_PER_RECORD] = word >> 2 << 2 | READY

    def move_end(self, slot: int, expiry: Expiry) -> None:
        """Note another end of the block in the slot, and its limit, in place; in whole seconds, rounded down."""
        at, generation = (slot + 1) * _WORDS_PER_RECORD, self.generation(slot)
        self._words[at + _LIMIT_WORD] = _checked(expiry.limit_s, generation)
        self._words[at + _END_WORD] = _checked(int(expiry.expires_s), generation)

    def expiry(self, slot: int) -> Expiry | None:
        """When the block in the slot ends, as it was noted last."""
        at, words = (slot + 1) * _WORDS_PER_RECORD, self._words
        return _expiry(words[at + _EXPIRY_WORD], words[at + _END_WORD], words[at + _LIMIT_WORD], self.generation(slot))

    def clear(self, slot: int) -> None:
        """Note that the slot is free, before any of its bytes changes; harmless when repeated."""
        at = (slot + 1) * _WORDS_PER_RECORD
        word = self._words[at]
        if word & 3 != FREE:
            self._words[at] = ((word >> 2) + 1 & _GENERATIONS) << 2 | FREE

    def state(self, slot: int) -> int:
        """FREE, WRITING or READY."""
        return self._words[(slot + 1) * _WORDS_PER_RECORD] & 3

    def generation(self, slot: int) -> int:
        """The slot's generation: it differs between any two blocks that ever were in the slot."""
        return self._words[(slot + 1) * _WORDS_PER_RECORD] >> 2

    def content_hash(self, slot: int) -> bytes:
        """The content hash of the block in the slot; zeros where it is not hashed yet."""
        at = (slot + 1) * RECORD_BYTES + _HASH_AT
        return self._table[at : at + CONTENT_HASH_BYTES].tobytes()

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
        size, content, digest, hash_len, parent_len, hash_, parent, _ = _BODY.unpack_from(self._table, at + _BODY_AT)
        content = b"" if content == _UNHASHED else content
        return SlotRecord(generation, size, content, digest, hash_[:hash_len], parent[:parent_len])

    def _checksum(self, at: int, generation: int) -> int:
        return crc32(self._table[at + _BODY_AT : at + _CHECKED_TO], generation & _LOW_32)

    def rank(self, slot: int, place: int) -> None:
        """Note where the block stands in the eviction order: the higher, the warmer, from 1."""
        at = (slot + 1) * _WORDS_PER_RECORD
        self._words[at + _RANK_WORD] = (self._words[at] >> 2 & _LOW_32) << 32 | place

    def scan(self) -> tuple[list[Found], Counter[str]]:
        """The READY records that can be taken over, and why others cannot; those are FREE afterwards."""
        found: list[Found] = []
        dropped: Counter[str] = Counter()
        table, slot_bytes = self._table, self.slot_bytes
        records = table[RECORD_BYTES : RECORD_BYTES * (self.slots + 1)]
        for index, record in enumerate(_RECORD.iter_unpack(records)):
            word, crc, size, content, digest, hash_len, parent_len, hash_, parent, life, rank, end, limit = record
            if not word & 3:
                continue
            at, low = (index + 1) * RECORD_BYTES, word >> 2 & _LOW_32
            if word & 3 != READY:
                reason = "half_written"
            elif crc != crc32(table[at + _BODY_AT : at + _CHECKED_TO], low):
                reason = "damaged_record"
            elif content == _UNHASHED:
                reason = "unhashed"
            elif not 0 < size <= slot_bytes or not hash_len or max(hash_len, parent_len) > HASH_BYTES_MAX:
                reason = "damaged_record"
            else:
                place = rank & _LOW_32 if rank >> 32 == low else 0
                expiry = _expiry(life, end, limit, word >> 2) if life or end else None
                hashes = (hash_[:hash_len], parent[:parent_len])
                found.append(Found(index, place, size, content, digest, *hashes, expiry))
                continue
            dropped[reason] += 1
            self.clear(index)
        return found, dropped

    def close(self) -> None:
        """Give the table's memory back; harmless when repeated."""
        self._words.release()
        self._table.release()
        self._mapping.close()
