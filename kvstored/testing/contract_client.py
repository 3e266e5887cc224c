"""What the contract of the data operations is written against: one small interface per client.

A transport's own test module implements `Transport` (or takes one of `contract_transports`) and
runs the suites of `contract` with it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, cast

from google.protobuf.message import Message
from kvstored_proto import frames
from kvstored_proto.v1 import kvstored_pb2 as pb

from kvstored.keys import slot_bytes
from kvstored.store.outcomes import HIT

BLOCK_BYTES: Final = 64 << 10
HASH_BYTES: Final = 32
# The tenants that a transport under test knows, and what each may do.
ACME: Final = "acme"
RIVAL: Final = "rival"
VIEWER: Final = "viewer"  # a reader
ROOT: Final = "root"  # an admin


class CallFailed(Exception):
    """The daemon refused a call: a google.rpc.Code and the daemon's sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Block(NamedTuple):
    """A key and its bytes."""

    hash: bytes
    data: bytes


class Client(Protocol):
    """One session. Every reply's `boot_id` is checked against the one of OpenSession."""

    opened: pb.OpenSessionReply
    shares_memory: bool
    """Whether it maps tiers and staging; else bytes travel inline."""

    async def call(self, method: str, request: Message) -> Any:
        """One operation by its method name in the schema. Raises CallFailed."""
        ...

    async def put(
        self, namespace_id: int, blocks: Sequence[Block], parent: bytes = b"", hints: pb.PutHints | None = None
    ) -> bytes:
        """Store a chain; one outcome a block. Raises CallFailed."""
        ...

    async def read(self, namespace_id: int, hashes: Sequence[bytes]) -> list[bytes]:
        """The bytes of the leading blocks that are stored, checked against their content hash. Raises CallFailed."""
        ...

    def stage(self, offset: int, data: bytes) -> None:
        """Write into the session's staging; only where memory is shared."""
        ...

    def slot_data(self, slot: int, size_bytes: int) -> bytes:
        """What lies in a slot; only where memory is shared."""
        ...

    async def end(self) -> None:
        """End as a process ends; returns when the daemon has given back all that it held. Harmless when repeated."""
        ...


class Transport(Protocol):
    """A way to a daemon that is served fresh for each test."""

    async def connect(self, tenant: str = ACME, **opening: Any) -> Client:
        """A new session; `opening` are fields of OpenSessionRequest. Raises CallFailed."""
        ...


# ---- blocks and requests ----


def block(name: str, size_bytes: int = BLOCK_BYTES) -> Block:
    """A block that is a function of its name and size."""
    return Block(hashlib.sha256(name.encode()).digest(), random.Random(f"{name} {size_bytes}").randbytes(size_bytes))


def chain(name: str, count: int, size_bytes: int = BLOCK_BYTES) -> list[Block]:
    """Consecutive blocks."""
    return [block(f"{name} {i}", size_bytes) for i in range(count)]


def hashes_of(blocks: Sequence[Block]) -> list[bytes]:
    """Their keys."""
    return [b.hash for b in blocks]


def packed(blocks: Sequence[Block]) -> dict[str, Any]:
    """The fields that name blocks in a request."""
    return {"hashes": b"".join(hashes_of(blocks)), "hash_bytes": HASH_BYTES}


def spec(**fields: Any) -> pb.NamespaceSpec:
    """A namespace that differs from others in these fields."""
    return pb.NamespaceSpec(**{"model": "m", "dtype": "bfloat16", "layers": 4, "block_tokens": 16, **fields})


async def open_namespace(client: Client, durability: int = 0, **fields: Any) -> int:
    """A namespace's handle."""
    request = pb.OpenNamespaceRequest(spec=spec(**fields), durability=cast(pb.Durability, durability))
    reply = await client.call("OpenNamespace", request)
    handle: int = reply.namespace_id
    return handle


async def fill(client: Client, namespace_id: int, count: int) -> None:
    """Put so many blocks that nobody asks for again."""
    for start in range(0, count, 16):
        blocks = [block(f"filler {i}") for i in range(start, min(count, start + 16))]
        assert await client.put(namespace_id, blocks) == bytes([HIT] * len(blocks))


async def lookup(client: Client, namespace_ids: Sequence[int], blocks: Sequence[Block]) -> pb.LookupReply:
    """How much of a chain is there."""
    reply: pb.LookupReply = await client.call("Lookup", pb.LookupRequest(namespace_ids=namespace_ids, **packed(blocks)))
    return reply


async def contains(client: Client, namespace_id: int, blocks: Sequence[Block]) -> bytes:
    """One outcome a block."""
    reply = await client.call("Contains", pb.ContainsRequest(namespace_id=namespace_id, **packed(blocks)))
    outcomes: bytes = reply.outcomes
    return outcomes


async def get(client: Client, namespace_ids: Sequence[int], blocks: Sequence[Block], wait_ms: int = 0) -> pb.GetReply:
    """Lease blocks."""
    request = pb.GetRequest(namespace_ids=namespace_ids, wait_ms=wait_ms, **packed(blocks))
    reply: pb.GetReply = await client.call("Get", request)
    return reply


async def reserve(
    client: Client,
    namespace_id: int,
    blocks: Sequence[Block],
    parent: bytes = b"",
    wait_ms: int = 0,
    durability: int = 0,
    hints: pb.PutHints | None = None,
) -> pb.ReserveReply:
    """Reserve room for a chain."""
    request = pb.ReserveRequest(
        namespace_id=namespace_id,
        parent=parent,
        sizes_bytes=[len(b.data) for b in blocks],
        wait_ms=wait_ms,
        durability=cast(pb.Durability, durability),
        hints=hints,
        **packed(blocks),
    )
    reply: pb.ReserveReply = await client.call("Reserve", request)
    return reply


async def commit(client: Client, reservation_id: int, blocks: Sequence[Block], indices: Sequence[int]) -> bytes:
    """Stage and commit some of the reserved blocks; one outcome each."""
    offsets, offset = [], 0
    for index in indices:
        client.stage(offset, blocks[index].data)
        offsets.append(offset)
        offset += slot_bytes(len(blocks[index].data))
    request = pb.CommitRequest(reservation_id=reservation_id, indices=indices, staging_offsets=offsets)
    reply = await client.call("Commit", request)
    outcomes: bytes = reply.outcomes
    return outcomes


async def release(client: Client, reply: pb.GetReply) -> int:
    """Release what a get leased; how many leases that were."""
    done = await client.call("Release", pb.ReleaseRequest(lease_ids=[lease.lease_id for lease in reply.leases]))
    released: int = done.released
    return released


async def held(root: Client) -> dict[str, int]:
    """What all sessions hold at present, from the status that an admin sees."""
    status: pb.StatusReply = await root.call("Status", pb.StatusRequest())
    return {name.removeprefix("held_"): n for name, n in status.counters.items() if name.startswith("held_")}


class Head(NamedTuple):
    """A block in a lease, unpacked: where it lies and what it is."""

    slot: int
    generation_word: int
    size_bytes: int
    content_hash: bytes


def unpack(lease: pb.Lease) -> list[Head]:
    """The blocks of a lease."""
    slots = [int.from_bytes(lease.slots[i : i + 8], "little") for i in range(0, len(lease.slots), 8)]
    heads = list(frames.HEAD.iter_unpack(lease.heads))
    return [Head(slot, word, size, hash_) for slot, (word, _, size, hash_) in zip(slots, heads, strict=True)]
