"""From a caller's arguments to a verb: everything that is a programmer's error is found here, daemon or no daemon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from kvstored_client import buffers as memory
from kvstored_client import prefetching, staged, verbs, writing
from kvstored_client.blocks import Blocks
from kvstored_client.core import Core
from kvstored_client.effects import Verb
from kvstored_client.keys import HASH_BYTES_MAX, Packed, pack
from kvstored_client.namespace import Durability, Namespace, as_list, check_durability
from kvstored_client.results import LookupResult, Outcome, PutResult

T = TypeVar("T")
Namespaces = Namespace | Sequence[Namespace]


def _nothing(result: T) -> Verb[T]:
    """No hashes, no question."""
    return result
    yield  # makes this a generator


def lookup(core: Core, namespaces: Namespaces, hashes: Sequence[bytes]) -> Verb[LookupResult]:
    """See `Client.lookup`."""
    several, packed = as_list(namespaces), pack(hashes)
    return verbs.lookup(core, several, packed) if packed.length else _nothing(LookupResult(outcome=Outcome.HIT))


def contains(core: Core, namespace: Namespace, hashes: Sequence[bytes]) -> Verb[list[Outcome]]:
    """See `Client.contains`."""
    return verbs.contains(core, _one(namespace), pack(hashes))


def touch(core: Core, namespace: Namespace, hashes: Sequence[bytes]) -> Verb[int]:
    """See `Client.touch`."""
    return verbs.touch(core, _one(namespace), pack(hashes))


def delete(core: Core, namespace: Namespace, hashes: Sequence[bytes]) -> Verb[int]:
    """See `Client.delete`."""
    return verbs.delete(core, _one(namespace), pack(hashes))


def get(core: Core, namespaces: Namespaces, hashes: Sequence[bytes], wait_s: float) -> Verb[Blocks]:
    """See `Client.get`."""
    several, packed = as_list(namespaces), pack(hashes)
    return verbs.get(core, several, packed, wait_s) if packed.length else _nothing(Blocks(None, [], Outcome.HIT))


def get_into(
    core: Core, namespaces: Namespaces, hashes: Sequence[bytes], buffers: Any, wait_s: float, block_bytes: int
) -> Verb[int]:
    """See `Client.get_into`."""
    several, packed = as_list(namespaces), pack(hashes)
    if not packed.length:
        return _nothing(0)
    each = [buffers] if isinstance(namespaces, Namespace) else list(buffers)
    if len(each) != len(several):
        raise ValueError(f"buffers for {len(each)} namespaces, and {len(several)} namespaces")
    targets = [memory.spans_of(b, packed.length, block_bytes, writable=True) for b in each]
    return verbs.get_into(core, several, packed, targets, wait_s)


def put(
    core: Core,
    namespace: Namespace,
    hashes: Sequence[bytes],
    buffers: Any,
    parent: bytes,
    wait_s: float,
    block_bytes: int,
    durability: Durability | None,
) -> Verb[PutResult]:
    """See `Client.put`."""
    if durability is not None:
        check_durability(durability)
    packed = _chain_of(hashes, parent)
    if not packed.length:
        return _nothing(PutResult())
    source = memory.spans_of(buffers, packed.length, block_bytes, writable=False)
    return writing.put(core, _one(namespace), packed, source, parent, wait_s, durability)


def stage(
    core: Core,
    namespace: Namespace,
    hashes: Sequence[bytes],
    block_bytes: int,
    parent: bytes,
    wait_s: float,
    durability: Durability | None,
) -> Verb[staged.Reserved]:
    """See `Client.stage`."""
    if durability is not None:
        check_durability(durability)
    packed = _chain_of(hashes, parent)
    if block_bytes <= 0:
        raise ValueError(f"block_bytes is {block_bytes}: a block has at least one byte")
    if not packed.length:
        return _nothing((None, []))
    return staged.reserve_staged(core, _one(namespace), packed, block_bytes, parent, wait_s, durability)


def prefetch(
    core: Core, namespaces: Namespaces, hashes: Sequence[bytes], priority: int, deadline_s: float
) -> Verb[prefetching.Started]:
    """See `Client.prefetch`."""
    several, packed = as_list(namespaces), pack(hashes)
    if not packed.length:
        return _nothing(prefetching.Started(outcome=Outcome.HIT))
    return prefetching.start(core, several, packed, priority, deadline_s)


def _one(namespace: Namespace) -> Namespace:
    if not isinstance(namespace, Namespace):
        raise TypeError(f"a {type(namespace).__name__} is not a namespace: make one with client.namespace(spec)")
    return namespace


def _chain_of(hashes: Sequence[bytes], parent: bytes) -> Packed:
    if len(parent) > HASH_BYTES_MAX:
        raise ValueError(f"parent has {len(parent)} bytes: hashes have at most {HASH_BYTES_MAX}")
    return pack(hashes)
