"""How much each setting matters: one at a time against throughput, latency and memory, the plateau marked.

For each value a real daemon with small tiers on the file system to be measured. Values are ratios to a ceiling
taken in the same cell; a value is on the plateau where the median of its repeats is within 5 % of the best, or
within what repeats of one setting differ by, where that is more. Writes `sensitivity.csv` and `sensitivity.html`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.common import BadInput, Figure, parser, progress, run, write_json
from bench.load import ForeignLoad
from bench.sensitivity_cell import METRICS, measure
from bench.sensitivity_plot import sensitivity_page
from bench.sensitivity_settings import (
    BASE,
    PARAMETERS,
    QUICK,
    QUICK_PARAMETERS,
    Parameter,
    Scale,
    Setting,
    chosen,
    settings,
)
from bench.sensitivity_table import Measured, Row, Sample, noise, off_plateau, rows, to_csv

FIGURES: Final = (
    Figure("off_plateau", "defaults that are worse than the best by more than the tolerance, as `parameter: metric`"),
    Figure("rows", "the table: one object for each parameter, value and metric"),
    Figure("noise", "metric -> how much repeats of one setting differ, relative; 0: nothing repeated"),
    Figure("cells", "daemons measured"),
    Figure("seconds", "wall time"),
    Figure("foreign_cpu_share", "share of all CPUs that other processes of the machine used meanwhile"),
)
REPEATS: Final = 3
CSV: Final = "sensitivity.csv"
HTML: Final = "sensitivity.html"

Measure = Callable[[Setting, Scale, Path | None], dict[str, Sample]]


def measure_all(
    parameters: Sequence[Parameter],
    scale: Scale,
    *,
    repeats: int,
    base_repeats: int,
    directory: Path | None,
    measure: Measure,
) -> Measured:
    """All settings, the repeats interleaved, so that a slow spell of the machine meets them all."""
    todo = settings(parameters) * repeats
    todo += [BASE] * (base_repeats - repeats)
    measured: dict[Setting, dict[str, list[Sample]]] = {}
    started = time.monotonic()
    for number, setting in enumerate(todo):
        left = f", {(time.monotonic() - started) / number * (len(todo) - number):.0f} s left" if number else ""
        progress(f"cell {number + 1} of {len(todo)}{left}: {setting}")
        for metric, sample in measure(setting, scale, directory).items():
            measured.setdefault(setting, {}).setdefault(metric, []).append(sample)
    return measured


def write(directory: Path, table: Sequence[Row], parameters: Sequence[Parameter]) -> None:
    """The CSV file and the page."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CSV).write_text(to_csv(table), encoding="utf-8")
    (directory / HTML).write_text(sensitivity_page(table, parameters, METRICS), encoding="utf-8")


def show(table: Sequence[Row]) -> None:
    """The ratios for people, a table for each parameter; `=` and green: on the plateau, a star: the default."""
    for parameter in dict.fromkeys(row.parameter for row in table):
        of = [row for row in table if row.parameter == parameter]
        heads = [f"{row.value}*" if row.default else row.value for row in of if row.metric == of[0].metric]
        shown = Table("metric", *heads, title=f"{parameter}: to the ceiling, or the value where there is none")
        for metric in dict.fromkeys(row.metric for row in of):
            cells = [(f"{row.ratio:.3g}", row.plateau) for row in of if row.metric == metric]
            shown.add_row(metric, *(f"[green]{text} =[/]" if flat else text for text, flat in cells))
        Console().print(shown)


def _arguments() -> argparse.Namespace:
    built = parser("bench.sensitivity", "How much each setting matters, one at a time.", FIGURES)
    names = ", ".join(parameter.name for parameter in PARAMETERS)
    built.add_argument("--parameters", help=f"of {names}, with commas between (default: all)")
    built.add_argument("--repeats", type=int, help=f"of each cell (default: {REPEATS}; with --quick 1, defaults twice)")
    built.add_argument("--quick", action="store_true", help="two minutes: fewer values, small tiers, short windows")
    built.add_argument("--output", type=Path, default=Path("sensitivity"), help="where CSV and page go (%(default)s)")
    built.add_argument("--directory", type=Path, help="where the daemons' files go: the file system to measure")
    return built.parse_args()


def main() -> int:
    """Entry point."""
    arguments = _arguments()
    names = [parameter.name for parameter in PARAMETERS]
    if arguments.parameters:
        names = arguments.parameters.split(",")
    elif arguments.quick:
        names = list(QUICK_PARAMETERS)
    try:
        parameters = chosen(names, extremes_only=arguments.quick)
    except ValueError as error:
        raise SystemExit(f"bench.sensitivity: --parameters: {error}") from None
    repeats = arguments.repeats or (1 if arguments.quick else REPEATS)
    scale = QUICK if arguments.quick else Scale()
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)  # now, not when all is measured
    except OSError as error:
        raise BadInput(f"--output {arguments.output}: {error.strerror}") from None
    load, started = ForeignLoad(), time.monotonic()
    measured = measure_all(
        parameters,
        scale,
        repeats=repeats,
        base_repeats=max(2, repeats),
        directory=arguments.directory,
        measure=measure,
    )
    table = rows(measured, parameters, METRICS)
    write(arguments.output, table, parameters)
    progress(f"wrote {arguments.output / CSV} and {arguments.output / HTML}")
    values: dict[str, Any] = {
        "off_plateau": off_plateau(table),
        "rows": [asdict(row) for row in table],
        "noise": {metric.key: noise(measured, metric.key) for metric in METRICS},
        "cells": sum(max(map(len, samples.values())) for samples in measured.values()),
        "seconds": time.monotonic() - started,
        "foreign_cpu_share": load.share(),
    }
    if arguments.json:
        write_json(values, FIGURES, arguments.json)
    else:
        show(table)
    return 0


if __name__ == "__main__":
    run(main)
