"""Log lines: structured, one a line on standard error, as JSON or as text.

Rules for callers: an event is a constant text, what varies goes into fields; neither keys nor
tokens of tenants are logged; what can repeat with the load goes through a `Throttle`.
"""

from __future__ import annotations

import logging
import sys
from typing import Final, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from kvstored.clock import Clock, SystemClock

THROTTLED_EVENTS_MAX: Final = 256
_SECRET_FIELDS: Final = frozenset({"token", "authorization", "password", "secret"})


def configure(format: str, level: str) -> None:
    """Send the daemon's lines, and those of its libraries, to standard error.

    `format` is `json` or `text`; `level` one of `debug`, `info`, `warning`, `error`. May be called again.
    """
    severity = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,  # loggers are made at import, before the level is known
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_SHARED, processors=[_strip, *_rendering(format)])
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(severity)


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose lines carry `name`."""
    return cast(FilteringBoundLogger, structlog.get_logger(name))


class Throttle:
    """Lets a repeated warning through once per interval, with the count of those held back."""

    def __init__(self, log: FilteringBoundLogger, interval_s: float = 10.0, clock: Clock | None = None) -> None:
        self._log = log
        self._interval_s = interval_s
        self._clock = clock or SystemClock()
        self._next_s: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def warning(self, event: str, **fields: object) -> bool:
        """Log `event`, unless it was logged within the interval; returns whether it was."""
        now = self._clock.monotonic()
        if now < self._next_s.get(event, now):
            self._held_back[event] = self._held_back.get(event, 0) + 1
            return False
        if len(self._next_s) >= THROTTLED_EVENTS_MAX:
            self._next_s.clear()
            self._held_back.clear()
        self._next_s[event] = now + self._interval_s
        held_back = self._held_back.pop(event, 0)
        self._log.warning(event, **fields, **({"held_back": held_back} if held_back else {}))
        return True


def _strip(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    return structlog.stdlib.ProcessorFormatter.remove_processors_meta(logger, name, event)


def _redact(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    """The last net: a secret that a caller logs all the same is blanked."""
    for field in _SECRET_FIELDS.intersection(event):
        event[field] = "[redacted]"
    return event


def _rendering(format: str) -> list[Processor]:
    if format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]


_SHARED: Final[list[Processor]] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    _redact,
]
