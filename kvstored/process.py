"""What the daemon sets for its process, and how it leaves it where threads cannot be ended."""

from __future__ import annotations

import logging
import os
import resource
import sys
from typing import Final, NoReturn

from kvstored.logs import get_logger

SWITCH_INTERVAL_S: Final = 0.0005

log = get_logger("daemon")


def raise_limits() -> None:
    """Descriptors as many as allowed (up to three a segment, one a client), and short turns on the GIL.

    Copy threads take the GIL for microseconds between long calls without it; with the usual 5 ms
    each of them could make the loop wait that long.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def leave(status: int) -> NoReturn:
    """End the process though a device keeps some of its threads, for which Python would wait."""
    log.error("left behind: threads that do not come back from a device; everything else was closed")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
