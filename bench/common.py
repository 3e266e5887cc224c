"""What all benches share: documented figures, their output, command lines, medians, progress.

A bench declares its figures (key, meaning, target) once. `--help` shows them, the table shows
them, and an undocumented key in the output is an error, so that the names stay what they are.
"""

from __future__ import annotations

import argparse
import json
import operator
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

Value = float | int | str | bool | None
Values = Mapping[str, Value]

GB: Final = 1e9
MIB: Final = 1 << 20

_RELATIONS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
}


@dataclass(frozen=True)
class Figure:
    """One key of a bench's JSON object. `target` is `<= x`, `>= x` or `== x`, or empty."""

    key: str
    meaning: str
    target: str = ""

    def met(self, value: Value) -> bool | None:
        """Whether the value is on the right side of the target; None where there is nothing to say."""
        if not self.target or not isinstance(value, int | float):
            return None
        relation, limit = self.target.split()
        return _RELATIONS[relation](value, float(limit))


class BadInput(ValueError):
    """What a bench was given cannot be used; the message says which file, line or value."""


def count(text: str) -> int:
    """A number of an option that is 1 or more. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal()) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number over 0")
    return int(text)


def counts(text: str) -> list[int]:
    """Several with commas between. Raises ArgumentTypeError."""
    return [count(part.strip()) for part in text.split(",")]


def parser(module: str, purpose: str, figures: Sequence[Figure]) -> argparse.ArgumentParser:
    """A command line with `--json` and the figures' meanings in its help."""
    width = max(len(f.key) for f in figures)
    lines = [f"  {f.key:{width}}  {f.meaning}{f' (target {f.target})' if f.target else ''}" for f in figures]
    built = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=purpose,
        epilog="keys of the JSON object (null: not measured in this run):\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    built.add_argument("--json", metavar="FILE", help="write one JSON object to FILE, or to standard output for -")
    return built


def emit(values: Values, figures: Sequence[Figure], target: str | None) -> None:
    """Give out the figures: as JSON to `target` (`-` is standard output), else as a table.

    Every key must be a declared figure; declared ones without a value are null.
    """
    unknown = set(values) - {f.key for f in figures}
    assert not unknown, f"figures without a documented meaning: {sorted(unknown)}"
    if target is None:
        Console().print(_table(values, figures))
        return
    write_json(values, figures, target)


def write_json(values: Mapping[str, Any], figures: Sequence[Figure], target: str) -> None:
    """One JSON object of all declared figures, however deep their values, to a file or, for `-`, standard output."""
    text = json.dumps({f.key: _rounded(values.get(f.key)) for f in figures}) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)


def _table(values: Values, figures: Sequence[Figure]) -> Table:
    table = Table("figure", "value", "target", "meaning")
    for figure in figures:
        value = values.get(figure.key)
        if value is not None:
            style = {None: "", True: "green", False: "red"}[figure.met(value)]
            table.add_row(figure.key, str(_rounded(value)), figure.target, figure.meaning, style=style)
    return table


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def progress(text: str) -> None:
    """One line for the person who waits, on standard error."""
    print(text, file=sys.stderr, flush=True)


def run(main: Callable[[], int]) -> None:
    """Run a bench's main as a process: SIGTERM unwinds, so that daemons and directories go. Bad input is one line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except BadInput as error:
        progress(f"bench: {error}")
        sys.exit(2)


# --- measuring -----------------------------------------------------------------


@contextmanager
def timed(into: list[float]) -> Iterator[None]:
    """Append the seconds that the body takes."""
    started = time.perf_counter()
    yield
    into.append(time.perf_counter() - started)


def median(values: Iterable[float]) -> float:
    """The median."""
    return statistics.median(values)


def median_ratio(measured: Sequence[float], ceiling: Sequence[float]) -> float:
    """Median over the repeats of measured / ceiling of the same repeat.

    Pairs first, so that a slow spell of the machine, which hits both of a pair, cancels out.
    """
    assert len(measured) == len(ceiling) > 0
    return median(m / c for m, c in zip(measured, ceiling, strict=True))


def quiet_ratio(measured: Sequence[float], ceiling: Sequence[float]) -> float:
    """Lower quartile of measured times over that of the ceiling's.

    What else runs on the machine only ever adds time, so the faster repeats are those that tell the two apart.
    """
    assert min(len(measured), len(ceiling)) >= 2, "a quartile needs two repeats"
    return statistics.quantiles(measured, n=4)[0] / statistics.quantiles(ceiling, n=4)[0]


def p50_us(seconds: Sequence[float]) -> float:
    """Median in microseconds."""
    return median(seconds) * 1e6


def p99_us(seconds: Sequence[float]) -> float:
    """99th percentile in microseconds: of fewer than 100 values the largest."""
    return sorted(seconds)[-(-len(seconds) * 99 // 100) - 1] * 1e6
