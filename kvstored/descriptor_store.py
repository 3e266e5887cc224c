"""Descriptors that a child leaves with its supervisor, and the socket by which it does.

The other side of `kvstored.device.service_manager`, as systemd has it. Whatever is sent here,
nothing is raised, and what is held has a limit. Only the one child is listened to. Standard
library only: `kvstored --supervise` is to stay small.
"""

from __future__ import annotations

import array
import contextlib
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

MESSAGE_BYTES_MAX: Final = 4096
MESSAGE_FDS_MAX: Final = 253  # what the kernel passes in one message
NAME_BYTES_MAX: Final = 255
# All names go to the next process in one environment variable, of which the kernel takes 128 KiB.
NAMES_BYTES_MAX: Final = 120 << 10
NAME_BY_DEFAULT: Final = "stored"
DRAIN_MAX: Final = 4096  # datagrams in one go: more than any queue holds
_PREFIX: Final = "kvstored-notify-"
_SOCKET: Final = "notify"
_CREDENTIALS: Final = struct.Struct("3i")
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * MESSAGE_FDS_MAX)

Assignments = dict[str, str]


class DescriptorStore:
    """A socket in a directory of its own, and the descriptors that came through it, by name, oldest first.

    `complain` is told once of each kind of nonsense. Raises OSError where the socket cannot be made.
    """

    def __init__(self, descriptors_max: int, complain: Callable[[str], None]) -> None:
        self.descriptors_max = descriptors_max
        self.held: dict[str, int] = {}
        self._names_bytes = 0
        self._complain = complain
        self._complained: set[str] = set()
        # A directory of mode 0700: other users cannot even fill the queue.
        self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.path = self._directory / _SOCKET
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self.socket.bind(str(self.path))
        except OSError:
            self.close()
            raise
        _remove_left_behind(self._directory.parent)

    def receive(self, pid: int) -> list[Assignments]:
        """Take all that has been sent; returns what process `pid` said, less what concerns descriptors."""
        said = []
        for _ in range(DRAIN_MAX):
            try:
                text, ancillary, flags, _ = self.socket.recvmsg(
                    MESSAGE_BYTES_MAX, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except OSError as error:
                self._note(f"a message could not be received: {error.strerror}")
                continue
            fds, sender = _unpack(ancillary)
            try:
                if sender != pid:
                    self._note("a message from another process was ignored")
                elif flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    self._note("a message that is too long, or has too many descriptors, was ignored")
                else:
                    assignments = _parse(text)
                    self._act(assignments, fds)
                    said.append(assignments)
            finally:
                for fd in fds:
                    os.close(fd)
        return said

    def _act(self, assignments: Assignments, fds: list[int]) -> None:
        """Store or remove; what is stored is taken out of `fds`. A barrier is answered by closing its descriptor."""
        name = assignments.get("FDNAME", NAME_BY_DEFAULT)
        if assignments.get("FDSTOREREMOVE") == "1":
            self._remove(name)
        elif assignments.get("FDSTORE") == "1" and fds:
            if not _is_name(name):
                self._note("a descriptor whose name is no name was not stored")
            elif name not in self.held and not self._has_room(name):
                self._note("there is no room for a descriptor: it was not stored")
            else:
                self._remove(name)
                self.held[name] = fds.pop()
                self._names_bytes += len(name) + 1

    def _has_room(self, name: str) -> bool:
        return len(self.held) < self.descriptors_max and self._names_bytes + len(name) + 1 <= NAMES_BYTES_MAX

    def _remove(self, name: str) -> None:
        fd = self.held.pop(name, None)
        if fd is not None:
            os.close(fd)
            self._names_bytes -= len(name) + 1

    def _note(self, what: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            self._complain(what)

    def close(self) -> None:
        """Let go of everything."""
        for name in list(self.held):
            self._remove(name)
        self.socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _remove_left_behind(parent: Path) -> None:
    """Remove the directories of those that were killed: of ours, those with a socket that nobody has any more."""
    for path in parent.glob(f"{_PREFIX}*/{_SOCKET}"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            if path.parent.is_symlink() or path.parent.stat().st_uid != os.geteuid():
                continue
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                path.parent.rmdir()


def _unpack(ancillary: list[tuple[int, int, bytes]]) -> tuple[list[int], int]:
    """The descriptors of a message, and the process id of its sender, which the kernel vouches for."""
    fds: list[int] = []
    sender = 0
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            fds += numbers
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            with contextlib.suppress(struct.error):
                sender = _CREDENTIALS.unpack(data)[0]
    return fds, sender


def _parse(text: bytes) -> Assignments:
    lines = text.decode("utf-8", "replace").split("\n")
    return {name: value for name, equals, value in (line.partition("=") for line in lines) if equals}


def _is_name(name: str) -> bool:
    return 0 < len(name) <= NAME_BYTES_MAX and name.isascii() and name.isprintable() and ":" not in name
