"""One child process that is given descriptors, and what its parent must see to. Standard library only.

The parent has a single thread, so it may fork. What was stored for the child lies at descriptors
3, 4, ... when it starts (sd_listen_fds(3)), and it dies with its parent, even by SIGKILL.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

FIRST_FD: Final = 3
EXIT_NOT_STARTED: Final = 1  # as a daemon that failed: the program may be there again in a moment
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc: Final = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Have this process be the parent of those whose parent dies: it can then see them dead."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(command: Sequence[str], environ: Mapping[str, str], held: Mapping[str, int], *, quiet: bool = False) -> int:
    """Start a program with descriptors by name; returns its process id.

    It gets LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES, and a process group of its own: what a terminal
    sends comes through its parent only. One that cannot be started ends with EXIT_NOT_STARTED. `quiet`: what it
    says on standard output is not wanted.
    """
    parent = os.getpid()
    # A signal between fork and exec would otherwise reach the parent's handlers, in the child.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become(command, environ, held, parent, quiet=quiet)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become(
    command: Sequence[str], environ: Mapping[str, str], held: Mapping[str, int], parent: int, *, quiet: bool
) -> NoReturn:
    try:
        if quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
        for number in signal.valid_signals():
            with suppress(OSError, ValueError):  # SIGKILL, SIGSTOP
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(EXIT_NOT_STARTED)  # it died before it could be noticed
        mine = dict(environ)
        if held:
            _line_up(list(held.values()))
            mine["LISTEN_PID"] = str(os.getpid())
            mine["LISTEN_FDS"] = str(len(held))
            mine["LISTEN_FDNAMES"] = ":".join(held)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvpe(command[0], list(command), mine)
    except BaseException as error:
        os.write(2, f"kvstored: cannot start {command[0]}: {error}\n".encode())
    finally:
        os._exit(EXIT_NOT_STARTED)


def _line_up(fds: list[int]) -> None:
    """Put descriptors at FIRST_FD and on, open across exec. Whatever lay there is lost, so those among them move."""
    end = FIRST_FD + len(fds)
    at = {fd: place for place, fd in enumerate(fds)}
    for place, target in enumerate(range(FIRST_FD, end)):
        fd = fds[place]
        if fd == target:
            os.set_inheritable(fd, True)
            continue
        waiting = at.get(target)
        if waiting is not None:
            moved = fcntl.fcntl(target, fcntl.F_DUPFD_CLOEXEC, end)
            fds[waiting] = moved
            at[moved] = waiting
        os.dup2(fd, target)
        if fd >= end:
            os.close(fd)


def reap() -> tuple[dict[int, int], bool]:
    """Collect children that have ended: exit status by process id (a signal's negative), and whether any are left."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended[pid] = os.waitstatus_to_exitcode(status)


def has_ended(pid: int) -> bool:
    """Whether a child has ended; it can still be collected."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_children() -> None:
    """Kill every child of this process."""
    me = os.getpid()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile
            # pid (name) state parent ...: and the name is the process's to choose.
            _, _, rest = (process / "stat").read_text(errors="replace").rpartition(")")
            if int(rest.split()[1]) == me:
                os.kill(int(process.name), signal.SIGKILL)
