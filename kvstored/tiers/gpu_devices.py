"""Device workers, one for each GPU that is used: started, replaced when they end, and why there is none.

A worker starts at its device's first use. Those that the configuration names, or all that are visible, start
with the daemon instead (`keep`) and are started again by themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from typing import Final

from kvstored.errors import KVStoredError
from kvstored.tiers.gpu_worker import GONE, GpuWorker

UUID_BYTES: Final = 16
UNKNOWN_FOR_S: Final = 10.0  # a device that was not there is not looked for again for so long
PAUSE_MIN_S: Final = 0.5  # before a worker that ended is started again; twice as long each time
PAUSE_MAX_S: Final = 30.0
STEADY_S: Final = 60.0  # one that lived so long, or copied anything, did not end at its start
Prepare = Callable[[GpuWorker], Awaitable[None]]
ALL: Final = b""  # instead of a UUID: no device has it, and the answer names those that there are


class _Device:
    """One GPU: its worker, or why there is none."""

    def __init__(self) -> None:
        self.worker: GpuWorker | None = None
        self.starting = asyncio.Lock()
        self.name = ""
        self.driver = 0
        self.method = ""
        self.error = ""
        self.starts = 0
        self.not_before_s = 0.0
        self.pause_s = PAUSE_MIN_S
        self.started_s = 0.0

    def said(self) -> str:
        """What it does, or why not, in words."""
        state = f"{self.name}, driver {self.driver}, copies by {self.method}" if self.name else "starting"
        if self.worker is not None and self.worker.alive:
            state += f", {self.worker.said_pinned()}"
        return f"{self.error or state}, {self.starts} starts"


class GpuDevices:
    """The GPUs' workers."""

    def __init__(self, silence_max_s: float, note: Callable[[Sequence[int]], None] | None) -> None:
        """`note` writes down the workers that live, for the daemon after this one; raises OSError, KVStoredError."""
        self._silence_max_s = silence_max_s
        self._write_note = note
        self._noted = False
        self._noting = asyncio.Lock()
        self._devices: dict[bytes, _Device] = {}
        self._kept: list[asyncio.Task[None]] = []  # never cancelled: in the midst of a start they end by themselves
        self._missing: dict[bytes, str] = {}  # of those that are kept: why there is none
        self._discovering: GpuWorker | None = None
        self._closing = asyncio.Event()
        self._visible: set[bytes] = set()
        self._unknown_until_s = 0.0
        self._why_unknown = "no engine has registered memory yet"

    # ---- workers ----

    def known(self, uuid: bytes) -> GpuWorker | None:
        """The device's worker, where there is one."""
        device = self._devices.get(uuid)
        return device.worker if device is not None else None

    def retry_after_s(self, uuid: bytes) -> float:
        """After which time a device whose worker could not be had may have one; 0: it has, or nothing is known."""
        device = self._devices.get(uuid)
        if device is None or (device.worker is not None and device.worker.alive):
            return 0.0
        return max(PAUSE_MIN_S, device.not_before_s - time.monotonic())

    def workers(self) -> list[GpuWorker]:
        """All that there are."""
        return [device.worker for device in self._devices.values() if device.worker is not None]

    async def worker(self, uuid: bytes) -> tuple[GpuWorker | None, str]:
        """The device's worker, started where there is none; or None, and why."""
        if self._closing.is_set():
            return None, "the daemon is stopping"
        device = self._devices.get(uuid)
        if device is not None and device.worker is not None and device.worker.alive and not device.starting.locked():
            return device.worker, ""  # nearly always: what follows reads directories
        if find_spec("numpy") is None:
            return None, "the daemon's device worker needs numpy: install kvstored[gpu]"
        if len(uuid) != UUID_BYTES:
            return None, f"a device UUID of {len(uuid)} bytes: it has {UUID_BYTES}"
        if device is None:
            if time.monotonic() < self._unknown_until_s and uuid not in self._visible:
                return None, self._why_unknown
            device = self._devices[uuid] = _Device()
        async with device.starting:
            if device.worker is not None and device.worker.alive:
                return device.worker, ""
            if device.worker is not None:
                await device.worker.gone.wait()  # one at a time, or two would have the same slots
                self._ended(device, device.worker)
            if time.monotonic() < device.not_before_s:
                return None, f"{device.error or GONE}; another is started soon"
            return await self._start(uuid, device)

    def _ended(self, device: _Device, worker: GpuWorker) -> None:
        now = time.monotonic()
        device.worker = None
        device.error = f"{GONE}: {worker.why}"
        steady = worker.transfers > 0 or now - device.started_s > STEADY_S
        device.pause_s = PAUSE_MIN_S if steady else min(PAUSE_MAX_S, 2 * device.pause_s)
        device.not_before_s = device.started_s + (0.0 if steady or device.starts == 1 else device.pause_s)

    async def _start(self, uuid: bytes, device: _Device) -> tuple[GpuWorker | None, str]:
        worker = GpuWorker(uuid, self._silence_max_s)
        device.starts += 1
        device.started_s = time.monotonic()
        device.worker = worker
        try:
            await asyncio.shield(worker.start(self._note))
            hello = await asyncio.shield(worker.hello)
        except (OSError, KVStoredError) as error:
            device.worker = None
            device.error = f"the device worker cannot be started: {error}"
            return None, device.error
        self._visible.update(hello.uuids)
        if hello.error:
            worker.kill(hello.error)
            await worker.gone.wait()
            self._ended(device, worker)
            device.error = hello.error
            if uuid not in hello.uuids:  # of no use to anybody: not to be remembered, and not asked for at once again
                del self._devices[uuid]
                device.not_before_s = time.monotonic() + UNKNOWN_FOR_S
                self._why_unknown, self._unknown_until_s = hello.error, time.monotonic() + UNKNOWN_FOR_S
            return None, hello.error
        device.name, device.driver, device.method, device.error = hello.device, hello.driver, hello.method, ""
        return worker, ""

    # ---- started with the daemon ----

    def keep(self, uuids: Sequence[bytes], prepare: Prepare) -> None:
        """Start workers now, and again whenever one has ended; for no UUIDs those of all devices that are visible.

        `prepare` is called with each, and ends with it.
        """
        for uuid in uuids or [ALL]:
            keeping = self._keep_all(prepare) if uuid == ALL else self._keep(uuid, prepare)
            self._kept.append(asyncio.create_task(keeping))

    async def _keep_all(self, prepare: Prepare) -> None:
        while not self._closing.is_set():
            await self._discover()
            if self._visible:
                self.keep(sorted(self._visible), prepare)
                return
            await self._pause(PAUSE_MAX_S)  # told by `status`; drivers may come late after a machine's start

    async def _keep(self, uuid: bytes, prepare: Prepare) -> None:
        while not self._closing.is_set():
            worker, error = await self.worker(uuid)
            device = self._devices.get(uuid)
            if worker is not None:
                self._missing.pop(uuid, None)
                await prepare(worker)
                await worker.gone.wait()
            elif device is not None:
                await self._pause(max(PAUSE_MIN_S, device.not_before_s - time.monotonic()))
            else:
                self._missing[uuid] = error
                await self._pause(PAUSE_MAX_S)

    async def _pause(self, seconds: float) -> None:
        """Wait; less where the daemon stops."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            pass

    async def _discover(self) -> None:
        """Which devices there are: every worker's first word names them, and one for none is of no further use."""
        worker = GpuWorker(ALL, self._silence_max_s)
        try:
            await worker.start(self._note)
        except (OSError, KVStoredError) as error:
            self._why_unknown = f"the device worker cannot be started: {error}"
            return
        self._discovering = worker
        hello = await worker.hello
        self._visible.update(hello.uuids)
        self._why_unknown = hello.error
        worker.kill("it has told which devices there are")
        await worker.gone.wait()
        self._discovering = None

    # ---- the daemon's own ----

    def status(self) -> dict[str, str]:
        """By device what there is, in words."""
        found = {uuid.hex(): error for uuid, error in self._missing.items()}
        found |= {uuid.hex(): device.said() for uuid, device in self._devices.items()}
        return found or {"state": f"none: {self._why_unknown}"}

    @property
    def starts(self) -> int:
        """How many workers were started."""
        return sum(device.starts for device in self._devices.values())

    async def close(self) -> None:
        """End the workers; when this returns nothing of them touches memory."""
        self._closing.set()
        if self._discovering is not None:
            self._discovering.kill("the daemon is stopping")
        for device in list(self._devices.values()):
            async with device.starting:
                if device.worker is not None:
                    device.worker.kill("the daemon is stopping")
                    await device.worker.gone.wait()
        while self._kept:
            await self._kept.pop()
        if self._noted:
            await self._note()

    async def _note(self) -> None:
        """Write down which workers live, before they are given memory."""
        if self._write_note is None:
            return
        self._noted = True
        async with self._noting:  # several start at once, and there is one file
            pids = [worker.pid for worker in self.workers() if worker.pid and not worker.gone.is_set()]
            await asyncio.to_thread(self._write_note, pids)
