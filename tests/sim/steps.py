"""A world step by step: what its loop is given to do, what its devices are asked and answer, and what lies on them.

Two runs of a seed have the same steps, whatever else their processes have done and wherever their objects lie. The
trace of a world says what came of its calls; the steps say in which order everything was done, and so tell of what
depends on a process before anything comes of it. Whoever wants them brings a function that takes what a step is: its
kind first, and no objects whose `repr` has an address.
"""

import asyncio
import sys
from functools import partial
from zlib import crc32

from kvstored.testing.simulated_device import SimulatedDevice
from kvstored.testing.virtual import VirtualLoop
from tests.sim.world import World


class _Loop(VirtualLoop):
    """Notes each callback and each timer."""

    def __init__(self, note, *arguments, **named):
        self._note_step = note
        super().__init__(*arguments, **named)

    def call_soon(self, callback, *arguments, context=None):
        self._note_step("soon", self.time(), _name(callback))
        return super().call_soon(callback, *arguments, context=context)

    def call_at(self, when, callback, *arguments, context=None):
        self._note_step("at", self.time(), when, _name(callback))
        return super().call_at(when, callback, *arguments, context=context)

    def run_in_executor(self, executor, func, *arguments):
        self._note_step("thread", self.time(), _name(func))
        return super().run_in_executor(executor, func, *arguments)


class _Device(SimulatedDevice):
    """Notes each call, and the bytes that go to it and come back."""

    def __init__(self, note, *arguments):
        self._note_step = note
        super().__init__(*arguments)

    def called(self):
        self._note_step("device", sys._getframe(1).f_code.co_name)
        super().called()

    def _preadv(self, file, buffers, offset):
        done = super()._preadv(file, buffers, offset)
        self._note_step("read", str(file.path), offset, done, crc32(b"".join(map(bytes, buffers))[:done]))
        return done

    def _pwritev(self, file, buffers, offset):
        data = b"".join(map(bytes, buffers))
        self._note_step("write", str(file.path), offset, len(data), crc32(data))
        return super()._pwritev(file, buffers, offset)


class SteppedWorld(World):
    """A world that notes its steps."""

    def __init__(self, seed, ops, note):
        self._note_step = note
        super().__init__(seed, ops)

    def note(self, *what):
        self._note_step("world", *what)
        super().note(*what)

    def _make_device(self):
        return _Device(self._note_step, self.plan.seed, self.plan.faults)

    def _make_loop(self):
        return _Loop(self._note_step, self.delays, start_s=self._now)

    def _dispose(self, loop):
        super()._dispose(loop)
        for path, content in self.device.disk.contents():
            self._note_step("file", str(path), crc32(content.now), crc32(content.durable), sorted(content.spoilt))
        for path, files in self.device.disk.indexes.items():
            for name, table in sorted(files.committed.items()):
                entries = sorted(table.entries.items())
                self._note_step("index", str(path), name, len(entries), crc32(repr(entries).encode()))


def _name(callback):
    """What it is, and of a task's step also where its coroutine stands; nothing of addresses."""
    while isinstance(callback, partial):
        callback = callback.func
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return getattr(callback, "__qualname__", type(callback).__name__)
    coroutine = task.get_coro()
    frame = getattr(coroutine, "cr_frame", None)
    return f"{coroutine.__qualname__}:{frame.f_lineno if frame is not None else 'end'}"
