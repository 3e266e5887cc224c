"""A volume of format 1 as the code of that time wrote it, frozen: what a later kvstored must take over."""

import json
import struct
import zlib

import lmdb
import msgspec
import xxhash

PAGE = 4096
EXTENT_BYTES = 128 << 10
VOLUME = bytes(range(16))
RECORD = struct.Struct("<BBHIIQIIdd16s")
ROW = struct.Struct("<BBHIQQQQI")
HEADER = struct.Struct("<QId16s16sBB")
TRAILER = struct.Struct("<8sHH16sIIQQII")
FREE, OPEN, SEALED = 0, 1, 2


def slot(size):
    return -(-size // PAGE) * PAGE


class Extent:
    """One extent with its blocks: (digest, hash, parent, bytes)."""

    def __init__(self, number, tenant, blocks, *, sealed, generation=1, sequence=0):
        self.number, self.tenant, self.sealed = number, tenant, sealed
        self.generation, self.sequence = generation, sequence
        self.data, self.headers, self.records = bytearray(EXTENT_BYTES), [], {}
        at = 0
        for digest, hash_, parent, content in blocks:
            hashed = xxhash.xxh3_128_digest(content)
            self.data[at : at + len(content)] = content
            sizes = (len(hash_), len(parent))
            self.headers.append(HEADER.pack(at, len(content), 5.0, hashed, digest, *sizes) + hash_ + parent)
            place = (number, generation, at, len(content))
            self.records[digest + hash_] = RECORD.pack(1, len(parent), 0, *place, 0, 5.0, 0.0, hashed) + parent
            at += slot(len(content))
        self.append_bytes = at
        if sealed:
            self.write_footer()

    def write_footer(self):
        headers, tenant = b"".join(self.headers), self.tenant.encode()
        identity = (b"KVSTEXTF", 1, len(tenant), VOLUME, self.number, self.generation, self.sequence)
        trailer = TRAILER.pack(*identity, len(headers), len(self.headers), zlib.crc32(headers)) + tenant
        trailer = trailer.ljust(PAGE - 4, b"\0")
        trailer += struct.pack("<I", zlib.crc32(trailer))
        footer = headers.ljust(slot(len(headers)), b"\0") + trailer
        self.data[-len(footer) :] = footer

    def row(self):
        state = SEALED if self.sealed else OPEN
        live = sum(slot(struct.unpack_from("<I", record, 20)[0]) for record in self.records.values())
        counts = (self.append_bytes, sum(map(len, self.headers)), live, len(self.records))
        tenant = self.tenant.encode()
        return ROW.pack(1, state, len(tenant), self.generation, self.sequence, *counts) + tenant


def write_volume(path, extents, namespaces=()):
    """The directory; `namespaces` are (tenant, digest, encoding, fields)."""
    for name in ("index", "extents"):
        (path / name).mkdir(parents=True)
    marker = {"format": 1, "volume": VOLUME.hex(), "extent_bytes": EXTENT_BYTES}
    (path / "FORMAT").write_text(json.dumps(marker))
    env = lmdb.open(str(path / "index"), map_size=1 << 20, max_dbs=4)
    databases = [env.open_db(name) for name in (b"records", b"extents", b"journal", b"namespaces")]
    with env.begin(write=True) as txn:
        for extent in extents:
            (path / "extents" / f"{extent.number:08d}.ext").write_bytes(extent.data)
            for key, value in extent.records.items():
                txn.put(key, value, db=databases[0])
            txn.put(struct.pack(">I", extent.number), extent.row(), db=databases[1])
            if not extent.sealed:
                key = struct.pack(">IIQ", extent.number, extent.generation, 0)
                txn.put(key, b"".join(extent.headers), db=databases[2])
        for tenant, digest, encoding, fields in namespaces:
            value = {"tenant": tenant, "digest": digest, "encoding": encoding, "fields": fields}
            txn.put(digest, msgspec.msgpack.encode(value), db=databases[3])
    env.close()
