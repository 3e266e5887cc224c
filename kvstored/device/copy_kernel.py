"""A kernel that copies small pieces (`copy_kernel.cu`), for directions and sizes where the copy engines are slow.

It is compiled for the very device at the worker's start, by NVRTC as cupy or cuda-bindings bring it; without
either there is no kernel. Only the worker's process imports them. Lists of copies go through pinned memory that
the device reads; each is used again when the event after its launch has happened.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
from kvstored_proto.cuda_copies import Pointers

from kvstored.device.cuda import CudaError, Driver

SOURCE: Final = Path(__file__).with_suffix(".cu")
NAME: Final = b"kvstored_copy"
IMAGE_VARIABLE: Final = "KVSTORED_COPY_KERNEL"  # a cubin to use instead of compiling one
COPIES_MAX: Final = 1 << 16  # in one launch
LISTS_MAX: Final = 8
BLOCKS: Final = 32
THREADS: Final = 256
_MAJOR, _MINOR, _READS_HOST_POINTERS = 75, 76, 91


class NoKernel(Exception):
    """There is none; the text says why."""


def image_for(driver: Driver, ordinal: int) -> bytes:
    """The kernel as this device runs it. Raises NoKernel."""
    path = os.environ.get(IMAGE_VARIABLE)
    if path:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise NoKernel(f"{IMAGE_VARIABLE}: {error}") from None
    arch = f"sm_{driver.attribute(ordinal, _MAJOR)}{driver.attribute(ordinal, _MINOR)}"
    why = "neither cupy nor cuda-bindings is installed"
    for compiler in (_by_cupy, _by_bindings):
        try:
            return compiler(SOURCE.read_text(), arch)
        except ImportError:
            continue
        except Exception as error:  # of theirs, or of the loader where NVRTC's own library is missing
            why = f"compiling for {arch}: {error}".splitlines()[0]
    raise NoKernel(why)


def _by_cupy(source: str, arch: str) -> bytes:
    nvrtc: Any = import_module("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(source, SOURCE.name, (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}",))
        return bytes(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)


def _by_bindings(source: str, arch: str) -> bytes:
    nvrtc: Any = import_module("cuda.bindings.nvrtc")

    def checked(answer: tuple[Any, ...]) -> Any:
        if int(answer[0]):
            raise RuntimeError(str(answer[0]))
        return answer[1] if len(answer) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), SOURCE.name.encode(), 0, [], []))
    checked(nvrtc.nvrtcCompileProgram(program, 1, [f"-arch={arch}".encode()]))
    image = b" " * int(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, image))
    return image


class _List:
    """Room for the copies of one launch, which the device can read. It is never given back: it stays registered."""

    def __init__(self, driver: Driver) -> None:
        self.event = driver.event()
        self._mapping = mmap.mmap(-1, 3 * COPIES_MAX * 8)
        self.rows = np.frombuffer(self._mapping, np.uint64).reshape(3, COPIES_MAX)
        driver.pin(self.rows.ctypes.data, self.rows.nbytes)  # the last that may fail


class CopyKernel:
    """The kernel, loaded. Raises NoKernel or CudaError where that cannot be."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        if not driver.attribute(ordinal, _READS_HOST_POINTERS):
            raise NoKernel("the device does not read the host's memory by the host's addresses")
        self._driver = driver
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        image = image_for(driver, ordinal)
        driver.call("cuModuleLoadData", ctypes.byref(module), image)
        driver.call("cuModuleGetFunction", ctypes.byref(function), module, NAME)
        self._function = function
        self._idle: deque[_List] = deque()
        self._used: deque[_List] = deque()

    def copy(self, to: Pointers, source: Pointers, sizes: Pointers, stream: int) -> int:
        """Submit copies to a stream; how many, from the first on: all, unless too much of it is under way already.

        Memory of the host must be pinned. Raises CudaError.
        """
        for start in range(0, len(sizes), COPIES_MAX):
            room = self._room()
            if room is None:
                return start
            part = slice(start, start + COPIES_MAX)
            self._launch(room, (to[part], source[part], sizes[part]), stream)
        return len(sizes)

    def _launch(self, room: _List, lists: tuple[Pointers, Pointers, Pointers], stream: int) -> None:
        count = len(lists[0])
        for row, values in zip(room.rows, lists, strict=True):
            row[:count] = values
        given = [ctypes.c_uint64(row.ctypes.data) for row in room.rows] + [ctypes.c_uint64(count)]
        arguments = (ctypes.c_void_p * 4)(*(ctypes.addressof(each) for each in given))
        shape = (min(BLOCKS, count), 1, 1, THREADS, 1, 1, 0)
        self._used.append(room)
        self._driver.call("cuLaunchKernel", self._function, *shape, stream, arguments, None)
        self._driver.record(room.event, stream)

    def _room(self) -> _List | None:
        """A list that no launch reads any more; never waits, since a stream may be stuck."""
        for _ in range(len(self._used)):
            happened = self._driver.happened(self._used[0].event)  # before it is taken: this may fail
            (self._idle if happened else self._used).append(self._used.popleft())
        if self._idle:
            return self._idle.popleft()
        return _List(self._driver) if len(self._used) < LISTS_MAX else None


def loaded(driver: Driver, ordinal: int) -> tuple[CopyKernel | None, str]:
    """The kernel, or None and why there is none."""
    try:
        return CopyKernel(driver, ordinal), ""
    except (NoKernel, CudaError) as error:
        return None, str(error)
