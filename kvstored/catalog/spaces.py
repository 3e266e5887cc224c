"""What the catalogue is made of: entries, and the spaces that their keys live in.

A space is one namespace's, for good; the digest under which its blocks are stored is another one
in each epoch. So an epoch ends by giving the space a fresh table and a fresh digest: whoever has it
open goes on with it, and finds nothing of before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from kvstored.catalog.known import KNOWN_BLOCKS_MAX, KnownRun
from kvstored.catalog.timers import Timers
from kvstored.keys import Namespace
from kvstored.lifetime import Expiry
from kvstored.policy.eviction import EvictionOrder, Node

WRITING: Final = 0
PROMOTING: Final = 1
READY: Final = 2
DEAD: Final = 3
REVIVING: Final = 4
LEASE_UNIT: Final = 1 << 32  # in `Entry.held`
LEASE: Final = LEASE_UNIT + 1  # a lease is a hold, and counted above the others
BELOW: Final = 1  # in `Entry.flags`
CAME_UP: Final = 2  # it is a copy of one that was on NVMe: what takes that away takes it too
HINTED: Final = 4
STATE_NAMES: Final = ("writing", "promoting", "ready", "dead", "reviving")


class Pool:
    """The entries of one namespace and slot size; they share an eviction order with others of the tenant."""

    __slots__ = ("order", "slot_bytes", "space")

    def __init__(self, space: Space, slot_bytes: int, order: EvictionOrder) -> None:
        self.space = space
        self.slot_bytes = slot_bytes
        self.order = order


class Entry(Node, gc=False, eq=False, kw_only=True):
    """One block in DRAM. Not tracked by the collector: `forget` cuts every link that could form a cycle."""

    hash: bytes
    parent: bytes
    pool: Pool
    slot: int
    size_bytes: int
    state: int
    held: int = 0  # holds and leases in one number, so that the hot path changes one: see LEASE
    flags: int = 0  # several in one field: each field is 8 bytes of every block in memory
    expires_s: float = 0  # when it ends; 0: it does not. Of a sliding one, as its last use left it
    expiry: Expiry | None = None  # as it was put or read
    step: int = 0  # the bucket of the space's timers that it is in

    @property
    def holds(self) -> int:
        """How many leases and I/O use its slot."""
        return self.held & (LEASE_UNIT - 1)

    @property
    def leases(self) -> int:
        """How many of them are leases."""
        return self.held // LEASE_UNIT

    @property
    def below(self) -> bool:
        """Whether a copy of it is on NVMe, with the end that it has here."""
        return bool(self.flags & BELOW)

    @below.setter
    def below(self, there: bool) -> None:
        self.flags = self.flags | BELOW if there else self.flags & ~BELOW

    @property
    def hint(self) -> bool:
        """Whether whoever put it says that it will be asked for again."""
        return bool(self.flags & HINTED)

    @hint.setter
    def hint(self, wanted: bool) -> None:
        self.flags = self.flags | HINTED if wanted else self.flags & ~HINTED

    @property
    def tied(self) -> bool:
        """Whether it goes with what is on NVMe under its key."""
        return bool(self.flags & (BELOW | CAME_UP))

    @property
    def identity(self) -> Hashable:
        """See `Node`; shards of one model share it, as they share their fate."""
        return self.hash


def _ignore(_space: Space, _hashes: Sequence[bytes]) -> None:
    """Nobody knows of ends."""


class Space:
    """The entries of one namespace."""

    def __init__(self, namespace: Namespace, digest: bytes = b"") -> None:
        self.namespace = namespace
        self.digest = digest or namespace.digest  # under which its blocks are stored
        self.entries: dict[bytes, Entry] = {}
        self.pools: dict[int, Pool] = {}
        self.known: KnownRun | None = None  # None again as soon as an entry goes or moves
        self.used_bytes = 0
        self.unready = 0  # entries that are being written or promoted
        self.timers: Timers | None = None  # once a block that ends was in it
        self.max_age_s = 0.0  # its tenant's; 0: none
        self.prefetched: dict[Entry, str] = {}  # read ahead by whom, and not asked for yet: see `prefetched`
        self.on_look: Callable[[Space, Sequence[bytes]], None] = _ignore

    def ready_run(self, hashes: Sequence[bytes]) -> list[Entry]:
        """The entries of the longest run from the start that can be read now: a list that nobody may change."""
        self.drop_ended(hashes)
        known = self.known
        if known is not None and known.hashes is hashes:
            return known.entries
        entries = self.entries
        try:
            run = list(map(entries.__getitem__, hashes))  # all of it is there, as mostly
        except KeyError:
            run = []
            for hash_ in hashes:
                entry = entries.get(hash_)
                if entry is None:
                    break
                run.append(entry)
        if self.unready:
            del run[ready_length(run) :]
        # A list could be another by the next call; and what is remembered is bounded by what is stored.
        if len(run) == len(hashes) <= min(len(entries), KNOWN_BLOCKS_MAX) and isinstance(hashes, tuple):
            self.known = KnownRun(hashes, run)
        return run

    def ancestors(self, parent: bytes, limit: int) -> list[Entry]:
        """The chain above a block, from its root down to `parent`, as far as it is in DRAM."""
        chain: list[Entry] = []
        entries = self.entries
        while parent and len(chain) < limit:
            entry = entries.get(parent)
            if entry is None:
                break
            chain.append(entry)
            parent = entry.parent
        chain.reverse()
        return chain

    def entered_run(self, hashes: Sequence[bytes]) -> list[Entry]:
        """The entries of the longest run from the start that has any, whatever their state."""
        run: list[Entry] = []
        for hash_ in hashes:
            entry = self.entries.get(hash_)
            if entry is None:
                break
            run.append(entry)
        return run

    @property
    def only_pool(self) -> Pool | None:
        """The pool that all entries are in, as nearly always; None where there are several or none."""
        return next(iter(self.pools.values())) if len(self.pools) == 1 else None

    def slot_bytes_of(self, entries: Sequence[Entry]) -> int:
        """Bytes of the slots of some of its entries."""
        pool = self.only_pool
        return len(entries) * pool.slot_bytes if pool else sum([entry.pool.slot_bytes for entry in entries])

    @property
    def tenant(self) -> str:
        """Whose namespace it is."""
        return self.namespace.tenant

    def drop_ended(self, hashes: Sequence[bytes]) -> None:
        """Before entries are looked at: those of these blocks that have ended are gone then."""
        if self.timers is not None:
            self.on_look(self, hashes)

    def time(self, entry: Entry, expiry: Expiry) -> None:
        """Have an entry end, from here on."""
        if self.timers is None:
            self.timers = Timers()
        elif entry.expires_s:
            self.timers.discard(entry)
        entry.expiry, entry.expires_s = expiry, expiry.expires_s
        self.timers.add(entry)

    def retire(self, digest: bytes) -> Space:
        """Begin anew under another digest; what was in it is in the space that this returns, and in no other."""
        old = Space(self.namespace, self.digest)
        old.entries, old.pools = self.entries, self.pools
        old.used_bytes, old.unready, old.timers = self.used_bytes, self.unready, self.timers
        old.prefetched, self.prefetched = self.prefetched, {}
        self.timers = self.known = None
        for pool in old.pools.values():
            pool.space = old
        self.entries, self.pools, self.used_bytes, self.unready, self.digest = {}, {}, 0, 0, digest
        return old


def ready_length(run: Sequence[Entry]) -> int:
    """How many leading blocks of a run can be read now."""
    return next((index for index, entry in enumerate(run) if entry.state != READY), len(run))


def by_order(entries: Sequence[Entry]) -> list[tuple[EvictionOrder, Sequence[Entry]]]:
    """Entries by the order they stand in, each group as it was given; nearly always there is one."""
    orders = {entry.pool.order: None for entry in entries}  # no set: its order would be that of addresses
    if len(orders) == 1:
        return [(next(iter(orders)), entries)]
    return [(order, [entry for entry in entries if entry.pool.order is order]) for order in orders]
