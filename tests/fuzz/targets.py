"""What reads bytes and does nothing else: frames, namespaces, and all that is found on disk or in kept memory.

A target takes a fuzzer's bytes and raises only where something is wrong. Where a format has a CRC, the
bytes are tried as they are and with the CRC made right, so that the reader behind it is reached too.
"""

import os
import struct
import zlib
from contextlib import suppress

from google.protobuf.message import DecodeError
from kvstored_client.errors import KVStoredClientError
from kvstored_client.slots import KnownSlots
from kvstored_proto import frames, namespace, page
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.device.memory import PAGE_BYTES, Mapping
from kvstored.errors import DeviceError, KVStoredError
from kvstored.keys import Namespace
from kvstored.tiers import evictions, formats, markers, pages, tombstones, trailer
from kvstored.tiers.base import Store
from kvstored.tiers.lease_ledger import LeaseLedger, NotedSession
from kvstored.tiers.registry import Registry
from kvstored.tiers.slots import READY, SlotRecords
from tests.fuzz.choices import Choices

SEGMENT_BYTES = 4 * PAGE_BYTES
TABLE_BYTES_MAX = 16 * PAGE_BYTES
KEY = bytes(range(48))


# ---- frames ----


def frame_reader(data):
    """Cut anywhere, a stream gives the same frames; what is none is a ProtocolError."""
    choices = Choices(data)
    cuts = [1 + choices.byte() for _ in range(4)]
    stream = choices.rest()
    outcomes = []
    for sizes in ([len(stream) or 1], cuts):
        reader, found, error = frames.FrameReader(max_body_bytes=4096, max_fds=8), [], ""
        try:
            at, turn = 0, 0
            while at < len(stream):
                size = sizes[turn % len(sizes)]
                found += reader.feed(stream[at : at + size])
                at, turn = at + size, turn + 1
        except frames.ProtocolError as problem:
            error = str(problem)
        outcomes.append((found, error))
        assert len(reader._buffer) <= 4096 + frames.HEADER.size + len(stream)
        reader.close()
    # What came before an error in one piece is lost with that piece: then only the error counts.
    assert outcomes[0][1] == outcomes[1][1]
    assert outcomes[0] == outcomes[1] or outcomes[0][1]


def namespace_spec(data):
    """A namespace that can be read can be named, twice the same."""
    with suppress(DecodeError, UnicodeEncodeError):
        spec = pb.NamespaceSpec.FromString(data)
        assert namespace.digest("a", spec) == namespace.digest("a", pb.NamespaceSpec.FromString(data))
        assert namespace.digest("a", spec) != namespace.digest("b", spec)
        assert len(namespace.chain_seed("a", spec)) == namespace.DIGEST_BYTES
        namespace.fields(spec)


# ---- what a client believes ----


def lease_slots(data):
    """A lease of a daemon that lies is an error of the client's own, or slots that can be asked for."""
    with suppress(KVStoredClientError, DecodeError):
        slots = KnownSlots().of(pb.Lease.FromString(data))
        assert sum(run.length for run in slots.runs) == len(slots) == len(slots.sizes_bytes)
        for index in range(min(len(slots), 32)):
            segment, offset, size = slots.place(index)
            assert min(segment, offset, size) >= 0
        assert len(slots.content_hashes) == len(slots)


def session_page(data):
    """Neither side trusts the page: the poster finds no room or a layout unknown, the taker at most all words."""
    memory = bytearray(data[: page.PAGE_BYTES].ljust(page.PAGE_BYTES, b"\0"))
    with suppress(ValueError):
        page.Poster(memoryview(memory)).post([1, 2, 3])
    memory = bytearray(page.PAGE_BYTES)
    taker = page.Taker(memoryview(memory), length=8)
    memory[8 : 8 + min(len(data), page.PAGE_BYTES - 8)] = data[: page.PAGE_BYTES - 8]
    for _ in range(4):
        taken = taker.take()
        assert taken is None or len(taken) <= 8
    taker.close()


# ---- what was kept in memory ----


def adopted(kind, data, *more):
    """A table over these bytes, as the next process finds it; None where it is refused."""
    size = min(max(PAGE_BYTES, -(-len(data) // PAGE_BYTES) * PAGE_BYTES), TABLE_BYTES_MAX)
    mapping = Mapping(size, name="fuzz")
    os.pwrite(mapping.fd, data[:size], 0)
    fd = os.dup(mapping.fd)
    mapping.close()
    try:
        return kind.adopt(fd, *more)
    except DeviceError:
        return None


def registry(data):
    for tried in (data, _registry_checked(data)):
        log = adopted(Registry, tried)
        if log is not None:
            log.note_boot(log.boot % (1 << 62) + 1)
            log.note_segment(1, "4k")
            log.close()


def _registry_checked(data):
    """The same with right CRCs, as far as the entries go."""
    fixed, at = bytearray(data[:TABLE_BYTES_MAX].ljust(PAGE_BYTES, b"\0")), 16
    while at + 8 <= len(fixed):
        (length,) = struct.unpack_from("=I", fixed, at)
        body = bytes(fixed[at + 8 : at + 8 + length])
        if not length or len(body) != length:
            break
        struct.pack_into("=I", fixed, at + 4, zlib.crc32(body))
        at += 8 + -(-length // 8) * 8
    return bytes(fixed)


def lease_ledger(data):
    ledger = adopted(LeaseLedger, data)
    if ledger is not None:
        for lease in ledger.noted()[1]:
            lease.slots()
        ledger.note_lease(1, bytes(16), bytes(16), [(1, 2)])
        ledger.close()


def slot_records(data):
    choices = Choices(data)
    fix = choices.byte() % 2
    table = bytearray(choices.rest()[:TABLE_BYTES_MAX].ljust(8 * 256, b"\0"))
    if fix:
        for at in range(256, len(table) - 255, 256):
            (word,) = struct.unpack_from("=Q", table, at)
            struct.pack_into("=I", table, at + 8, zlib.crc32(table[at + 12 : at + 192], word >> 2 & 0xFFFFFFFF))
    records = adopted(SlotRecords, bytes(table), SEGMENT_BYTES, 7)
    if records is None:
        return
    with suppress(DeviceError):
        assert len(records.tenant) <= 198
    found, _ = records.scan()
    for each in found:
        assert each.hash
        assert 0 < each.size_bytes <= records.slot_bytes
        assert records.state(each.slot) == READY
    for slot in range(records.slots):
        with suppress(DeviceError):
            records.read(slot)
    records.close()


# ---- what was on disk ----


def index_values(data):
    """Values of the index: damaged ones are CorruptData, whatever their CRC says."""
    kind = list(formats.Kind)[data[0] % 4] if data else formats.Kind.RECORD
    body = data[1:]
    for value in (body, formats.with_crc(kind, KEY, body)):
        with suppress(KVStoredError):
            if kind is formats.Kind.RECORD:
                formats.unpack_record(KEY, value, 0)
            elif kind is formats.Kind.ROW:
                formats.unpack_row(KEY, value)
            elif kind is formats.Kind.JOURNAL:
                list(formats.unpack_headers(formats.unpack_journal(KEY, value)))
            else:
                formats.unpack_namespace(KEY, value)


def footers(data):
    """Trailers and headers of extents."""
    with suppress(KVStoredError):
        list(formats.unpack_headers(data))
    room = formats.TRAILER_BYTES - 4
    body = data[:room].ljust(room, b"\0")
    trailer.unpack_trailer(data)
    trailer.unpack_trailer(body + struct.pack("<I", zlib.crc32(body)))


def side_files(data):
    """Tombstones, evictions, markers, and the pages of a damaged index."""
    entries, damaged = tombstones.unpack_tombstones(data)
    assert len(entries) + damaged <= -(-len(data) // tombstones.ENTRY_BYTES)
    body = data[:124].ljust(124, b"\0")
    tombstones.unpack_tombstones(body + struct.pack("<I", zlib.crc32(body)))
    assert sum(len(entry.hashes) for entry in evictions.unpack_entries(data)) <= len(data)
    markers._decode(data)
    for _, value in pages._nodes(data[:PAGE_BYTES].ljust(PAGE_BYTES, b"\0")):
        assert len(value) <= PAGE_BYTES


# ---- seeds ----


def _stored():
    return Store(digest=KEY[:16], hash=KEY[16:], parent=b"p" * 32, size_bytes=4096, content_hash=b"c" * 16, address=0)


def _row(state=formats.State.SEALED):
    return formats.ExtentRow(3, 2, "acme", state, 9, 8192, 200, 4096, 1)


def _kept(table, *notes):
    for note, *arguments in notes:
        getattr(table, note)(*arguments)
    data = bytes(table._table[: 2 * PAGE_BYTES]).rstrip(b"\0")
    table.close()
    return data


def _frames():
    lookup = pb.LookupRequest(namespace_ids=[1], hashes=KEY, hash_bytes=16).SerializeToString()
    dropped = frames.encode(19, 0, pb.SegmentIds(ids=[7]).SerializeToString(), frames.ONE_WAY)
    return frames.encode(5, 1, lookup) + frames.encode(2, 2, b"") + dropped


def _slots():
    records = SlotRecords(SEGMENT_BYTES, 7)
    records.cut("acme", 4, PAGE_BYTES)
    records.begin(0, 100, KEY[:16], KEY[16:], b"p" * 32)
    records.commit(0, b"c" * 16)
    records.begin(1, 100, KEY[:16], KEY[16:], b"")
    return [b"\0" + _kept(records), b"\1" + bytes(0)]


def seeds():
    """Whole examples of what each target reads."""
    placed = formats.Placed(3, 2, 4096, _stored())
    spec = pb.NamespaceSpec(model="m", rope_theta=1e4, layers=4, tp_rank=1, extra="x")
    space = Namespace("acme", KEY[:16], b"encoding", {"model": "m"})
    slots = struct.pack("<4Q", *(7 << 20 | i for i in (0, 1, 2, 9)))
    heads = b"".join(frames.HEAD.pack(2, 0, size, b"c" * 16) for size in (100, 100, 5000, 100))
    words = struct.pack("<QQ4Q", 4, 0, *(i << 1 | 1 for i in range(4)))
    session = NotedSession(b"s" * 16, b"c", b"k" * 16, b"", "acme", 1, 2, 3)
    value = formats.pack_record(placed, 1.0)[:-4]
    header = formats.pack_header(placed, 1.0)
    tombstone = tombstones.pack_tombstone(tombstones.Tombstone(KEY, 3, 2, 4096))
    marker = markers.VolumeFormat(format=2, volume="ab" * 16)
    return {
        "frame_reader": [bytes([1, 3, 15, 16]) + _frames(), bytes(4) + struct.pack("<IHBBQ", 1 << 31, 1, 0, 0, 1)],
        "namespace_spec": [spec.SerializeToString()],
        "lease_slots": [pb.Lease(lease_id=1, slots=slots, heads=heads).SerializeToString()],
        "session_page": [struct.pack("<II", page.VERSION, 8) + words, words],
        "registry": [
            _kept(Registry(), ("note_boot", 3), ("note_segment", 7, "thp"), ("note_gone", 6), ("note_namespace", space))
        ],
        "lease_ledger": [
            _kept(
                LeaseLedger(1 << 20),
                ("note_session", session),
                ("note_lease", 5, b"k" * 16, KEY[:16], [(7 << 20, 3), (8 << 20, 1)]),
            )
        ],
        "slot_records": _slots()[:1],
        "index_values": [
            bytes([0]) + value,
            bytes([1]) + formats.pack_row(_row())[:-4],
            bytes([2]) + header,
            bytes([3]) + formats.pack_namespace(space)[:-4],
        ],
        "footers": [header * 2, trailer.pack_footer(_row(), b"v" * 16, header, 1)[-formats.TRAILER_BYTES :]],
        "side_files": [
            tombstone * 2,
            evictions.pack_entry([KEY, KEY[1:]], 1.0),
            b'{"format":2,"volume":"' + marker.volume.encode() + b'","crc":1}',
        ],
    }


TARGETS = {
    each.__name__: each
    for each in (
        *(frame_reader, namespace_spec, lease_slots, session_page),
        *(registry, lease_ledger, slot_records, index_values, footers, side_files),
    )
}
