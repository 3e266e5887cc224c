"""The lease ledger: which slots were leased to whom, for the daemon that comes after this one.

It lies in a memfd of its own, written before the reply that hands out a lease, so that a
restarted daemon leaves those slots alone until their readers are done. Noting a lease is one
copy of its runs of slots, in a chunk of a size class; ending it is one 8-byte store. Layout, from
byte 64 on, native byte order:

    0    u64  bytes of this chunk, for good (0: no chunk was ever here)
    8    u64  word: kind << 32 | runs of the lease or bytes of the text (0: void)
    16   u64  lease id      24  16s  group key      40  16s  namespace digest      56  8s  zeros
    64        runs, two u64 each: first slot (see `Segment`), how many; for a session its msgpack text

The word is stored last, and becomes 0 before the chunk serves anybody else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple, Self

import msgspec

from kvstored.device.inherited import InheritedMapping
from kvstored.device.memory import Mapping
from kvstored.errors import CorruptData
from kvstored.tiers.segment import SLOTS_MAX

FORMAT_VERSION: Final = 1
# Address space, of which only what is used takes memory: half a million leases of a few runs.
SIZE_BYTES: Final = 256 << 20

_MAGIC: Final = b"kvlease\0"
_HEADER: Final = struct.Struct("=8sI52x")
_CHUNK: Final = struct.Struct("=Q16s16s8x")  # from byte 16 of a chunk on
_RUN: Final = struct.Struct("=QQ")
_LEASE: Final = 1
_SESSION: Final = 2
_TEXT_AT: Final = 64
_SLOTS_MIN: Final = 8
_LOW_32: Final = (1 << 32) - 1


class NotedSession(msgspec.Struct, frozen=True, array_like=True):
    """A client process that may hold leases."""

    session_id: bytes
    client_id: bytes  # the same in every session of one client, as it says
    group_key: bytes
    group_id: bytes  # empty: it has no group that others can join
    tenant: str
    pid: int
    started: int  # its start time, in clock ticks since the machine's
    uid: int


class NotedLease(NamedTuple):
    """A lease as it was handed out."""

    place: int
    lease_id: int
    group_key: bytes
    digest: bytes
    runs: list[tuple[int, int]]  # first slot, how many

    def slots(self) -> list[int]:
        """All of its slots, in order."""
        return [slot for first, count in self.runs for slot in range(first, first + count)]


class LeaseLedger:
    """Notes leases and sessions; plain stores into memory. Raises DeviceError where there is none."""

    def __init__(self, size_bytes: int = SIZE_BYTES) -> None:
        self._open(Mapping(size_bytes, name="kvstored-leases"))
        _HEADER.pack_into(self._table, 0, _MAGIC, FORMAT_VERSION)

    def _open(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._table = mapping.view()
        self._words = self._table.cast("Q")
        self._free: dict[int, list[int]] = {}  # places by room in slots
        self._end = _HEADER.size
        self._frozen = False

    @classmethod
    def adopt(cls, fd: int) -> Self:
        """The ledger that an earlier process left; takes the descriptor. Raises CorruptData or DeviceError."""
        made = cls.__new__(cls)
        made._open(InheritedMapping(fd))
        try:
            magic, version = _HEADER.unpack_from(made._table, 0)
            if magic != _MAGIC:
                raise CorruptData("the lease ledger has no header")
            if version != FORMAT_VERSION:
                raise CorruptData(f"the lease ledger has format {version}, this daemon reads {FORMAT_VERSION}")
            made._walk()
        except CorruptData:
            made.close()
            raise
        return made

    def _walk(self) -> None:
        while self._end + _TEXT_AT <= len(self._table):
            size = self._words[self._end // 8]
            if not size:
                return
            if size % 8 or size < _TEXT_AT or self._end + size > len(self._table):
                raise CorruptData("a chunk of the lease ledger has an impossible size")
            if not self._words[self._end // 8 + 1]:
                self._free.setdefault((size - _TEXT_AT) // 8, []).append(self._end)
            self._end += size

    @property
    def fd(self) -> int:
        """Its descriptor, for who keeps it; it stays the ledger's."""
        return self._mapping.fd

    # ---- writing ----

    def note_lease(self, lease_id: int, group_key: bytes, digest: bytes, runs: Sequence[tuple[int, int]]) -> int:
        """Note a lease before it is handed out; returns its place, 0 where the ledger is full."""
        packed = struct.pack(f"={2 * len(runs)}Q", *chain.from_iterable(runs))
        return self._note(_LEASE, len(runs), lease_id, group_key, digest, packed)

    def note_session(self, session: NotedSession) -> int:
        """Note a session before its first lease; returns its place, 0 where the ledger is full."""
        text = msgspec.msgpack.encode(session)
        return self._note(_SESSION, len(text), 0, session.group_key, b"", text)

    def _note(self, kind: int, length: int, lease_id: int, key: bytes, digest: bytes, text: bytes) -> int:
        room = max(_SLOTS_MIN, 1 << (-(-len(text) // 8) - 1).bit_length())
        free = self._free.get(room)
        place = free.pop() if free else self._fresh(room)
        if place:
            _CHUNK.pack_into(self._table, place + 16, lease_id, key, digest)
            self._table[place + _TEXT_AT : place + _TEXT_AT + len(text)] = text
            self._words[place // 8 + 1] = kind << 32 | length
        return place

    def _fresh(self, room: int) -> int:
        place, size = self._end, _TEXT_AT + 8 * room
        if place + size > len(self._table):
            return 0
        self._words[place // 8] = size
        self._end += size
        return place

    def void(self, place: int) -> None:
        """A lease or session has ended; nothing of it may have been given back before."""
        if self._frozen:
            return
        at = place // 8
        self._words[at + 1] = 0
        self._free.setdefault((self._words[at] - _TEXT_AT) // 8, []).append(place)

    def freeze(self) -> None:
        """The daemon stops: what is leased now stays noted, since clients go on reading it."""
        self._frozen = True

    # ---- reading ----

    def noted(self) -> tuple[list[tuple[int, NotedSession]], list[NotedLease]]:
        """All that is not void: sessions with their places, and leases. What makes no sense is voided."""
        sessions: list[tuple[int, NotedSession]] = []
        leases: list[NotedLease] = []
        place = _HEADER.size
        while place < self._end:
            size, word = self._words[place // 8], self._words[place // 8 + 1]
            if word and not self._read(place, size, word, sessions, leases):
                self.void(place)
            place += size
        return sessions, leases

    def _read(
        self, place: int, size: int, word: int, sessions: list[tuple[int, NotedSession]], leases: list[NotedLease]
    ) -> bool:
        kind, length = word >> 32, word & _LOW_32
        text = self._table[place + _TEXT_AT : place + size]
        if kind == _LEASE and 16 * length <= len(text):
            lease_id, key, digest = _CHUNK.unpack_from(self._table, place + 16)
            runs = list(_RUN.iter_unpack(text[: 16 * length]))
            if sum(count for _, count in runs) > SLOTS_MAX:
                return False
            leases.append(NotedLease(place, lease_id, key, digest, runs))
            return True
        if kind == _SESSION and length <= len(text):
            try:
                sessions.append((place, msgspec.msgpack.decode(bytes(text[:length]), type=NotedSession)))
            except msgspec.MsgspecError:
                return False
            return True
        return False

    def close(self) -> None:
        """Give the memory back; harmless when repeated."""
        self._words.release()
        self._table.release()
        self._mapping.close()
