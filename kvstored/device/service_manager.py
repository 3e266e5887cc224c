"""What a process and its service manager say to each other: notifications, and descriptors kept over a restart.

The protocol is systemd's (sd_notify(3), sd_pid_notify_with_fds(3), sd_listen_fds(3));
`kvstored --supervise` speaks the other side of it. All of it comes by the environment, and where
there is none of it, nobody is told and nothing is kept.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Final

import msgspec

from kvstored.device.keeper import Keeper, NoKeeper

FIRST_FD: Final = 3
UNNAMED: Final = "unknown"
NAME_BYTES_MAX: Final = 255
# The next process gets all names in one environment variable, of which the kernel takes 128 KiB: with
# more it could not be started at all.
NAMES_BYTES_MAX: Final = 120 << 10
ANSWER_S: Final = 5.0  # a manager that takes longer does not keep anything
_USEC_PER_S: Final = 1_000_000


class NotifySocket:
    """The way to the service manager. May be used by several threads."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        whole_s, rest_s = divmod(ANSWER_S, 1)
        timeval = struct.pack("@ll", int(whole_s), int(rest_s * _USEC_PER_S))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def send(self, *assignments: str, fds: Sequence[int] = (), wait: bool = False) -> bool:
        """Send one message of `NAME=value` lines; False: not sent. `wait` for the manager, up to `ANSWER_S`."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
        try:
            self._socket.sendmsg(["\n".join(assignments).encode()], ancillary, flags, self._address)
        except OSError:
            return False
        return True

    def barrier(self) -> bool:
        """Wait until the manager has taken all that was sent before; False: it has not in `ANSWER_S`."""
        mine, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            sent = self.send("BARRIER=1", fds=[theirs], wait=True)
            os.close(theirs)
            theirs = -1
            answer = select.poll()
            answer.register(mine, 0)  # the other end closed: that is all there is to see
            return sent and bool(answer.poll(ANSWER_S * 1000))
        finally:
            for fd in (mine, theirs):
                if fd >= 0:
                    os.close(fd)

    def close(self) -> None:
        """Tell nothing any more."""
        self._socket.close()


class NotifyKeeper:
    """A `Keeper`: the service manager's descriptor store. May be used by several threads."""

    def __init__(self, notify: NotifySocket, inherited: Mapping[str, int], descriptors_max: int | None) -> None:
        self._notify = notify
        self._inherited = dict(inherited)
        self._kept = set(inherited)
        self._kept_bytes = sum(len(name) + 1 for name in inherited)
        self._descriptors_max = descriptors_max
        self._to_drop: deque[str] = deque()
        self._lock = threading.Lock()

    def inherited(self) -> dict[str, int]:
        """Descriptors that an earlier process left, by name; the caller owns them from then on, and asks once."""
        given, self._inherited = self._inherited, {}
        return given

    def keep(self, name: str, fd: int) -> bool:
        """Have a descriptor kept; returns when it is. False: it is not.

        It takes the place of one of the same name. Blocks for a round trip, some times `ANSWER_S` where the
        manager is stuck: for threads.
        """
        assert _is_name(name), "it would be stored under another name"
        if name in self._kept:
            self.drop(name)
        if not self._note(name):
            return False
        self._send_drops(wait=True)
        # Memory cannot be polled; and what is kept is not the manager's to drop.
        stored = ("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0")
        if self._notify.send(*stored, fds=[fd], wait=True) and self._notify.barrier():
            return True
        self.drop(name)
        return False

    def drop(self, name: str) -> None:
        """Have a descriptor kept no longer; one that was not is fine. Does not block."""
        with self._lock:
            if name in self._kept:
                self._kept.remove(name)
                self._kept_bytes -= len(name) + 1
        self._to_drop.append(name)
        self._send_drops()

    def _note(self, name: str) -> bool:
        """Count a name in; False: there is no room for it."""
        with self._lock:
            full = self._descriptors_max is not None and len(self._kept) >= self._descriptors_max
            if full or self._kept_bytes + len(name) + 1 > NAMES_BYTES_MAX:
                return False
            self._kept.add(name)
            self._kept_bytes += len(name) + 1
            return True

    def _send_drops(self, *, wait: bool = False) -> None:
        """Drops that the manager had no time for are sent with the next call: one lost would hold memory for good."""
        with contextlib.suppress(IndexError):  # none left
            while True:
                name = self._to_drop.popleft()
                if not self._notify.send("FDSTOREREMOVE=1", f"FDNAME={name}", wait=wait):
                    self._to_drop.appendleft(name)
                    return


class ServiceManager(msgspec.Struct, frozen=True):
    """What the environment says about who started this process."""

    keeper: Keeper
    notify: NotifySocket | None
    watchdog_s: float  # the longest silence that is put up with; 0: any


def from_environment(environ: MutableMapping[str, str], first_fd: int = FIRST_FD) -> ServiceManager:
    """Who started this process; to be asked once, early: no child is to see any of it.

    The variables are taken away, inherited descriptors are closed on exec. What makes no sense counts as absent.
    """
    inherited = _take_inherited(environ, first_fd)
    address = environ.pop("NOTIFY_SOCKET", "")
    descriptors_max = _number(environ.pop("FDSTORE", ""))  # systemd 254, and `kvstored --supervise`
    watchdog_usec = _number(environ.pop("WATCHDOG_USEC", "")) or 0
    if environ.pop("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        watchdog_usec = 0
    if not address.startswith(("/", "@")):
        for fd in inherited.values():  # nobody could be told to let go of them
            os.close(fd)
        return ServiceManager(NoKeeper(), None, 0.0)
    notify = NotifySocket(address)
    return ServiceManager(NotifyKeeper(notify, inherited, descriptors_max), notify, watchdog_usec / _USEC_PER_S)


def _take_inherited(environ: MutableMapping[str, str], first_fd: int) -> dict[str, int]:
    pid, count = _number(environ.pop("LISTEN_PID", "")), _number(environ.pop("LISTEN_FDS", ""))
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != os.getpid() or not count:
        return {}
    found: dict[str, int] = {}
    for index, fd in enumerate(range(first_fd, first_fd + count)):
        with contextlib.suppress(OSError):  # not open: there are fewer than was said
            os.set_inheritable(fd, False)
            name = (names[index] if index < len(names) else "") or UNNAMED
            earlier = found.pop(name, None)
            if earlier is not None:
                os.close(earlier)
            found[name] = fd
    return found


def _is_name(text: str) -> bool:
    return 0 < len(text) <= NAME_BYTES_MAX and text.isascii() and text.isprintable() and ":" not in text


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None
