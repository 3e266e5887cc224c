"""Runs: neighbouring blocks that one system call moves, and the moving, which happens in threads."""

from __future__ import annotations

import enum
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvstored.device.buffer import ALIGN_BYTES, AlignedBuffer
from kvstored.device.file import PIECES_PER_CALL_MAX, CutShort, FileDevice, Piece
from kvstored.device.handles import OpenFiles
from kvstored.device.memory import hash_bytes, zero_many
from kvstored.errors import DeviceError
from kvstored.keys import slot_bytes
from kvstored.tiers.scratch import Scratch
from kvstored.tiers.sealing import TAG_BYTES, Lock, open_into, seal_into

RUN_BYTES_MIN: Final = 1 << 20
ZERO_BYTES: Final = 1 << 20  # of zeros in memory, written again and again


class Read(enum.Enum):
    """What became of reading one block."""

    OK = "ok"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"


class Block(NamedTuple):
    """Where one block lies on the volume and in memory; `position` is its place in the caller's batch."""

    extent: int
    offset: int
    address: int
    size_bytes: int
    content_hash: bytes
    position: int
    lock: Lock | None = None  # how it is encrypted there, if it is


class Run(msgspec.Struct):
    """Blocks that lie one behind the other in one extent."""

    extent: int
    offset: int
    blocks: list[Block]
    bytes: int = 0  # of all its blocks, whoever made it

    def __post_init__(self) -> None:
        self.bytes = sum(slot_bytes(block.size_bytes) for block in self.blocks)

    def add(self, block: Block) -> None:
        """One more block at its end."""
        self.blocks.append(block)
        self.bytes += slot_bytes(block.size_bytes)

    @property
    def sealed(self) -> bool:
        """Whether it is encrypted; an extent's blocks are all or none."""
        return self.blocks[0].lock is not None

    def pieces(self) -> list[Piece]:
        """Memory to move, in the order of offsets."""
        return [(block.address, slot_bytes(block.size_bytes)) for block in self.blocks]


def cut(blocks: Iterable[Block], run_bytes: int, threads: int) -> list[Run]:
    """Cut a batch into runs of about `run_bytes`, smaller ones where there is too little for every thread."""
    ordered = sorted(blocks)
    total = sum(slot_bytes(block.size_bytes) for block in ordered)
    limit = min(run_bytes, max(RUN_BYTES_MIN, -(-total // threads)))
    runs: list[Run] = []
    for block in ordered:
        size = slot_bytes(block.size_bytes)
        run = runs[-1] if runs else None
        if run is None or not _joins(run, block, limit - size):
            run = Run(block.extent, block.offset, [])
            runs.append(run)
        run.add(block)
    return runs


def _joins(run: Run, block: Block, limit: int) -> bool:
    follows = block.extent == run.extent and block.offset == run.offset + run.bytes
    return follows and run.bytes <= limit and len(run.blocks) < PIECES_PER_CALL_MAX


class Mover:
    """Moves runs between a volume's extents and memory; its methods block."""

    def __init__(self, device: FileDevice, files: OpenFiles, directory: Path) -> None:
        self._device = device
        self._files = files
        self._directory = directory
        self._syncing: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._lost: set[int] = set()  # extents of which a sync failed
        self._scratch = Scratch()

    def path(self, extent: int) -> Path:
        """The file of an extent."""
        return self._directory / f"{extent:08d}.ext"

    def read(self, run: Run) -> list[Read]:
        """Read a run, decrypt it where it is encrypted, and check the content hash of each of its blocks."""
        try:
            if run.sealed:
                return self._read_sealed(run)
            with self._files.use(self.path(run.extent), make=False) as file:
                self._device.read(file, run.offset, run.pieces())
        except DeviceError as error:
            if len(run.blocks) == 1:  # a file that is too short is no fault of the device's
                return [Read.CORRUPT if isinstance(error, CutShort) else Read.UNREADABLE]
            return [self.read(Run(b.extent, b.offset, [b]))[0] for b in run.blocks]
        return [_check(block) for block in run.blocks]

    def _read_sealed(self, run: Run) -> list[Read]:
        with self._scratch.borrow(run.bytes + TAG_BYTES) as address:
            with self._files.use(self.path(run.extent), make=False) as file:
                self._device.read(file, run.offset, [(address, run.bytes)])
            return unseal(run.blocks, address - run.offset)

    def write(self, run: Run) -> list[bytes]:
        """Write a run, encrypted where it has locks; raises DeviceError. Durable after `sync`.

        Returns the seals of its blocks, empty ones where they are not encrypted.
        """
        if run.sealed:
            with self._scratch.borrow(run.bytes + TAG_BYTES) as address:
                seals = seal(run.blocks, address - run.offset)
                with self._files.use(self.path(run.extent)) as file:
                    self._device.write(file, run.offset, [(address, run.bytes)])
                return seals
        with self._files.use(self.path(run.extent)) as file:
            self._device.write(file, run.offset, run.pieces())
        return [b""] * len(run.blocks)

    def sync(self, extent: int) -> None:
        """Make an extent's bytes durable; raises DeviceError.

        Where it fails once it fails again, until `forgive`: what the kernel could not write counts as clean from
        then on, and a later sync would succeed for other callers' blocks that never reach the device.
        """
        with self._syncing[extent], self._files.use(self.path(extent)) as file:
            if extent in self._lost:
                raise DeviceError(f"syncing {file.path}: an earlier sync failed")
            try:
                self._device.sync(file)
            except DeviceError:
                self._lost.add(extent)
                raise

    def zero(self, extent: int, start: int, end: int) -> int:
        """Overwrite a range with zeros, durably, as far as the file reaches; returns the bytes. Raises DeviceError.

        Overwritten, not punched: a hole would make the next writes as slow as the first ones, and leaves the old
        bytes to the device.
        """
        if not self._device.exists(self.path(extent)):
            return 0
        zeros = AlignedBuffer(ZERO_BYTES)
        try:
            with self._files.use(self.path(extent), make=False) as file:
                end = min(end, self._device.size_bytes(file))
                for offset in range(start, end, ZERO_BYTES):
                    size = min(ZERO_BYTES, -(-(end - offset) // ALIGN_BYTES) * ALIGN_BYTES)
                    self._device.write(file, offset, [(zeros.address, size)])
            if end > start:
                self.sync(extent)
        finally:
            zeros.close()
        return max(0, end - start)

    def forgive(self, extent: int) -> None:
        """Nothing that was written to the extent before is needed any more."""
        self._lost.discard(extent)

    def read_at(self, extent: int, offset: int, size_bytes: int) -> bytes:
        """Bytes of the tier's own; empty where the file ends before them. Raises DeviceError."""
        with self._files.use(self.path(extent)) as file:
            if self._device.size_bytes(file) < offset + size_bytes:
                return b""
            return self._device.read_bytes(file, offset, size_bytes)

    def write_at(self, extent: int, offset: int, data: bytes) -> None:
        """Write bytes of the tier's own, durably; raises DeviceError."""
        with self._files.use(self.path(extent)) as file:
            self._device.write_bytes(file, offset, data)
            self._device.sync(file)


def _check(block: Block) -> Read:
    return Read.OK if hash_bytes(block.address, block.size_bytes) == block.content_hash else Read.CORRUPT


def unseal(blocks: Sequence[Block], base: int) -> list[Read]:
    """Decrypt blocks that were read to `base` plus their offsets, and check them.

    The last one first: a tag is put behind each, where the next one lay.
    """
    found: list[Read] = []
    for block in reversed(blocks):
        assert block.lock is not None, "all of a run are encrypted"
        good = open_into(block.lock, base + block.offset, block.size_bytes, block.address)
        zero_many([(block.address + block.size_bytes, slot_bytes(block.size_bytes) - block.size_bytes)])
        found.append(_check(block) if good else Read.CORRUPT)
    return found[::-1]


def seal(blocks: Sequence[Block], base: int) -> list[bytes]:
    """Encrypt blocks to `base` plus their offsets, zeros up to 4 KiB; the seals. The first one first, as above."""
    seals: list[bytes] = []
    for block in blocks:
        assert block.lock is not None, "all of a run are encrypted"
        at = base + block.offset
        seals.append(seal_into(block.lock, block.address, block.size_bytes, at))
        zero_many([(at + block.size_bytes, slot_bytes(block.size_bytes) - block.size_bytes)])
    return seals
