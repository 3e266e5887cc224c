"""From a caller's arguments to a verb: everything that is a programmer's error is found here, daemon or no daemon."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeVar

from kvstored_client import buffers as memory
from kvstored_client import hinting, prefetching, putting, staged, verbs
from kvstored_client.blocks import Blocks
from kvstored_client.core import Core
from kvstored_client.effects import Verb
from kvstored_client.hinting import Hints
from kvstored_client.keys import HASH_BYTES_MAX, Packed, pack
from kvstored_client.namespace import Namespace, as_list
from kvstored_client.results import HintResult, LookupResult, Outcome, PrefetchStatus, PutResult
from kvstored_client.terms import Terms, check_hint, check_seconds, check_wait

T = TypeVar("T")
Namespaces = Namespace | Sequence[Namespace]


def _nothing(result: T) -> Verb[T]:
    """No hashes, no question."""
    return result
    yield  # makes this a generator


def lookup(
    core: Core,
    namespaces: Namespaces,
    hashes: Sequence[bytes],
    prefill_tokens_per_s: float | None,
    prefetch: bool | None,
    prefetch_deadline_s: float,
) -> Verb[LookupResult]:
    """See `Client.lookup`."""
    several, packed = as_list(namespaces), pack(hashes)
    first = several[0]
    asking = first.asking.but(prefill_tokens_per_s, prefetch, prefetch_deadline_s).check(first.spec.block_tokens)
    if not packed.length:
        return _nothing(LookupResult(outcome=Outcome.HIT))
    return verbs.lookup(core, several, packed, asking)


def contains(core: Core, namespace: Namespace, hashes: Sequence[bytes]) -> Verb[list[Outcome]]:
    """See `Client.contains`."""
    return verbs.contains(core, one(namespace), pack(hashes))


def touch(core: Core, namespace: Namespace, hashes: Sequence[bytes]) -> Verb[int]:
    """See `Client.touch`."""
    return verbs.touch(core, one(namespace), pack(hashes))


def delete(core: Core, namespace: Namespace, hashes: Sequence[bytes]) -> Verb[int]:
    """See `Client.delete`."""
    return verbs.delete(core, one(namespace), pack(hashes))


def get(core: Core, namespaces: Namespaces, hashes: Sequence[bytes], wait_s: float) -> Verb[Blocks]:
    """See `Client.get`."""
    check_wait(wait_s)
    several, packed = as_list(namespaces), pack(hashes)
    return verbs.get(core, several, packed, wait_s) if packed.length else _nothing(Blocks(None, [], Outcome.HIT))


def attach(core: Core, lease_id: int) -> Verb[Blocks]:
    """See `Client.attach`."""
    return verbs.attach(core, _number("lease_id", lease_id))


def get_into(
    core: Core, namespaces: Namespaces, hashes: Sequence[bytes], buffers: Any, wait_s: float, block_bytes: int
) -> Verb[int]:
    """See `Client.get_into`."""
    check_wait(wait_s)
    several, packed = as_list(namespaces), pack(hashes)
    if not packed.length:
        return _nothing(0)
    each = [buffers] if isinstance(namespaces, Namespace) else list(buffers)
    if len(each) != len(several):
        raise ValueError(f"buffers for {len(each)} namespaces, and {len(several)} namespaces")
    targets = [memory.place_of(b, packed.length, block_bytes, writable=True) for b in each]
    return verbs.get_into(core, several, packed, targets, wait_s)


def put(
    core: Core,
    namespace: Namespace,
    hashes: Sequence[bytes],
    buffers: Any,
    parent: bytes,
    wait_s: float,
    block_bytes: int,
    terms: Terms,
) -> Verb[PutResult]:
    """See `Client.put`."""
    check_wait(wait_s)
    packed = chain_of(hashes, parent)
    if not packed.length:
        return _nothing(PutResult())
    source = memory.place_of(buffers, packed.length, block_bytes, writable=False)
    return putting.run(putting.Put(core, one(namespace), packed, source, parent, wait_s, terms.check()))


def stage(
    core: Core,
    namespace: Namespace,
    hashes: Sequence[bytes],
    block_bytes: int,
    parent: bytes,
    wait_s: float,
    terms: Terms,
) -> Verb[staged.Reserved]:
    """See `Client.stage`."""
    check_wait(wait_s)
    packed = chain_of(hashes, parent)
    if block_bytes <= 0:
        raise ValueError(f"block_bytes is {block_bytes}: a block has at least one byte")
    if not packed.length:
        return _nothing((None, []))
    return staged.reserve_staged(core, one(namespace), packed, block_bytes, parent, wait_s, terms.check())


def prefetch(
    core: Core, namespaces: Namespaces, hashes: Sequence[bytes], priority: int, deadline_s: float
) -> Verb[prefetching.Started]:
    """See `Client.prefetch`."""
    check_seconds("deadline_s", deadline_s)
    if not -(1 << 31) <= operator.index(priority) < 1 << 31:
        raise ValueError(f"priority is {priority}: it must be small")
    several, packed = as_list(namespaces), pack(hashes)
    if not packed.length:
        return _nothing(prefetching.Started(outcome=Outcome.HIT))
    return prefetching.start(core, several, packed, priority, deadline_s)


def cancel_lookup(core: Core, prefetch_id: int) -> Verb[PrefetchStatus]:
    """See `Client.cancel_prefetch`."""
    return prefetching.cancel_lookup(core, _number("prefetch_id", prefetch_id))


def hint(core: Core, namespace: Namespace, hashes: Sequence[bytes], said: Hints) -> Verb[HintResult]:
    """See `Client.hint`."""
    check_hint(said, Hints)
    return hinting.hint(core, one(namespace), pack(hashes), said)


def _number(name: str, value: int) -> int:
    if not 0 <= operator.index(value) < 1 << 64:
        raise ValueError(f"{name} is {value}: it is none that the daemon gave")
    return value


def one(namespace: Namespace) -> Namespace:
    """A namespace. Raises TypeError for something else."""
    if not isinstance(namespace, Namespace):
        raise TypeError(f"a {type(namespace).__name__} is not a namespace: make one with client.namespace(spec)")
    return namespace


def chain_of(hashes: Sequence[bytes], parent: bytes) -> Packed:
    """The hashes of a put. Raises ValueError or TypeError for a parent that is none."""
    if not isinstance(parent, bytes):
        raise TypeError(f"parent is a {type(parent).__name__}: it must be bytes, the hash before the first")
    if len(parent) > HASH_BYTES_MAX:
        raise ValueError(f"parent has {len(parent)} bytes: hashes have at most {HASH_BYTES_MAX}")
    return pack(hashes)
