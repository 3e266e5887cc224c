"""The index made anew from everything else: footers of sealed extents, and what of the old index is whole.

A footer names its extent's blocks. Extents without one were open: their blocks are known to the
index alone, whose file is read page by page without trusting it (`pages`), so that an index that
is damaged costs the entries that are, and one that is lost the open extents. Where blocks are in
several extents the one sealed last has them; what was deleted since (`tombstones`) stays away.
What is found may be from before the last change, which is harmless: the bytes of a block are
checked against its content hash whenever they are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from kvstored.device.file import FileDevice
from kvstored.errors import CorruptData, DeviceError
from kvstored.keys import HASH_BYTES_MIN, Namespace, slot_bytes
from kvstored.tiers import pages
from kvstored.tiers.check import take
from kvstored.tiers.directory import DATA_FILE
from kvstored.tiers.epoch_files import read_epochs
from kvstored.tiers.footers import Footer, extent_files, read_footers
from kvstored.tiers.formats import (
    DIGEST_BYTES,
    ExtentRow,
    Header,
    Kind,
    State,
    footer_bytes,
    header_of,
    is_intact,
    join_header,
    pack_entry,
    pack_extent_key,
    pack_journal_key,
    pack_namespace,
    pack_row,
    unpack_headers,
    unpack_namespace,
    unpack_record,
    unpack_row,
    with_crc,
)
from kvstored.tiers.index_copy import IndexCopy
from kvstored.tiers.namespaces import NamespaceFiles
from kvstored.tiers.sources import Report, Source
from kvstored.tiers.tombstones import Tombstone, read_tombstones
from kvstored.tiers.trailer import Trailer, end_of
from kvstored.tiers.transaction import lmdb_errors

HEADERS_PER_ENTRY: Final = 1024  # of the journal
_ROW_KEY_BYTES: Final = len(pack_extent_key(0))
_RECORD_KEY_BYTES_MIN: Final = DIGEST_BYTES + HASH_BYTES_MIN


class Salvage(NamedTuple):
    """What of the old index is whole."""

    rows: dict[int, ExtentRow]
    records: dict[tuple[int, int], dict[int, Header]]
    namespaces: list[Namespace]


def rebuild(source: Source) -> Report:
    """Make the index anew and put it in the place of what is there; raises DeviceError."""
    device = FileDevice()
    device.make_directory(source.index)
    footers = dict(read_footers(device, source))
    known = {(extent, trailer.generation) for extent, (trailer, _) in footers.items()}
    salvage = _salvage(source.index / DATA_FILE, known)
    tombstones, _, _ = read_tombstones(device, source.tombstones)
    namespaces = {n.digest: n for n in (*salvage.namespaces, *NamespaceFiles(device, source.namespaces).read())}
    merged = Merge(source, tombstones, _stale(device, source, namespaces.values()))
    _merge(merged, footers, salvage, extent_files(device, source))
    with lmdb_errors(source.index):
        copy = _write(source, merged, namespaces)
        return merged.report(take(source, copy))


def _stale(device: FileDevice, source: Source, namespaces: Iterable[Namespace]) -> set[bytes]:
    """Digests of past epochs, as far as they are known: nobody finds what lies under them."""
    try:
        epochs, _ = read_epochs(device, Path(source.directory))
    except DeviceError:
        return set()
    return {digest for namespace in namespaces for digest in epochs.stale_digests(namespace)}


def _write(source: Source, merged: Merge, namespaces: dict[bytes, Namespace]) -> IndexCopy:
    copy = IndexCopy(source.index)
    try:
        copy.append(b"records", ((key, merged.entries[key][1]) for key in sorted(merged.entries)))
        rows = (merged.rows[extent] for extent in sorted(merged.rows))
        copy.append(b"extents", ((pack_extent_key(row.extent), pack_row(row)) for row in rows))
        copy.append(b"journal", sorted(merged.journal))
        copy.append(b"namespaces", ((digest, pack_namespace(namespaces[digest])) for digest in sorted(namespaces)))
    except BaseException:
        copy.discard()
        raise
    return copy


class Merge:
    """Extents one after the other, in the order of their sealing: later ones replace what earlier ones have."""

    def __init__(self, source: Source, tombstones: Iterable[Tombstone], stale: Collection[bytes] = ()) -> None:
        self.rows: dict[int, ExtentRow] = {}
        self.entries: dict[bytes, tuple[ExtentRow, bytes, int]] = {}
        self.journal: list[tuple[bytes, bytes]] = []
        self._source = source
        self.tombstones = set(tombstones)
        self._deleted = {t.key for t in self.tombstones if not t.moved}
        self._stale = stale
        self._counts = Report()

    def sealed(self, trailer: Trailer, headers: bytes) -> None:
        """An extent with a footer."""
        row = ExtentRow(trailer.extent, trailer.generation, trailer.tenant, State.SEALED, trailer.sequence)
        row.header_bytes, row.flags = trailer.header_bytes, trailer.flags
        for number, (header, _) in enumerate(unpack_headers(headers)):
            self._add(row, header._replace(expiry=end_of(trailer, number)) if trailer.ends else header)
            row.append_bytes = max(row.append_bytes, header.offset + slot_bytes(header.size_bytes))
        self.rows[row.extent] = row
        self._counts.sealed_extents += 1

    def unsealed(self, extent: int, generation: int, tenant: str, headers: Iterable[Header]) -> None:
        """An extent without a footer: it is full from now on, so that nothing is written over what it may hold."""
        row = ExtentRow(extent, generation, tenant, State.OPEN)
        whole = [join_header(header) for header in headers if self._add(row, header)]
        for first in range(0, len(whole), HEADERS_PER_ENTRY):
            key = pack_journal_key(extent, generation, first)
            body = b"".join(whole[first : first + HEADERS_PER_ENTRY])
            self.journal.append((key, with_crc(Kind.JOURNAL, key, body)))
        row.header_bytes = sum(map(len, whole))
        row.append_bytes = self._source.extent_bytes - footer_bytes(row.header_bytes)
        self.rows[extent] = row
        self._counts.salvaged_extents += 1
        self._counts.salvaged_records += len(whole)

    def free(self, extent: int, generation: int) -> None:
        """An extent that holds nothing."""
        self.rows[extent] = ExtentRow(extent, generation)

    def report(self, checked: Report) -> Report:
        """What came of it, with what the check of the new index counted."""
        for name in ("extents", "records", "live_bytes", "namespaces"):
            setattr(self._counts, name, getattr(checked, name))
        return self._counts

    def _add(self, row: ExtentRow, header: Header) -> bool:
        key = header.digest + header.hash
        here = Tombstone(key, row.extent, row.generation, header.offset)
        deleted = here in self.tombstones or (key in self._deleted and here._replace(moved=True) in self.tombstones)
        if header.digest in self._stale or deleted:
            self._counts.deleted_records += 1
            return False
        size = slot_bytes(header.size_bytes)
        before = self.entries.get(key)
        if before is not None:
            older, _, older_size = before
            older.live_bytes -= older_size
            older.live_blocks -= 1
            self._counts.duplicate_records += 1
        self.entries[key] = (row, pack_entry(row.extent, row.generation, header), size)
        row.live_bytes += size
        row.live_blocks += 1
        return True


def _merge(merged: Merge, footers: dict[int, Footer], salvage: Salvage, extents: list[int]) -> None:
    rows = salvage.rows
    # A row of a later generation than the footer's: the extent was recycled, the footer is not erased yet.
    sealed = {e: f for e, f in footers.items() if e not in rows or rows[e].generation <= f[0].generation}
    for extent in sorted(sealed, key=lambda e: sealed[e][0].sequence):
        merged.sealed(*sealed[extent])
    generations = [*(row.generation for row in rows.values()), *(t.generation for t, _ in footers.values())]
    fresh = 1 + max((*generations, *(t.generation for t in merged.tombstones)), default=0)
    for extent in extents:
        row = rows.get(extent)
        headers = salvage.records.get((extent, row.generation)) if row is not None else None
        if extent in sealed:
            continue
        if row is not None and row.tenant and headers:
            merged.unsealed(extent, row.generation, row.tenant, [headers[offset] for offset in sorted(headers)])
        else:
            merged.free(extent, fresh)


def _salvage(path: Path, known: set[tuple[int, int]]) -> Salvage:
    """Whole rows, records outside of the extents that are known by their footers, and namespaces."""
    found = Salvage({}, defaultdict(dict), [])
    if not path.exists():
        return found
    for key, value in pages.entries(path):
        if len(key) == _ROW_KEY_BYTES:
            _salvage_row(found, key, value)
        elif len(key) >= _RECORD_KEY_BYTES_MIN:
            _salvage_record(found, known, key, value)
        elif len(key) == DIGEST_BYTES and is_intact(Kind.NAMESPACE, key, value):
            found.namespaces.append(unpack_namespace(key, value))
    return found


def _salvage_row(found: Salvage, key: bytes, value: bytes) -> None:
    if is_intact(Kind.ROW, key, value):
        row = unpack_row(key, value)
        before = found.rows.get(row.extent)
        if before is None or _age(row) > _age(before):
            found.rows[row.extent] = row


def _age(row: ExtentRow) -> tuple[int, int, int]:
    return row.generation, row.state, row.append_bytes


def _salvage_record(found: Salvage, known: set[tuple[int, int]], key: bytes, value: bytes) -> None:
    try:
        record = unpack_record(key, value, 0)
    except CorruptData:
        return
    place = record.location
    if (place.extent, place.generation) not in known:
        found.records[place.extent, place.generation][place.offset] = header_of(key, record)
