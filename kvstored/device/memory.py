"""Shared memory: the only code that makes, maps, seals, locks, copies and hashes it.

A `Mapping` is a memfd mapped read-write into this process. Its descriptor can be handed to
clients, so it is sealed against a change of size (a client's `ftruncate` would otherwise kill
the daemon by SIGBUS) and its mode keeps other uids from opening it again through /proc.

Addresses are plain integers. Whoever passes one vouches for the bytes behind it: a wrong or
unmapped address ends the process. Copies and hashes release the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import xxhash

from kvstored.errors import DeviceError
from kvstored.keys import slot_bytes

CONTENT_HASH_BYTES: Final = 16
PAGE_BYTES: Final = mmap.PAGESIZE
HUGE_PAGE_BYTES: Final = 2 << 20
# What is copied and then hashed before the next piece: small enough to be in cache still.
PIECE_BYTES: Final = 512 << 10

# Modes of the file behind a mapping. Nobody but its owner can open it again through /proc.
MODE_CLIENTS_READ: Final = 0o400
MODE_CLIENTS_WRITE: Final = 0o600

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL: Final = 8  # Linux 6.3; demanded where vm.memfd_noexec is 2
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MADV_COLLAPSE: Final = 25  # Linux 6.1
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_RESERVE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_FALLOC_PUNCH_HOLE: Final = 3  # with FALLOC_FL_KEEP_SIZE, which it needs
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_POPULATE_STEP_BYTES: Final = 32 << 20
_SHMEM_HUGE: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_MEMINFO: Final = Path("/proc/meminfo")

_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mlock = _libc.mlock
_mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_fallocate = _libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class Mapping:
    """A sealed memfd, mapped read-write here.

    `huge_pages` asks for 2 MiB pages: from the reserved pool, else transparent ones (which come with
    `populate`), else it makes do with 4 KiB; `pages` says which. Raises DeviceError where the
    kernel refuses the memory itself.
    """

    def __init__(self, size_bytes: int, *, name: str, mode: int = MODE_CLIENTS_READ, huge_pages: bool = False) -> None:
        assert size_bytes > 0, "an empty mapping is of no use"
        assert size_bytes % PAGE_BYTES == 0, "memory is mapped by pages"
        self.size_bytes = size_bytes
        self.address = 0
        self.fd = -1
        self.pages = "4k"
        self._wants_huge_pages = huge_pages
        try:
            if not (huge_pages and size_bytes % HUGE_PAGE_BYTES == 0 and self._map_reserved_pages(name)):
                self._map(name, 0)
                if (
                    huge_pages
                    and not _madvise(self.address, size_bytes, _MADV_HUGEPAGE)
                    and _transparent_pages_allowed()
                ):
                    self.pages = "thp"
            os.fchmod(self.fd, mode)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            self.close()
            raise DeviceError(f"making {size_bytes} bytes of shared memory ({name}): {error.strerror}") from error

    def _map(self, name: str, flags: int) -> None:
        self.fd = _memfd(name, flags)
        os.ftruncate(self.fd, self.size_bytes)
        # Not the mmap module: it keeps a duplicate of the descriptor, and those are scarce.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if flags & os.MFD_HUGETLB:
            self.address = _map_at(None, self.size_bytes, protection, mmap.MAP_SHARED, self.fd)
        else:
            self._map_aligned(protection)

    def _map_aligned(self, protection: int) -> None:
        """Map to a multiple of 2 MiB: the kernel does that only where the system's setting asks for huge pages."""
        start = _map_at(None, self.size_bytes + HUGE_PAGE_BYTES, _PROT_NONE, _RESERVE, -1)
        address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end, reserved_end = address + self.size_bytes, start + self.size_bytes + HUGE_PAGE_BYTES
        for first, last in ((start, address), (end, reserved_end)):
            if last > first:
                _munmap(first, last - first)
        # Where this fails, what was reserved stays so: the kernel may have unmapped it before it failed,
        # another thread's memory may lie there by now, and to unmap it would be to take that away.
        _map_at(address, self.size_bytes, protection, mmap.MAP_SHARED | _MAP_FIXED, self.fd)
        self.address = address

    def _map_reserved_pages(self, name: str) -> bool:
        try:
            # The kernel reserves the pages in mmap: it fails there, not at first touch.
            self._map(name, os.MFD_HUGETLB)
        except OSError:
            self.close()
            return False
        self.pages = "hugetlb"
        return True

    def close(self) -> None:
        """Unmap and close; harmless when repeated. Nothing may use the address any more."""
        address, fd = self.address, self.fd
        self.address, self.fd = 0, -1
        if address and _munmap(address, self.size_bytes):
            raise DeviceError(f"unmapping shared memory: {_os_error().strerror}")
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # A mapping is no object of the interpreter: forgotten, it would stay for good.
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def read_only_fd(self) -> int:
        """A new descriptor through which the memory can be mapped for reading only; the caller closes it."""
        try:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(f"opening shared memory read-only: {error.strerror}") from error

    def populate(self) -> None:
        """Give every page its memory now; keeps what is there.

        About 0.07 CPU seconds per GiB of huge pages, 1 of 4 KiB pages. Raises DeviceError.
        """
        whole = self.size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if self.pages == "hugetlb" or not self._wants_huge_pages or not self._collapse(whole):
            whole = 0
        if whole:
            self.pages = "thp"
        for offset in range(whole, self.size_bytes, _POPULATE_STEP_BYTES):
            self._populate(offset, min(_POPULATE_STEP_BYTES, self.size_bytes - offset))

    def _collapse(self, size: int) -> bool:
        """Make huge pages of the first `size` bytes, whatever the system's setting; False where the kernel does not.

        One small page in each is given memory first: the kernel makes no huge page out of nothing.
        Linux 6.1 has this for shared memory. It spares the administrator a setting, and the start most of its time.
        """
        for offset in range(0, size, HUGE_PAGE_BYTES):
            self._populate(offset, PAGE_BYTES)
            if _madvise(self.address + offset, HUGE_PAGE_BYTES, _MADV_COLLAPSE):
                return False
        return size > 0

    def _populate(self, offset: int, size: int) -> None:
        if _madvise(self.address + offset, size, _MADV_POPULATE_WRITE):
            error = _os_error()
            if error.errno != errno.EINVAL:
                raise DeviceError(f"populating shared memory: {error.strerror}")
            self._allocate(offset, size)

    def _allocate(self, offset: int, size: int) -> None:
        # Kernels before 5.14: the pages come into being, only this process's page table stays empty.
        try:
            os.posix_fallocate(self.fd, offset, size)
        except OSError as error:
            raise DeviceError(f"allocating shared memory: {error.strerror}") from error

    def lock(self) -> bool:
        """Keep the memory from being swapped; False where the limit on locked memory forbids it."""
        return not _mlock(self.address, self.size_bytes)

    def punch(self) -> None:
        """Give the memory back to the kernel, in every process that maps it; it reads as zeros then."""
        if _fallocate(self.fd, _FALLOC_PUNCH_HOLE, 0, self.size_bytes):
            raise DeviceError(f"punching shared memory: {_os_error().strerror}")

    def zero(self, offset: int = 0, size: int | None = None) -> None:
        """Overwrite bytes with zeros; all of them by default."""
        size = self.size_bytes - offset if size is None else size
        assert offset >= 0, "inside of the mapping"
        assert size >= 0, "inside of the mapping"
        assert offset + size <= self.size_bytes, "inside of the mapping"
        ctypes.memset(self.address + offset, 0, size)

    def view(self) -> memoryview:
        """All of it as a writable buffer, to be released before `close`."""
        return view(self.address, self.size_bytes, writable=True)


def view(address: int, size: int, *, writable: bool = False) -> memoryview:
    """A buffer over bytes at an address; it must not outlive them."""
    made: memoryview = _memory_view(address, size, 0x200 if writable else 0x100)
    return made


def copy(dst: int, src: int, size: int) -> None:
    """Copy bytes between two addresses."""
    ctypes.memmove(dst, src, size)


def hash_bytes(address: int, size: int) -> bytes:
    """The content hash of the bytes at an address: xxh3-128, 16 bytes."""
    return xxhash.xxh3_128_digest(_memory_view(address, size, 0x100))


def copy_and_hash(dst: int, src: int, size: int) -> bytes:
    """Copy a block into its slot, zero the slot's rest up to 4 KiB, and return the content hash.

    What is hashed is the destination, after the copy: the source may be written by a client
    meanwhile, and its hash could bless bytes that were never stored. Piece by piece, so that
    hashing finds the bytes in cache.
    """
    if size <= PIECE_BYTES:
        ctypes.memmove(dst, src, size)
        content_hash = hash_bytes(dst, size)
    else:
        content_hash = _copy_and_hash_pieces(dst, src, size)
    pad = slot_bytes(size) - size
    if pad:
        ctypes.memset(dst + size, 0, pad)
    return content_hash


def _copy_and_hash_pieces(dst: int, src: int, size: int) -> bytes:
    state = xxhash.xxh3_128()
    for offset in range(0, size, PIECE_BYTES):
        piece = min(PIECE_BYTES, size - offset)
        ctypes.memmove(dst + offset, src + offset, piece)
        state.update(_memory_view(dst + offset, piece, 0x100))
    return state.digest()


def copy_and_hash_many(copies: Iterable[tuple[int, int, int]]) -> list[bytes]:
    """`copy_and_hash` for each (dst, src, size): one thread call for a whole batch."""
    return [copy_and_hash(dst, src, size) for dst, src, size in copies]


def hash_many(blocks: Iterable[tuple[int, int]]) -> list[bytes]:
    """`hash_bytes` for each (address, size): one thread call for a whole batch."""
    return [hash_bytes(address, size) for address, size in blocks]


def zero_many(places: Iterable[tuple[int, int]]) -> None:
    """Overwrite each (address, size) with zeros: one thread call for a whole batch."""
    for address, size in places:
        ctypes.memset(address, 0, size)


def descriptors_max() -> int:
    """How many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def available_bytes() -> int:
    """Memory that can be had without swapping, reserved huge pages included."""
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    figures = {words[0]: int(words[1]) for words in lines}
    reserved_kib = figures.get("HugePages_Free:", 0) * figures.get("Hugepagesize:", 0)
    return (figures["MemAvailable:"] + reserved_kib) << 10


def _memfd(name: str, flags: int) -> int:
    flags |= os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _map_at(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    mapped = _mmap(address, size, protection, flags, fd, 0)
    if mapped == _MAP_FAILED:
        raise _os_error()
    return int(mapped)


def _transparent_pages_allowed() -> bool:
    try:
        setting = _SHMEM_HUGE.read_text()
    except OSError:
        return False
    return any(f"[{choice}]" in setting for choice in ("always", "within_size", "advise", "force"))


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
