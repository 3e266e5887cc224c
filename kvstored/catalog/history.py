"""Why a block is not there: a bounded memory of what went away, and of what was refused.

A leaf like `errors` and `clock`: whoever removes or refuses blocks notes it here in one call a batch,
`explain` and the counters of misses ask. Each tenant has a memory of its own, so that one cannot push
out what is remembered of another.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Final, Protocol

import msgspec

from kvstored.clock import Clock
from kvstored.keys import Namespace

GONE_BLOCKS: Final = 65_536  # remembered per tenant
# Refusals have a memory of their own: a client that asks again and again must not push out what was evicted.
REFUSED_BLOCKS: Final = 8_192
REFUSED_PER_NOTE_MAX: Final = 128
BYTES_PER_BLOCK: Final = 24
CAUSES_MAX: Final = 256  # pairs of reason and rule per tenant; rules are constant texts, so there are a few dozen
STEPS_MAX: Final = 32  # one look at a block's reason
ROOM_MADE: Final = "to make room in DRAM for new blocks, as the coldest of its eviction order"
AT_LIMIT: Final = "its tenant was at its limit in DRAM, and gave up the coldest of its blocks for new ones"
RECYCLED: Final = "the oldest extent on NVMe was recycled"
_CAUSE_BITS: Final = 8
_KEY_MASK: Final = (1 << 64) - 1
_NUMBER_MASK: Final = (1 << 32) - 1


class Reason(enum.StrEnum):
    """Why a block is not there: verdicts of `explain`, and labels of the counters of misses."""

    NEVER_STORED = "never_stored"
    EVICTED = "evicted"  # for room, by the eviction order of its tenant, or with its segment or extent
    EXPIRED = "expired"  # past its TTL or its tenant's maximum age
    PURGED = "purged"
    EPOCH = "epoch"  # stored before the last epoch bump of its model
    QUOTA = "quota"  # taken away, or refused, because its tenant was over what it may have
    CORRUPT = "corrupt"
    DELETED = "deleted"  # by a client
    PUT_REFUSED = "put_refused"  # throttled, or no room: its bytes never came
    NAMESPACE_DIFFERS = "namespace_differs"  # stored under another namespace of the same tenant
    UNKNOWN = "unknown"  # gone by a reason that is not remembered


class Gone(msgspec.Struct, frozen=True, gc=False):
    """Why a block is not there, when it went (wall clock, in ms steps), and by which rule."""

    reason: Reason
    rule: str
    wall_s: float


class Owned(Protocol):
    """The space of a namespace, of whatever epoch: what is remembered goes by the namespace."""

    @property
    def namespace(self) -> Namespace:
        """Whose blocks these are."""
        ...


class Ring:
    """The last `blocks` keys that were noted, a power of two, and a number for each; 24 bytes a block.

    Keys are 64-bit fingerprints: equal ones of different keys, one in 2^48 looks, give a wrong reason, no more.
    Those with the same low bits form a list, newest first, that is followed by number. Numbers only grow, so what
    was overwritten shows by being too old, and nothing has to be unlinked.
    """

    def __init__(self, blocks: int) -> None:
        assert blocks.bit_count() == 1, "a power of two: places are masked, not divided"
        self._mask = blocks - 1
        self._keys = array("Q", bytes(8 * blocks))
        self._values = array("Q", bytes(8 * blocks))
        self._older = array("I", bytes(4 * blocks))
        self._newest = array("I", bytes(4 * blocks))
        self._next = blocks + 1  # 0 is too old from the start

    def add(self, keys: Sequence[int], value: int) -> None:
        """Note keys with one value."""
        mask, number = self._mask, self._next
        ours, values, older, newest = self._keys, self._values, self._older, self._newest
        for key in keys:
            place, bucket = number & mask, key & mask
            ours[place] = key
            values[place] = value
            older[place] = newest[bucket]
            newest[bucket] = number & _NUMBER_MASK
            number += 1
        self._next = number

    def find(self, key: int) -> int | None:
        """The value that was noted last with a key; None: it is not known any more."""
        mask, next_ = self._mask, self._next
        number, age = self._newest[key & mask], 0
        for _ in range(STEPS_MAX):
            # Ages grow along a list; a smaller one is a place that was used again.
            age, last = (next_ - number) & _NUMBER_MASK, age
            if not last < age <= mask + 1:
                return None
            if self._keys[number & mask] == key:
                return self._values[number & mask]
            number = self._older[number & mask]
        return None


class _Memory:
    """What is remembered for one tenant."""

    def __init__(self, gone_blocks: int, refused_blocks: int) -> None:
        self.gone = Ring(gone_blocks)
        self.refused = Ring(refused_blocks)
        self.causes: list[tuple[Reason, str]] = []
        self.numbers: dict[tuple[Reason, str], int] = {}

    def value(self, reason: Reason, rule: str, wall_s: float) -> int:
        """When and why in one number."""
        number = self.numbers.get((reason, rule))
        if number is None:
            if len(self.causes) >= CAUSES_MAX - len(Reason) and rule:
                return self.value(reason, "", wall_s)
            number = self.numbers[reason, rule] = len(self.causes)
            self.causes.append((reason, rule))
        return int(wall_s * 1000) << _CAUSE_BITS | number

    def gone_of(self, value: int) -> Gone:
        """The opposite of `value`."""
        reason, rule = self.causes[value & (1 << _CAUSE_BITS) - 1]
        return Gone(reason, rule, (value >> _CAUSE_BITS) / 1000)


class History:
    """The last blocks of each tenant that went away or were refused. Bounded: the oldest are overwritten."""

    def __init__(self, clock: Clock, gone_blocks: int = GONE_BLOCKS, refused_blocks: int = REFUSED_BLOCKS) -> None:
        self._clock = clock
        self._blocks = (gone_blocks, refused_blocks)
        self._memories: dict[str, _Memory] = {}

    def note(
        self, space: Owned, hashes: Collection[bytes], reason: Reason, rule: str, *, refused: bool = False
    ) -> None:
        """Remember why these blocks of a namespace are gone, or were `refused`: half a microsecond a block.

        `rule` is a constant text that completes "evicted at ...: ", as "room for new blocks"; numbers and names that
        vary do not belong into it.
        """
        if not hashes:
            return
        memory = self._memories.get(space.namespace.tenant)
        if memory is None:
            memory = self._memories[space.namespace.tenant] = _Memory(*self._blocks)
        value = memory.value(reason, rule, self._clock.wall())
        refused = refused or reason is Reason.PUT_REFUSED
        noted = islice(hashes, REFUSED_PER_NOTE_MAX) if refused else hashes
        # Hashes of bytes are keyed anew in each process, so that nobody can craft equal ones.
        salt = hash(space.namespace.digest)
        (memory.refused if refused else memory.gone).add([(hash(h) ^ salt) & _KEY_MASK for h in noted], value)

    def why(self, space: Owned, hash_: bytes) -> Gone | None:
        """What was noted last of a block; None: nothing, or so long ago that it was overwritten."""
        memory = self._memories.get(space.namespace.tenant)
        if memory is None:
            return None
        key = (hash(hash_) ^ hash(space.namespace.digest)) & _KEY_MASK
        found = [value for ring in (memory.gone, memory.refused) if (value := ring.find(key)) is not None]
        return memory.gone_of(max(found, key=lambda value: value >> _CAUSE_BITS)) if found else None

    def forget(self, tenant: str) -> None:
        """Give back the memory of a tenant that is no more."""
        self._memories.pop(tenant, None)
