"""The copying of a device worker: one thread that submits, waits and answers (`copy_jobs` has the order).

All calls of the driver are made here, so that a driver that hangs stops this thread only, and
an answer means that the driver has ended the copies. Where it does not say so (an error that ends the
context, a copy that does not end) the process ends: that is the other proof.

It sleeps until its doorbell rings: a command came, or a piece ended, of whichever session. It looks around now and
then all the same, since the driver rings no more once the context is lost.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from kvstored.device import worker_messages as messages
from kvstored.device.copy_jobs import Job, Lane, Lanes, Part, Piece
from kvstored.device.copy_methods import CopyMethods
from kvstored.device.cuda import CudaError, Driver
from kvstored.device.doorbell import Inbox
from kvstored.device.worker_memory import EngineMemory, Engines, Refused, Segments
from kvstored.errors import DeviceError

PROGRESS_EVERY_S: Final = 0.5
LOOK_EVERY_S: Final = 0.25

Command = messages.ToWorker | tuple[messages.Segment | messages.Chunks, tuple[int, ...]]  # with descriptors


class ContextLost(Exception):
    """The driver does not say any more what its copies do: the process must end."""


class CopyEngine:
    """See the module. `answer` is called in this thread."""

    def __init__(
        self,
        driver: Driver,
        context: int,
        commands: Inbox[Command],
        answer: Callable[[messages.ToDaemon], None],
        stuck_max_s: float,
        methods: CopyMethods | None = None,
    ) -> None:
        """`stuck_max_s`: a piece that takes longer than this will not end any more. `methods`: or the driver's own."""
        self._methods = methods or driver
        self._driver = driver
        self._commands = commands
        self._answer = answer
        driver.bind(context)
        self._segments = Segments(driver)
        self._engines = Engines(driver)
        self._lanes = Lanes()
        self._stuck_max_s = stuck_max_s
        self._registered: dict[int, EngineMemory] = {}
        self._jobs: dict[int, Job] = {}
        self._to_pin: deque[int] = deque()
        self._leaving: list[messages.Unregister | messages.DropSegment] = []
        self._events: list[int] = []
        self._said_s = 0.0
        self._said_pinned_bytes = 0

    def run(self) -> None:
        """Serve for ever. Raises ContextLost."""
        while True:
            while (command := self._commands.take()) is not None:
                self._obey(command)
            self._collect()
            self._leave()
            lane = self._lanes.next(time.monotonic())
            if lane is not None:
                self._submit(lane)
            elif self._to_pin and not self._jobs:
                self._pin(self._to_pin.popleft())
            else:
                self._commands.wait(LOOK_EVERY_S if self._jobs else None)

    # ---- commands ----

    def _obey(self, command: Command) -> None:
        if isinstance(command, tuple):
            self._take(*command)
        elif isinstance(command, messages.Transfer):
            self._begin(command)
        elif isinstance(command, messages.Register):
            self._register(command)
        elif isinstance(command, messages.Unregister):
            self._give_up(lambda job: job.request.registration == command.registration, "unregistered")
            self._leaving.append(command)
        elif isinstance(command, messages.Cancel):
            self._give_up(lambda job: job.request.transfer == command.transfer and not job.submitted, "cancelled")
        elif isinstance(command, messages.DropSegment):
            self._leaving.append(command)
        elif isinstance(command, messages.Pin):
            self._to_pin.append(command.segment_id)

    def _take(self, what: messages.Segment | messages.Chunks, fds: tuple[int, ...]) -> None:
        if isinstance(what, messages.Chunks):
            self._engines.take(what.registration, fds)
            return
        try:
            self._segments.add(what.segment_id, fds[0], what.size_bytes)
        except DeviceError as error:  # transfers that need it are refused
            print(f"device worker: segment {what.segment_id}: {error}", file=sys.stderr, flush=True)

    def _register(self, command: messages.Register) -> None:
        error = ""
        try:
            self._registered[command.registration] = self._engines.open(command)
        except (Refused, CudaError) as failure:
            error = str(failure)
            self._check_context()
        self._say(messages.Registered(command.registration, error))

    def _begin(self, request: messages.Transfer) -> None:
        try:
            job = self._job(request)
            lane = self._lane(job)
        except (Refused, CudaError) as failure:
            self._check_context()
            self._say(messages.Done(request.transfer, str(failure)))
            return
        finally:
            self._say_pinned()
        self._jobs[request.transfer] = job
        lane.waiting.append(job)

    def _pin(self, segment_id: int) -> None:
        """Pin a segment that no transfer has needed yet: one, and then what has come meanwhile."""
        error = ""
        try:
            self._segments.pin(segment_id)
        except (Refused, CudaError) as failure:
            error = str(failure)
            self._check_context()
        self._say_pinned()
        self._say(messages.Pinned(segment_id, error))

    def _say_pinned(self) -> None:
        if self._segments.pinned_bytes != self._said_pinned_bytes:
            self._said_pinned_bytes = self._segments.pinned_bytes
            self._say(messages.Progress(self._said_pinned_bytes))

    def _lane(self, job: Job) -> Lane:
        lane = self._lanes.of(job.request)
        if lane is None:
            stream = self._lanes.spare_stream()
            lane = self._lanes.add(job, self._driver.stream() if stream is None else stream)
        return lane

    def _job(self, request: messages.Transfer) -> Job:
        memory = self._registered.get(request.registration)
        if memory is None:
            raise Refused("the memory is not registered here")
        segments, offsets = (np.frombuffer(data, np.uint64) for data in (request.segments, request.offsets))
        try:
            ids = memory.layout.check_ids(np.frombuffer(request.ids, np.uint32), len(segments))
        except ValueError as error:
            raise Refused(str(error)) from None
        cuts = request.cuts
        if cuts and not (cuts == sorted(set(cuts)) and len(cuts) > 1 and cuts[-1] <= len(memory.layout.fragments)):
            raise Refused(f"fragments {cuts}: the layout has {len(memory.layout.fragments)}")
        size_bytes = memory.layout.block_bytes * ids.shape[1]
        slots, segment_ids = self._segments.addresses(segments, offsets, size_bytes)
        behind = self._lanes.of(request) is not None
        return Job(request, memory, ids, slots, segment_ids, behind)

    def _give_up(self, which: Callable[[Job], bool], why: str) -> None:
        for job in [job for job in self._jobs.values() if which(job)]:
            job.error = job.error or why
            lane = self._lanes.of(job.request)
            if lane is not None and job in lane.waiting:
                lane.waiting.remove(job)
            self._settle(job)
        self._lanes.settle()

    def _settle(self, job: Job) -> None:
        """Answer once nothing of it is under way."""
        if job.in_flight or not job.submitted:
            return
        del self._jobs[job.request.transfer]
        self._say(messages.Done(job.request.transfer, job.error))

    def _leave(self) -> None:
        """Close what is to be closed and not in use any more."""
        for command in list(self._leaving):
            jobs = self._jobs.values()
            if isinstance(command, messages.DropSegment):
                if not any(command.segment_id in job.segment_ids for job in jobs):
                    self._leaving.remove(command)
                    self._closing(partial(self._segments.drop, command.segment_id))
                    self._say_pinned()
                    self._say(messages.Dropped(command.segment_id))
            elif not any(job.request.registration == command.registration for job in jobs):
                self._leaving.remove(command)
                memory = self._registered.pop(command.registration, None)
                if memory is not None:
                    self._closing(partial(self._engines.close, memory))
                self._say(messages.Unregistered(command.registration))

    def _closing(self, close: Callable[[], None]) -> None:
        try:
            close()
        except CudaError as error:  # what cannot be closed would be held for ever
            raise ContextLost(str(error)) from error

    # ---- copying ----

    def _submit(self, lane: Lane) -> None:
        """Submit one piece."""
        job = lane.waiting[0]
        assert job.next_part is not None, "what is submitted waits no more"
        try:
            self._submit_part(lane, job, job.next_part)
            job.advance()
        except CudaError as error:
            job.error = str(error)
            self._check_context(lane)  # waits for what was submitted of it
        if job.submitted:
            lane.waiting.popleft()
            self._settle(job)

    def _submit_part(self, lane: Lane, job: Job, part: Part) -> None:
        blocks, layout = slice(part.first_block, part.end_block), job.memory.layout
        fragments = slice(part.first_fragment, part.end_fragment)
        engine, stored, sizes = layout.plan(job.ids[blocks], job.memory.bases, job.slots[blocks], fragments)
        to, source = (engine, stored) if lane.to_device else (stored, engine)
        self._methods.copy(to, source, sizes, lane.stream, to_device=lane.to_device)
        event = self._events.pop() if self._events else self._driver.event()
        self._driver.record(event, lane.stream)
        self._driver.ring(lane.stream, self._commands.bell)
        if not lane.running:
            lane.since_s = time.monotonic()
        lane.running.append(Piece(job, part, event))
        lane.in_flight_bytes += part.size_bytes
        job.in_flight += 1

    def _collect(self) -> None:
        """Take pieces that have ended, of every lane. Raises ContextLost."""
        now, some = time.monotonic(), False
        for lane in self._lanes:
            while lane.running and self._ended(lane.running[0]):
                piece = lane.running.popleft()
                lane.since_s, some = now, True
                lane.in_flight_bytes -= piece.part.size_bytes
                self._events.append(piece.event)
                piece.job.in_flight -= 1
                if piece.part.done:
                    self._say(messages.Copied(piece.job.request.transfer, piece.part.done))
                self._settle(piece.job)
            if lane.running and now > lane.since_s + self._stuck_max_s:
                raise ContextLost(f"a copy has not ended for {self._stuck_max_s:g} s")
        self._lanes.settle()
        if some and now > self._said_s + PROGRESS_EVERY_S:
            self._say(messages.Progress(self._segments.pinned_bytes))

    def _ended(self, piece: Piece) -> bool:
        try:
            return self._driver.happened(piece.event)
        except CudaError as error:
            raise ContextLost(str(error)) from error

    def _check_context(self, lane: Lane | None = None) -> None:
        """After an error: wait for the lane's stream; an error of it, or of any call, is one for good.

        Raises ContextLost.
        """
        try:
            self._driver.memory_info()
            if lane is not None:
                self._driver.synchronize(lane.stream)
        except CudaError as error:
            raise ContextLost(str(error)) from error

    def _say(self, message: messages.ToDaemon) -> None:
        self._said_s = time.monotonic()
        self._answer(message)
