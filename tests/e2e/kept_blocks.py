"""Blocks of a small daemon whose memory and drive outlive its kills: what tests of their ends share."""

from kvstored_client import Client

BLOCK = 64 << 10
SETTINGS = {
    "dram.capacity_bytes": str(8 << 20),
    "dram.segment_bytes": str(1 << 20),
    "dram.huge_pages": "never",
    "nvme.capacity_bytes": str(128 << 20),
    "nvme.extent_bytes": str(32 << 20),
    "limits.staging_bytes_per_session": str(2 << 20),
}


def client_of(daemon):
    return Client(daemon.address)


def names(prefix, count):
    return [f"{prefix}-{number:04}".encode().ljust(16, b".") for number in range(count)]


def contents(hashes):
    """The bytes of each: its name, again and again."""
    return [(name * (BLOCK // 16))[:BLOCK] for name in hashes]


def found(client, spec, hashes, wait_s=60.0):
    """How many of the leading ones are there, each checked byte by byte."""
    with client.get(client.namespace(spec), hashes, wait_s=wait_s) as blocks:
        assert [bytes(block) for block in blocks] == contents(hashes)[: len(blocks)]
        return len(blocks)
