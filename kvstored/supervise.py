"""`kvstored --supervise`: a small parent that keeps the daemon's memory over its restarts, where there is no systemd.

It starts the daemon, keeps the descriptors that the daemon stores with it, and starts it again
with them when it dies. Nothing that the daemon does may end it, so it does next to nothing:
one thread, one loop, standard library only.

    SIGTERM, SIGINT    passed on; when the daemon has ended, so does this
    SIGHUP             restart in order: what is installed by then is started, and adopts; first it
                       must accept its configuration, or the daemon goes on as it is
    SIGKILL            takes the daemon along
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from kvstored import offspring
from kvstored.descriptor_store import DescriptorStore

EXIT_FAILED: Final = 1  # what the daemon ends with where another try may help
EXIT_CONFIG: Final = 78  # where one helps only when somebody has mended the configuration, or the machine
MENDED_S: Final = 30.0  # so long until that is tried, while there is memory to lose
DESCRIPTORS_MAX: Final = 8320  # two for each of 4,096 segments, and some
DESCRIPTORS_OWN: Final = 64  # what this process needs itself
WATCHDOG_S: Final = 30.0
VERBS: Final = ("serve", "check-config")
# What a parent further up said to this process is not for the daemon.
_NOT_PASSED_ON: Final = frozenset(
    {"NOTIFY_SOCKET", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "FDSTORE", "WATCHDOG_USEC", "WATCHDOG_PID"}
)


class Restarts:
    """How soon a daemon that died is started again: at once, then later and later, then not any more."""

    def __init__(
        self, most: int = 10, within_s: float = 120.0, first_delay_s: float = 0.1, longest_delay_s: float = 10.0
    ) -> None:
        self._most = most
        self._within_s = within_s
        self._first_delay_s = first_delay_s
        self._longest_delay_s = longest_delay_s
        self._at: deque[float] = deque()

    def delay_s(self, now_s: float) -> float | None:
        """It died now: seconds until it is to be started; None: it died too often."""
        while self._at and self._at[0] <= now_s - self._within_s:
            self._at.popleft()
        if len(self._at) >= self._most:
            return None
        self._at.append(now_s)
        before = len(self._at) - 1
        return min(self._first_delay_s * 2.0 ** (before - 1), self._longest_delay_s) if before else 0.0


class Child(NamedTuple):
    """The daemon that runs."""

    pid: int
    ready: bool = False
    last_sign_s: float = 0.0  # when it last said that its loop turns
    told_to_end: bool = False


class Supervisor:
    """One daemon, started again and again. `run` once, in the main thread of a process with no other."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        check: Sequence[str] = (),
        restarts: Restarts | None = None,
        watchdog_s: float = WATCHDOG_S,
        descriptors_max: int = DESCRIPTORS_MAX,
    ) -> None:
        self._command = command
        self._check = check
        self._check_pid = 0  # the check that runs
        self._restarts = restarts or Restarts()
        self._watchdog_s = watchdog_s
        self._store = DescriptorStore(min(descriptors_max, _raise_limit() - DESCRIPTORS_OWN), self._complain)
        self._environ = self._environment(os.environ)
        self._child: Child | None = None
        self._orphans = False
        self._start_at_s: float | None = 0.0
        self._stopping = False
        self._again = False  # asked to restart it
        self._status = 0
        self._signals, self._signals_writer = socket.socketpair()

    def run(self) -> int:
        """Until the daemon has ended for good; returns its exit status (128 + n: killed by signal n)."""
        offspring.adopt_orphans()
        self._catch_signals()
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            selector.register(self._store.socket, selectors.EVENT_READ)
            while self._child is not None or self._orphans or self._start_at_s is not None:
                self._start_if_due()
                selector.select(self._patience_s())
                self._hear()
                self._on_signals()  # first: who ends after it wakes the next turn
                self._collect()
                self._look_at_watchdog()
        self._store.close()
        return self._status

    def _environment(self, given: Mapping[str, str]) -> dict[str, str]:
        return {
            **{name: value for name, value in given.items() if name not in _NOT_PASSED_ON},
            "NOTIFY_SOCKET": str(self._store.path),
            "FDSTORE": str(self._store.descriptors_max),
            "WATCHDOG_USEC": str(int(self._watchdog_s * 1_000_000)),
        }

    # ---- the daemon's life ----

    def _start_if_due(self) -> None:
        if self._child is not None or self._orphans or self._start_at_s is None or self._start_at_s > time.monotonic():
            return
        self._start_at_s = None
        try:
            self._child = Child(offspring.start(self._command, self._environ, self._store.held))
        except OSError as error:  # the system has no process left
            _say("error", "daemon cannot be started", reason=str(error))
            self._start_later()
            return
        _say("info", "daemon started", pid=self._child.pid, descriptors=len(self._store.held))

    def _collect(self) -> None:
        """Take note of who has ended. Nothing of the daemon may run any more when the next one starts."""
        child = self._child
        if child is not None and offspring.has_ended(child.pid):
            self._hear()  # what it said last, while nobody else can have its process id
        ended, left = offspring.reap()
        if child is not None and child.pid in ended:
            self._child = None
            self._ended(child, ended[child.pid])
        if self._check_pid in ended:
            self._checked(ended[self._check_pid])
        orphans = left and self._child is None
        if orphans and not self._orphans:
            _say("warning", "daemon left processes behind, killing them")
        self._orphans = orphans
        if orphans:
            offspring.kill_children()

    def _ended(self, child: Child, code: int) -> None:
        # What it was told to end by is an orderly end, however early in its life that was.
        in_order = child.told_to_end and -code in (signal.SIGTERM, signal.SIGINT)
        self._status = 0 if in_order else code if code >= 0 else 128 - code
        what = {"pid": child.pid, "status": code} if code >= 0 else {"pid": child.pid, "signal": -code}
        again, self._again = self._again, False
        if self._stopping:
            _say("info", "daemon ended", **what)
        elif again:
            _say("info", "daemon ended, starting it again", **what)
            self._start_at_s = 0.0
        elif code < 0 or code == EXIT_FAILED:
            _say("error", "daemon died", **what)
            self._start_later()
        elif code == EXIT_CONFIG and self._store.held:  # one ran before; to end now would cost all that was kept
            _say("error", "daemon refused its configuration: mend it; SIGHUP tries at once", **what)
            self._start_at_s = time.monotonic() + MENDED_S
        else:
            _say("info", "daemon ended", **what)

    def _start_later(self) -> None:
        delay_s = self._restarts.delay_s(time.monotonic())
        if delay_s is None:
            _say("error", "daemon died too often, giving up")
            self._status = self._status or EXIT_FAILED
            return
        _say("info", "daemon will be started", delay_s=delay_s)
        self._start_at_s = time.monotonic() + delay_s

    # ---- what it hears ----

    def _hear(self) -> None:
        said = self._store.receive(self._child.pid if self._child is not None else -1)
        for assignments in said:
            if self._child is not None and ("READY" in assignments or "WATCHDOG" in assignments):
                ready = self._child.ready or assignments.get("READY") == "1"
                self._child = self._child._replace(ready=ready, last_sign_s=time.monotonic())

    def _look_at_watchdog(self) -> None:
        if self._watchdog_left_s() <= 0 and self._child is not None:
            _say("error", "daemon is stuck, killing it", pid=self._child.pid, silent_s=self._watchdog_s)
            self._child = self._child._replace(ready=False)
            self._send(signal.SIGKILL)

    def _watchdog_left_s(self) -> float:
        child = self._child
        if child is None or not child.ready or child.told_to_end:
            return self._watchdog_s
        return child.last_sign_s + self._watchdog_s - time.monotonic()

    def _patience_s(self) -> float:
        waits = [self._watchdog_left_s()]
        if self._child is None and self._start_at_s is not None and not self._orphans:
            waits.append(self._start_at_s - time.monotonic())
        return max(0.0, min(waits))

    def _complain(self, what: str) -> None:
        _say("warning", "daemon and descriptors", what=what)

    # ---- signals ----

    def _catch_signals(self) -> None:
        for end in (self._signals, self._signals_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._signals_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # its number comes through the socket

    def _on_signals(self) -> None:
        with suppress(BlockingIOError):
            for number in self._signals.recv(4096):
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._stop(number)
                elif number == signal.SIGHUP:
                    self._ask_for_restart()

    def _stop(self, number: int) -> None:
        first, self._stopping = not self._stopping, True
        self._start_at_s = None
        _say("info", "stopping", signal=number)
        # One that is on its way out because of a restart has been told: twice would mean to hurry.
        if self._child is not None and not (first and self._child.told_to_end):
            self._send(number)
            self._child = self._child._replace(told_to_end=True)

    def _ask_for_restart(self) -> None:
        """A daemon that runs is not ended for one that would not start, which would cost its memory too."""
        if self._stopping or self._check_pid:
            return
        if self._child is None or self._child.told_to_end or not self._check:
            self._restart()
            return
        try:
            self._check_pid = offspring.start(self._check, self._environ, {}, quiet=True)
        except OSError as error:
            _say("error", "restart refused, the daemon goes on: no check could be started", reason=str(error))

    def _checked(self, code: int) -> None:
        self._check_pid = 0
        if code == 0 or (self._child is None and self._start_at_s is not None):  # it ended, and the check with it
            self._restart()
        elif self._child is not None:
            _say("error", "restart refused, the daemon goes on: see what check-config says", status=code)

    def _restart(self) -> None:
        if self._stopping:
            return
        if self._child is None:
            self._start_at_s = 0.0
        elif not self._child.told_to_end:
            self._again = True
            self._send(signal.SIGTERM)
            self._child = self._child._replace(told_to_end=True)

    def _send(self, number: int) -> None:
        assert self._child is not None, "its process id may be another's by now"
        with suppress(ProcessLookupError):
            os.kill(self._child.pid, number)


def _raise_limit() -> int:
    """As many descriptors as are allowed; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def _say(level: str, event: str, **fields: object) -> None:
    """One line, as the daemon's log has them. A reader that has gone is no reason to end."""
    now_s = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s)) + f".{int(now_s % 1 * 1e6):06}Z"
    line = json.dumps({**fields, "event": event, "level": level, "logger": "supervise", "timestamp": stamp})
    with suppress(OSError):
        os.write(2, line.encode() + b"\n")


def replace_this_process(options: Sequence[str]) -> None:
    """Be the supervisor of `kvstored serve OPTIONS`: in a fresh image, for what is loaded here would stay loaded."""
    command = [sys.executable, "-P", "-m", "kvstored.supervise", *options]
    sys.stdout.flush()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it catches signals; there is nothing to restart yet
    os.execv(command[0], command)


def _start(command: Sequence[str], check: Sequence[str]) -> Supervisor:
    return Supervisor(command, check=check)


def main(start: Callable[[Sequence[str], Sequence[str]], Supervisor] = _start) -> int:
    """Supervise `kvstored serve` with the options given."""
    try:
        supervisor = start(*([sys.executable, "-P", "-m", "kvstored", verb, *sys.argv[1:]] for verb in VERBS))
    except OSError as error:
        print(f"kvstored: cannot make the notify socket (TMPDIR says where): {error}", file=sys.stderr)
        return EXIT_FAILED
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
