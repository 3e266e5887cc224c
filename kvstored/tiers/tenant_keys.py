"""Encryption of the NVMe tier, tenant by tenant: whose new blocks are encrypted, and whose keys are there.

Master keys come from above and are not kept. A tenant whose key is not there is *barred*: nothing of it
is written, and what it has is neither found nor removed. What is here is asked on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from kvstored.errors import DeviceError
from kvstored.tiers.base import Health, Record
from kvstored.tiers.key_ring import KnownKeys
from kvstored.tiers.recovery import VolumePath
from kvstored.tiers.sealing import ALGORITHMS
from kvstored.tiers.volume import Volume

BUSY_S: Final = 0.01  # between two looks at whether a key is still being used
_NAMES: Final = {number: name for name, number in ALGORITHMS.items()}


class TenantKeys:
    """The keys of all volumes. Calls that change something come one after the other."""

    def __init__(self) -> None:
        self.algorithms: dict[str, int] = {}
        self.known: KnownKeys = {}
        self.barred: set[str] = set()
        self.paths: Sequence[VolumePath] = ()
        self._why: dict[str, str] = {}  # the master key could not be had
        self._doomed: defaultdict[int, set[str]] = defaultdict(set)  # by path: to be destroyed as soon as it is back
        self._changing = asyncio.Lock()

    # --- asked for every batch ---

    @property
    def any_sealed(self) -> bool:
        """Whether any volume may hold encrypted blocks."""
        return any(path.volume is not None and path.volume.directory.sealed for path in self.paths)

    def opens(self, record: Record) -> bool:
        """Whether a record's bytes can be had."""
        volume = self.paths[record.location.volume].volume
        return volume is not None and volume.keys.opens(record)

    # --- settings ---

    def configure(self, tenant: str, algorithm: str) -> None:
        """From here on the tenant's new blocks are encrypted like this, or not at all where it is empty."""
        if algorithm:
            self.algorithms[tenant] = ALGORITHMS[algorithm]
        else:
            self.algorithms.pop(tenant, None)
        self.look()

    def missing(self, tenant: str, why: str) -> None:
        """The tenant's master key cannot be had at present."""
        self._why[tenant] = why

    def look(self) -> None:
        """Find out anew who is barred: volumes come and go."""
        able = {tenant for volume in self._volumes() if volume.health is Health.OK for tenant in volume.keys.open}
        barred = self.algorithms.keys() - able
        self.barred.difference_update(self.barred - barred)  # in place: others look at it
        self.barred.update(barred)

    def waiting(self) -> set[str]:
        """Tenants that need their master key, for some volume at least."""
        self.look()
        waiting = {tenant for volume in self._volumes() for tenant in volume.keys.locked}
        for volume in self._volumes():
            if volume.health is Health.OK:
                waiting |= self.algorithms.keys() - volume.keys.open.keys()
        return waiting

    # --- with a master key ---

    async def unlock(self, tenant: str, masters: Sequence[bytes]) -> None:
        """Open the tenant's data keys on all volumes, made with the first master key where there is none yet.

        What fails is left locked and said by `locked`.
        """
        async with self._changing:
            self._why.pop(tenant, None)
            for volume in self._volumes():
                await self._unlock(volume, tenant, masters)
            self.look()

    async def _unlock(self, volume: Volume, tenant: str, masters: Sequence[bytes]) -> None:
        ring, number = volume.keys, volume.number
        make = tenant in self.algorithms and volume.health is Health.OK
        try:
            if tenant in self._doomed[number]:
                await volume.calls.ask(volume.threads.stores, ring.destroy, tenant)
                self._doomed[number].discard(tenant)
            if tenant not in ring.open and (make or tenant in ring.locked):
                await volume.calls.ask(volume.threads.stores, ring.unlock, tenant, masters, make=make)
        except DeviceError as error:
            ring.locked[tenant] = str(error)

    async def rekey(self, tenant: str, masters: Sequence[bytes]) -> int:
        """Wrap the tenant's data keys with the first master key; returns on how many volumes.

        The others are for what is locked. Raises DeviceError, with a list of what could not be done: for these
        the old master key is still needed.
        """
        async with self._changing:
            done, failures = 0, list[str]()

            async def rewrap(path: VolumePath, volume: Volume) -> None:
                nonlocal done
                if await volume.calls.ask(volume.threads.stores, volume.keys.rewrap, tenant, masters):
                    done += 1
                elif tenant in volume.keys.locked:
                    failures.append(f"{path.path}: {volume.keys.locked[tenant]}")

            failures += await self._on_each(rewrap)
            self._why.pop(tenant, None)
            self.look()
        if failures:
            raise DeviceError(f"not everywhere, so keep the old master key: {'; '.join(failures)}")
        return done

    # --- destroying ---

    def has(self, tenant: str) -> bool:
        """Whether the tenant has a data key on any volume that is open."""
        rings = [path.volume.keys for path in self.paths if path.volume is not None]
        return any(tenant in ring.open or tenant in ring.locked for ring in rings)

    def erasable(self, tenant: str) -> bool:
        """Whether all that was ever written of the tenant, in the extents that it has now, goes with its key."""
        volumes = [path.volume for path in self.paths]
        return all(volume is not None and not volume.table.stained(tenant) for volume in volumes)

    async def destroy(self, tenant: str) -> int:
        """Overwrite the tenant's data keys on the devices and in memory; returns how many there were.

        What was encrypted with them is as good as random from here on. A path that is off is done when it is
        back, but not if this process has ended by then: it raises DeviceError, all others being done. New keys
        are made by the next `unlock`.
        """
        async with self._changing:
            for id_ in [id_ for id_, (owner, _) in self.known.items() if owner == tenant]:
                del self.known[id_]
            done = 0

            async def destroy(path: VolumePath, volume: Volume) -> None:
                nonlocal done
                there = tenant in volume.keys.open or tenant in volume.keys.locked
                key = volume.keys.take(tenant)
                while volume.keys.using[tenant]:  # its secret must not be zeros while blocks are encrypted with it
                    if volume.calls.given_up:
                        raise DeviceError("the device does not answer")
                    await asyncio.sleep(BUSY_S)
                await volume.calls.ask(volume.threads.stores, volume.keys.destroy, tenant)
                self._doomed[path.number].discard(tenant)
                if key is not None:
                    key.forget()
                done += there

            for path in self.paths:
                self._doomed[path.number].add(tenant)
            failures = await self._on_each(destroy)
            self.look()
        if failures:
            raise DeviceError(f"the key is not destroyed everywhere: {'; '.join(failures)}")
        return done

    async def _on_each(self, act: Callable[[VolumePath, Volume], Awaitable[None]]) -> list[str]:
        """Do something on every path; what could not be done."""
        failures: list[str] = []
        for path in self.paths:
            volume = path.volume
            try:
                if volume is None or volume.health is Health.OFF:
                    raise DeviceError("it is off")
                await act(path, volume)
            except DeviceError as error:
                failures.append(f"{path.path}: {error}")
        return failures

    # --- status ---

    def locked(self) -> dict[str, str]:
        """Tenants whose key is not there, and why."""
        found: dict[str, str] = {}
        for path in self.paths:
            if path.volume is not None:
                for tenant, why in path.volume.keys.locked.items():
                    found[tenant] = f"{path.path}: {self._why.get(tenant, why)}"
        for tenant in sorted(self.barred - found.keys()):
            found[tenant] = self._why.get(tenant, "its key has not been read yet")
        return found

    def properties(self) -> dict[str, str]:
        """For status: one line for every tenant whose blocks are encrypted, or were and cannot be read."""
        locked = self.locked()
        names = sorted(self.algorithms.keys() | locked.keys())
        return {f"encryption.{name}": self._describe(name, locked.get(name)) for name in names}

    def _describe(self, tenant: str, locked: str | None) -> str:
        algorithm = _NAMES.get(self.algorithms.get(tenant, 0), "off")
        return algorithm if locked is None else f"{algorithm}, locked: {locked}"

    def _volumes(self) -> Iterator[Volume]:
        """The open ones that can be asked."""
        volumes = [path.volume for path in self.paths]
        return (volume for volume in volumes if volume is not None and volume.health is not Health.OFF)
