"""Looking after one path of the NVMe tier: opened, watched, and brought back when it failed.

From READ_ONLY a volume goes on as soon as a small file can be written, synced and read back in
its directory. One that is off, or whose index is in doubt, is closed and opened anew: once nobody
uses it and no thread is in it any more. A path that could not be opened at the start is tried
again in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstored.clock import Clock
from kvstored.errors import ConfigError, CorruptData, DeviceError
from kvstored.keys import Namespace
from kvstored.tiers.base import Health, PathStatus, Record
from kvstored.tiers.deadline import Late
from kvstored.tiers.epoch_files import read_epochs, write_epochs
from kvstored.tiers.epochs import Epochs, EpochTable
from kvstored.tiers.opening import VolumeOpener
from kvstored.tiers.scrub import Scrubber
from kvstored.tiers.volume import Volume

BACK_OFF_MAX: Final = 12  # times `retry_s`: a minute by default
SOON_S: Final = 0.05  # while the last users of a volume that is off leave it
DELETES_MAX: Final = 65_536
OPEN_WAIT_S: Final = 60.0
_log = logging.getLogger(__name__)


class VolumePath:
    """One path of the tier, open or not."""

    def __init__(
        self,
        number: int,
        path: Path,
        opener: VolumeOpener,
        clock: Clock,
        retry_s: float,
        known: dict[bytes, Namespace],
        epochs: Epochs,
    ) -> None:
        self.number = number
        self.path = path
        self.volume: Volume | None = None
        self.scrubber: Scrubber | None = None
        self.counts: Counter[str] = Counter()
        self._opener = opener
        self._known = known  # namespaces, of all paths
        self._epochs = epochs  # of all paths too
        self._epochs_written = EpochTable().pack()
        self._clock = clock
        self._retry_s = retry_s
        self._back_off_s = retry_s
        self._reason = "not open"
        self._since_s = clock.wall()
        self._retry_at_s = 0.0
        self._place: tuple[int, int] | None = None
        self._deletes: dict[bytes, str] = {}  # of blocks, while it is off: key and tenant
        self._clear = False  # too many to keep
        self._stopping = asyncio.Event()
        self._stepping = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._opening: asyncio.Task[None] | None = None  # where nobody waits for it

    # --- life ---

    async def open(self) -> None:
        """Open the path at the start. One whose device fails is off and tried again; raises ConfigError.

        Where it takes very long, for the device hangs or a large index is made anew, the daemon serves without
        it until it is there.
        """
        opening = asyncio.ensure_future(self._open_first())
        await asyncio.wait([opening], timeout=OPEN_WAIT_S)
        if opening.done():
            return opening.result()
        self._opening, self._reason = opening, "it is being opened, which takes long"
        _log.warning("%s is being opened still: serving without it until then", self.path)
        return None

    async def _open_first(self) -> None:
        async with self._stepping:
            try:
                await self._open()
            except (ConfigError, DeviceError) as error:
                if isinstance(error, ConfigError) and self._opening is None:
                    raise
                self._reason = str(error)
                _log.error("%s is off: %s", self.path, error)

    def watch(self) -> None:
        """Look after it from here on."""
        self._task = asyncio.ensure_future(self._run())

    async def close(self, timeout_s: float) -> bool:
        """Stop looking after it and close it. False: a thread did not come back from its device."""
        self._stopping.set()
        tasks = [task for task in (self._task, self._opening) if task is not None]
        if self.scrubber is not None:
            self.scrubber.stop()
            tasks.append(self.scrubber.task)
        if tasks and (await asyncio.wait(tasks, timeout=timeout_s or None))[1]:
            return False
        volume, self.volume = self.volume, None
        try:
            if volume is not None:
                await volume.close()
        except Late as late:
            _log.error("%s is left as it is: %s", self.path, late)
            return False
        return True

    # --- looking after it ---

    async def _run(self) -> None:
        delay_s = self._retry_s
        while not self._stopping.is_set():
            self._retry_at_s = self._clock.monotonic() + delay_s
            if await self._stopped_within(delay_s):
                break
            try:
                delay_s = await self.step()
            except Exception:  # it must not be left alone because of one
                _log.exception("looking after %s", self.path)

    async def _stopped_within(self, delay_s: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        except TimeoutError:
            return False
        return True

    async def step(self) -> float:
        """Look after the path once; seconds until the next time."""
        async with self._stepping:
            return await self._step()

    async def _step(self) -> float:
        volume = self.volume
        if volume is not None and volume.health is Health.OK:
            await volume.check()
            if volume.no_room and volume.health is Health.OK:
                await volume.look_for_room()
        elif volume is not None and volume.health is Health.READ_ONLY:
            await self._revive(volume)
        if self.volume is None or self.volume.health is Health.OFF:
            return await self._reopen()
        return self._delay_s(ok=self.volume.health is Health.OK)

    def _delay_s(self, *, ok: bool) -> float:
        """Until the next look: longer after every one that changed nothing."""
        delay_s = self._retry_s if ok else self._back_off_s
        self._back_off_s = self._retry_s if ok else min(2 * self._back_off_s, BACK_OFF_MAX * self._retry_s)
        return delay_s

    async def _revive(self, volume: Volume) -> None:
        await volume.check()
        try:
            if volume.health is Health.READ_ONLY:
                await volume.probe()
        except DeviceError as error:
            volume.reason = str(error)
            return
        if volume.in_doubt:
            volume.turn(Health.OFF, f"it is opened anew: {volume.reason}")
        elif volume.health is Health.READ_ONLY:
            volume.resume()

    async def _reopen(self) -> float:
        if self.volume is not None and not await self._let_go(self.volume):
            return SOON_S if not self.volume.calls.given_up else self._delay_s(ok=False)
        try:
            await self._open()
        except (ConfigError, DeviceError) as error:
            self._reason = str(error)
            return self._delay_s(ok=False)
        _log.warning("%s is back", self.path)
        return self._delay_s(ok=True)

    async def _let_go(self, volume: Volume) -> bool:
        """Close a volume that is off; False: it is in use, by a call or by a thread that has not come back."""
        if volume.busy:
            return False
        if self.scrubber is not None:
            self.scrubber.stop()
            await asyncio.wait([self.scrubber.task])
            self.scrubber = None
        if volume.busy:
            return False
        try:
            await volume.close()
        except Late:
            return False
        self._reason, self._since_s = volume.reason, volume.since_s
        self.volume = None
        return True

    async def _open(self) -> None:
        volume = await self._opener.open(self.number, self.path, self.counts, self._place)
        try:
            self._known.update(volume.namespaces)
            for namespace in list(self._known.values()):
                await volume.remember(namespace)
            await self._read_epochs(volume)
            # More may be asked for meanwhile, of either.
            while self._clear or self._deletes or self._epochs_written != self._epochs.wanted.pack():
                await self._write_epochs(volume)
                await self._catch_up(volume)
        except DeviceError:
            await volume.close()
            raise
        self.volume, self._place = volume, volume.directory.place
        self.scrubber = self._opener.scrubber(volume)

    async def _read_epochs(self, volume: Volume) -> None:
        """What it knows of epochs counts, before anything of it is found."""
        directory = volume.directory
        try:
            call = (read_epochs, directory.device, directory.path)
            found, written = await volume.calls.ask(volume.threads.stores, *call)
        except CorruptData as error:
            _log.error("%s: which epochs count is lost: nothing that is stored anywhere is found again", error)
            await self._epochs.learn(self._epochs.after_loss(self._clock.wall()))
            return
        self._epochs_written = written or EpochTable().pack() if not found.last_number else written
        await self._epochs.learn(found)

    async def _write_epochs(self, volume: Volume) -> None:
        packed, directory = self._epochs.wanted.pack(), volume.directory
        if packed != self._epochs_written:
            call = (write_epochs, directory.device, directory.path, packed)
            await volume.calls.ask(volume.threads.stores, *call)
            self._epochs_written = packed

    async def _catch_up(self, volume: Volume) -> None:
        """Delete what was deleted while it was off. Raises DeviceError: then it is still to be done."""
        deletes, clear = self._deletes, self._clear
        self._deletes, self._clear = {}, False
        try:
            if clear:
                await volume.recycler.empty(volume.table.with_records())
            for tenant in dict.fromkeys(deletes.values()):
                await volume.remove(tenant, [key for key, owner in deletes.items() if owner == tenant])
        except DeviceError:
            self._deletes, self._clear = {**deletes, **self._deletes}, clear or self._clear
            raise

    # --- asked by the tier ---

    async def write_epochs(self) -> None:
        """Have the wanted epochs on this path; raises DeviceError where they are not, or not yet."""
        volume = self.volume
        if volume is None or volume.health is Health.OFF:
            raise DeviceError(f"{self.path} is off: it learns of the epoch when it is back: bump again then")
        with volume.use():
            await self._write_epochs(volume)

    async def find(self, digest: bytes, hashes: Sequence[bytes], *, prefix: bool) -> Sequence[Record | None]:
        """See `Volume.find`; without what is to be deleted when the path is opened anew. For an open path."""
        assert self.volume is not None
        found = await self.volume.find(digest, hashes, prefix=prefix)
        if self._clear:
            return []
        if self._deletes:  # a put that found the record here would not be stored elsewhere, and lost then
            gone = self._deletes
            return [None if digest + h in gone else record for h, record in zip(hashes, found, strict=False)]
        return found

    async def remove(self, tenant: str, keys: Sequence[bytes]) -> int:
        """See `Volume.remove`; what fails is in doubt, and done when the path is opened anew. For an open path."""
        assert self.volume is not None
        try:
            return await self.volume.remove(tenant, keys)
        except DeviceError:
            self.note_deletes(tenant, keys)  # in the very turn: the path may be opened anew in the next
            raise

    def note_deletes(self, tenant: str, keys: Sequence[bytes]) -> None:
        """Blocks were deleted while the path is off: as soon as it is back they go, past a limit all others too."""
        if len(self._deletes) + len(keys) > DELETES_MAX:
            self._clear = True
            self._deletes.clear()
        if not self._clear:
            self._deletes.update(dict.fromkeys(keys, tenant))

    def status(self) -> PathStatus:
        """For people."""
        volume, scrub = self.volume, self.scrubber
        health = volume.health if volume is not None else Health.OFF
        left_s = max(0.0, self._retry_at_s - self._clock.monotonic())
        return PathStatus(
            number=self.number,
            path=str(self.path),
            health=health,
            reason=volume.reason if volume is not None else self._reason,
            since_s=volume.since_s if volume is not None else self._since_s,
            retry_in_s=0.0 if health is Health.OK else left_s,
            direct_io=volume is not None and volume.directory.direct,
            scrubbed_bytes=self.counts["scrubbed_bytes"],
            scrub_corrupt_blocks=self.counts["scrub_corrupt_blocks"],
            scrub_passed_s=scrub.passed_s if scrub is not None else 0.0,
        )
