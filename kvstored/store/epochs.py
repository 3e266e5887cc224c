"""Epoch bumps: all blocks of a model, or of one version of it, are out of reach at once.

A bump is written to every device first. Then the spaces of the model begin anew under other digests (no
block is looked at, and no call of a reader becomes slower), and it is acknowledged. The room comes back
in the background, in pieces. What was reserved before the bump belongs to the epoch before: its commit
answers MISS. Who has the namespace open goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import msgspec

from kvstored.catalog.catalog import Space
from kvstored.catalog.history import Reason
from kvstored.errors import CorruptData, DeviceError
from kvstored.store.parts import Parts
from kvstored.store.removal import Removals, Removed, Why
from kvstored.tiers.epochs import About, EpochTable

PIECE_SPACES: Final = 256  # looked at, and begun anew, in one go
RETRY_S: Final = 30.0  # where a device could not give its room back
BUMPED: Final = Why(Reason.EPOCH, "its model was bumped to a new epoch")
_log = logging.getLogger(__name__)


class Bumped(msgspec.Struct):
    """What a bump did: the epoch's number (its time in us), and the namespaces and DRAM blocks that it was about."""

    number: int
    namespaces: int
    dram_blocks: int


class EpochInfo(msgspec.Struct):
    """One epoch as it is listed; `taking_back`: blocks of earlier ones may still take up room."""

    tenant: str
    model: str
    version: str  # empty: all of them
    number: int
    taking_back: bool


class Bumps:
    """Bumps epochs, and takes back the room of what was bumped."""

    def __init__(self, parts: Parts, removals: Removals) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._epochs = parts.epochs
        self._removals = removals
        self._bumping = asyncio.Lock()
        self._unwritten = False  # a device may not know of the latest change
        self._due = asyncio.Event()
        self._due.set()  # an earlier process may have left something
        self._epochs.on_changed = self._renew
        self._epochs.remember = self._remember
        self._catalog.digest_of = self._epochs.now.digest_of

    # ---- asked by clients ----

    async def bump(self, tenant: str, model: str, version: str = "") -> Bumped:
        """Begin the next epoch of a tenant's model, or of one version of it, durably, even if the caller leaves.

        Raises LimitExceeded, or DeviceError where a device may not know of it: it counts then, until a restart.
        """
        return await asyncio.shield(self._bump(About(tenant, model, version)))

    async def _bump(self, about: About) -> Bumped:
        async with self._bumping:
            number = self._epochs.wanted.bump(about, self._parts.clock.wall())
            asked = self._epochs.wanted.copy()  # without what a device brings meanwhile
            doubt: DeviceError | None = None
            try:
                await self._write()
            except DeviceError as error:
                doubt = error
            self._epochs.now.merge(asked)
            bumped = Bumped(number, 0, 0)
            spaces = list(self._catalog.spaces.values())
            for start in range(0, len(spaces), PIECE_SPACES):
                for old in self._begin_anew(spaces[start : start + PIECE_SPACES]):
                    bumped.namespaces += 1
                    bumped.dram_blocks += len(old.entries)
                await asyncio.sleep(0)
            self._parts.counters["epoch_bumps"] += 1
            self._due.set()
        if doubt is not None:
            raise doubt
        return bumped

    async def _write(self) -> None:
        """Have the wanted epochs on NVMe, then in memory that is kept. Raises DeviceError, with the rest done."""
        self._unwritten = True
        try:
            if self._parts.below is not None:
                await self._parts.below.tier.remember_epochs()
        finally:
            await self._parts.dram.remember_epochs(self._epochs.wanted.pack())
        self._unwritten = False

    def list(self, tenant: str | None) -> list[EpochInfo]:
        """Every epoch of a tenant, or of all."""
        known = [(about, rule) for about, rule in self._epochs.now if tenant in (None, about.tenant)]
        return [EpochInfo(*about, rule.number, bool(rule.past)) for about, rule in known]

    # ---- the change ----

    def _begin_anew(self, spaces: Iterable[Space]) -> Iterator[Space]:
        """Bring those spaces whose epoch has passed into the present one; gives what was in each before."""
        digest_of = self._epochs.now.digest_of
        for space in spaces:
            if space.digest != digest_of(space.namespace):
                old = self._catalog.retire(space)
                if self._parts.below is not None:
                    self._parts.below.promoter.began_anew(space)
                yield old

    def _renew(self) -> None:
        for _ in self._begin_anew(list(self._catalog.spaces.values())):
            pass
        self._due.set()

    def enter(self) -> None:
        """DRAM is open: the epochs that an earlier process noted there count."""
        packed = self._parts.dram.epochs()
        try:
            if packed:
                self._epochs.found(EpochTable.unpack(packed))
        except CorruptData as error:
            _log.error("%s in memory: nothing that is stored anywhere is found again", error)
            self._epochs.found(self._epochs.after_loss(self._parts.clock.wall()))

    async def opened(self) -> None:
        """The tiers are open: what one of them knew of epochs, all know."""
        await self._remember(self._epochs.wanted.pack())

    async def _remember(self, packed: bytes) -> None:
        """Have memory know of them where it does not; what cannot be noted counts all the same, until a restart."""
        try:
            if self._epochs.wanted.last_number and self._parts.dram.epochs() != packed:
                await self._parts.dram.remember_epochs(packed)
        except DeviceError as error:
            _log.warning("epochs: %s", error)

    # ---- the room that comes back ----

    async def run(self) -> None:
        """Take back the room of past epochs as bumps come, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                await self.take_back()
            except DeviceError as error:
                _log.info("room of past epochs is still to come back: %s", error)
                await asyncio.sleep(RETRY_S)
                self._due.set()

    async def take_back(self) -> Removed:
        """Take away everything of past epochs, in both tiers, and write down what could not be before.

        Raises DeviceError where some of it is left.
        """
        total = Removed()
        while self._catalog.retired:
            old = self._catalog.retired[0]
            while entries := list(islice(old.entries.values(), PIECE_SPACES)):
                total.add(self._removals.forget(entries, BUMPED))
                await asyncio.sleep(0)
            self._catalog.retired.remove(old)
        try:
            for about, rule in list(self._epochs.now):
                if rule.past:
                    await self._take_back_below(about, set(rule.past), total)
        finally:
            if self._unwritten:
                async with self._bumping:
                    await self._write()
        self._parts.counters["epoch_blocks"] += total.blocks
        return total

    async def _take_back_below(self, about: About, numbers: set[int], total: Removed) -> None:
        for space in list(self._catalog.spaces.values()) if self._parts.below is not None else ():
            if space.tenant == about.tenant:
                for digest in self._epochs.now.past_digests(space.namespace, about):
                    past = Space(space.namespace, digest)
                    total.add(await self._removals.remove_all(past, BUMPED, lasting=False))
        self._epochs.now.settle(about, numbers)
        self._unwritten |= self._epochs.wanted.settle(about, numbers)
