"""The daemon as a process: its limits, its event loop, its service manager, its exit status."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Final, NoReturn

import uvloop

from kvstored.config.config import Config
from kvstored.daemon.daemon import Daemon
from kvstored.daemon.notify import Notifier
from kvstored.device.service_manager import ServiceManager, from_environment
from kvstored.errors import ConfigError, KVStoredError
from kvstored.reporting.logs import get_logger

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SWITCH_INTERVAL_S: Final = 0.0005
START_GRACE_S: Final = 0.5
EXIT_OK: Final = 0
EXIT_FAILED: Final = 1

log = get_logger("process")


def run(config: Config) -> int:
    """Serve until a signal; returns the exit status. Raises ConfigError for what only the machine can tell."""
    manager = from_environment(os.environ)  # before there are threads and children
    raise_limits()
    keep_modules_from_the_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_main(config, manager))


async def _main(config: Config, manager: ServiceManager) -> int:
    with Notifier(manager.notify, manager.watchdog_s) as notifier:
        notifier.status("opening the tiers")
        daemon = Daemon(config, manager.keeper)
        catch_signals(daemon.ask_to_stop)
        try:
            await _started(daemon)
        except (KVStoredError, OSError) as error:
            notifier.status(f"cannot start: {error}")
            await daemon.stop(flush=False)
            ignore_signals()
            if isinstance(error, ConfigError):
                raise
            log.error("cannot start", reason=str(error))
            return EXIT_FAILED
        notifier.ready(f"serving on {config.server.session_socket}")
        await daemon.wait()
        notifier.stopping("stopping: what is only in DRAM is written to NVMe")
        await daemon.stop()
        ignore_signals()
    if daemon.stuck:
        log.error("left behind: threads that do not come back from a device; everything else was closed")
        leave(EXIT_FAILED)
    return EXIT_OK


async def _started(daemon: Daemon) -> None:
    """Start the daemon. A signal meanwhile ends the process, at once and with the status of an orderly end.

    Populating memory or rebuilding an index may take minutes, in threads that cannot be stopped. Until it serves the
    daemon has promised nothing to anybody, and what it does to its files withstands SIGKILL at any instant.
    """
    starting, asked = asyncio.create_task(daemon.start()), asyncio.create_task(daemon.wait())
    await asyncio.wait([starting, asked], return_when=asyncio.FIRST_COMPLETED)
    if asked.done():
        await asyncio.wait([starting], timeout=START_GRACE_S)
    if not starting.done():
        log.info("stopped", during="start")
        leave(EXIT_OK)
    asked.cancel()
    await starting


def catch_signals(ask_to_stop: Callable[[], None]) -> None:
    """Each signal to stop calls `ask_to_stop` in the running loop, but for those that were ignored already (nohup).

    Not by the loop's own handlers: those it takes off by way of the default, which a signal at that instant dies of.
    """
    loop = asyncio.get_running_loop()

    def asked(_number: int, _frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(ask_to_stop)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, asked)


def ignore_signals() -> None:
    """All is done but to leave: a signal from now on must not turn an orderly end into another."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def raise_limits() -> None:
    """Descriptors as many as allowed (up to three a segment, one a client), and short turns on the GIL.

    Copy threads take the GIL for microseconds between long calls without it; with the usual 5 ms
    each of them could make the loop wait that long.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def keep_modules_from_the_collector() -> None:
    """Let full collections pass over what was imported: it stays to the end, and is nearly all that there is.

    Without blocks there are 65,000 objects to look at, nearly all of them modules': 10 ms in which the loop stands
    still, 30 where copies have just gone through the caches. Before the daemon is made, so that nothing of it is kept.
    """
    gc.collect()
    gc.freeze()


def leave(status: int) -> NoReturn:
    """End the process though some of its threads have not come back, for which Python would wait."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
