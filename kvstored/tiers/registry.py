"""The registry: what a restarted daemon has to know about the whole DRAM tier.

It lies in a memfd of its own: which segments there are, under which ids (never reused, restarts
included), how often a daemon started on this memory, and the namespaces of its blocks. An
append-only log, so that a kill at any instant leaves all that was noted before:

    0    8s   magic "kvsmeta\\0"       8   u32  format version     12  u32  zeros
    16        entries, each at a multiple of 8:
         u64  word: CRC-32 of the body << 32 | length of the body (0: here the log ends)
              body: u8 kind, then what its kind says

The body is written before its word, which is one aligned 8-byte store. Kinds that are not known
are passed over. A log that is full is written anew, compacted, in a larger memfd.
"""

from __future__ import annotations

import struct
from typing import Final, Self
from zlib import crc32

import msgspec

from kvstored.device.inherited import InheritedMapping
from kvstored.device.memory import PAGE_BYTES, Mapping
from kvstored.errors import CorruptData
from kvstored.keys import Namespace

FORMAT_VERSION: Final = 1
SIZE_BYTES_MIN: Final = 1 << 20

BOOT: Final = 1  # u64 number of a start
SEGMENT: Final = 2  # u64 id, kind of its pages in ASCII
SEGMENT_GONE: Final = 3  # u64 id
NAMESPACE: Final = 4  # msgpack of tenant, digest, encoding, fields
EPOCHS: Final = 5  # `EpochTable.pack`

_MAGIC: Final = b"kvsmeta\0"
_HEADER: Final = struct.Struct("=8sII")
_NUMBER: Final = struct.Struct("=Q")
_LOW_32: Final = (1 << 32) - 1


class Registry:
    """The log and what it says. Raises DeviceError where there is no memory for it."""

    def __init__(self, size_bytes: int = SIZE_BYTES_MIN) -> None:
        self._open(Mapping(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES, name="kvstored-registry"))
        _HEADER.pack_into(self._table, 0, _MAGIC, FORMAT_VERSION, 0)

    def _open(self, mapping: Mapping) -> None:
        self.boot = 0
        self.last_segment_id = 0
        self.segments: dict[int, str] = {}  # id -> kind of its pages
        self.namespaces: dict[bytes, Namespace] = {}
        self.epochs = b""  # as noted last
        self._mapping = mapping
        self._table = mapping.view()
        self._words = self._table.cast("Q")
        self._end = _HEADER.size

    @classmethod
    def adopt(cls, fd: int) -> Self:
        """The log that an earlier process left; takes the descriptor. Raises CorruptData or DeviceError."""
        made = cls.__new__(cls)
        made._open(InheritedMapping(fd))
        try:
            made._read()
        except CorruptData:
            made.close()
            raise
        return made

    @property
    def fd(self) -> int:
        """Its descriptor, for who keeps it; it stays the registry's."""
        return self._mapping.fd

    @property
    def size_bytes(self) -> int:
        """How much there is room for."""
        return self._mapping.size_bytes

    # ---- reading ----

    def _read(self) -> None:
        magic, version, _ = _HEADER.unpack_from(self._table, 0)
        if magic != _MAGIC:
            raise CorruptData("the registry has no header")
        if version != FORMAT_VERSION:
            raise CorruptData(f"the registry has format {version}, this daemon reads {FORMAT_VERSION}")
        while (body := self._body()) is not None:
            try:
                self._apply(body[0], body[1:])
            except (ValueError, struct.error) as error:  # msgspec's errors are ValueErrors
                raise CorruptData(f"the registry has an entry that makes no sense: {error}") from None
            self._end = self._after(len(body))

    def _body(self) -> bytes | None:
        """The entry at the end of what was read; None where the log ends, or is not what was written."""
        if self._end + 8 > len(self._table):
            return None
        word = self._words[self._end // 8]
        length = word & _LOW_32
        body = bytes(self._table[self._end + 8 : self._end + 8 + length])
        return body if length and len(body) == length and crc32(body) == word >> 32 else None

    def _after(self, length: int) -> int:
        return self._end + 8 + -(-length // 8) * 8

    def _apply(self, kind: int, body: bytes) -> None:
        if kind == BOOT:
            (self.boot,) = _NUMBER.unpack(body)
        elif kind == SEGMENT:
            (segment_id,) = _NUMBER.unpack_from(body)
            self.segments[segment_id] = body[_NUMBER.size :].decode("ascii")
            self.last_segment_id = max(self.last_segment_id, segment_id)
        elif kind == SEGMENT_GONE:
            (segment_id,) = _NUMBER.unpack(body)
            self.segments.pop(segment_id, None)
            self.last_segment_id = max(self.last_segment_id, segment_id)
        elif kind == NAMESPACE:
            namespace = Namespace(*msgspec.msgpack.decode(body, type=tuple[str, bytes, bytes, dict[str, str]]))
            self.namespaces[namespace.digest] = namespace
        elif kind == EPOCHS:
            self.epochs = body

    # ---- writing: False where the log is full ----

    def note_boot(self, number: int) -> bool:
        """A daemon starts on this memory."""
        return self._append(BOOT, _NUMBER.pack(number))

    def note_segment(self, segment_id: int, pages: str) -> bool:
        """A segment is about to be kept."""
        return self._append(SEGMENT, _NUMBER.pack(segment_id) + pages.encode("ascii"))

    def note_gone(self, segment_id: int) -> bool:
        """A segment is gone; its id stays used."""
        return self._append(SEGMENT_GONE, _NUMBER.pack(segment_id))

    def note_namespace(self, namespace: Namespace) -> bool:
        """Blocks of a namespace are about to be stored."""
        if namespace.digest in self.namespaces:
            return True
        fields = (namespace.tenant, namespace.digest, namespace.encoding, namespace.fields)
        return self._append(NAMESPACE, msgspec.msgpack.encode(fields))

    def note_epochs(self, packed: bytes) -> bool:
        """Which epochs count from here on."""
        return self._append(EPOCHS, packed)

    def _append(self, kind: int, data: bytes) -> bool:
        body = bytes([kind]) + data
        start, end = self._end, self._after(len(body))
        if end > len(self._table):
            return False
        if end < len(self._table):
            self._words[end // 8] = 0  # where an entry that was never finished may have left something
        self._table[start + 8 : start + 8 + len(body)] = body
        self._words[start // 8] = crc32(body) << 32 | len(body)
        self._end = end
        self._apply(kind, data)
        return True

    def compacted(self, more_bytes: int) -> Registry:
        """The same in a new memfd, with room for at least so much more. Raises DeviceError."""
        made = Registry(2 * self._end + 2 * more_bytes + SIZE_BYTES_MIN)
        # The last id first: it may be of a segment that is gone.
        done = [made.note_boot(self.boot), made.note_gone(self.last_segment_id)]
        done += [made.note_segment(*segment) for segment in self.segments.items()]
        done += [made.note_namespace(namespace) for namespace in self.namespaces.values()]
        done += [made.note_epochs(self.epochs)] if self.epochs else []
        assert all(done), "it is larger"
        return made

    def close(self) -> None:
        """Give the memory back; harmless when repeated."""
        self._words.release()
        self._table.release()
        self._mapping.close()
