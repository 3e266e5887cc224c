"""The sensitivity table: medians over repeats, as ratios to a ceiling of the same cell, and the plateau of each.

Pure: samples in, rows and CSV out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from io import StringIO
from typing import Final

from bench.common import median
from bench.sensitivity_settings import BASE, Parameter, Setting

TOLERANCE: Final = 0.05


@dataclass(frozen=True)
class Metric:
    """What is measured in each cell. `ceiling` says what the value is divided by; empty: by nothing."""

    key: str
    meaning: str
    unit: str
    ceiling: str
    higher_is_better: bool


@dataclass(frozen=True)
class Sample:
    """One measurement, and its ceiling in the same unit."""

    value: float
    ceiling: float = 1.0

    @property
    def ratio(self) -> float:
        """What is compared between cells."""
        return self.value / self.ceiling


Samples = Mapping[str, Sequence[Sample]]  # metric -> one per repeat
Measured = Mapping[Setting, Samples]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    parameter: str
    value: str
    default: bool
    metric: str
    unit: str
    better: str  # higher, lower
    median: float
    ceiling: float
    ratio: float
    ratio_min: float
    ratio_max: float
    repeats: int
    tolerance: float  # relative: what counts as equal to the best
    plateau: bool


def noise(measured: Measured, metric: str) -> float:
    """How much repeats of one setting differ, relative to their median: the median over all settings that have some.

    From the least to the greatest: two settings that are equal may differ by so much. 0 where nothing was repeated.
    """
    spreads = []
    for samples in measured.values():
        ratios = [sample.ratio for sample in samples.get(metric, ())]
        if len(ratios) > 1 and median(ratios) > 0:
            spreads.append((max(ratios) - min(ratios)) / median(ratios))
    return median(spreads) if spreads else 0.0


def on_plateau(ratios: Sequence[float], *, higher_is_better: bool, tolerance: float) -> list[bool]:
    """Which are within the tolerance (relative) of the best of them."""
    if higher_is_better:
        return [ratio >= max(ratios) * (1 - tolerance) for ratio in ratios]
    return [ratio <= min(ratios) * (1 + tolerance) for ratio in ratios]


def rows(measured: Measured, parameters: Sequence[Parameter], metrics: Sequence[Metric]) -> list[Row]:
    """The table: parameter by parameter, metric by metric, value by value. What was not measured is left out."""
    found = []
    for parameter in parameters:
        for metric in metrics:
            found += _rows_of(measured, parameter, metric)
    return found


def _rows_of(measured: Measured, parameter: Parameter, metric: Metric) -> list[Row]:
    by_value: dict[float, Sequence[Sample]] = {}
    for value in parameter.values:
        setting = BASE if value == parameter.default else Setting(parameter, value)
        if samples := measured.get(setting, {}).get(metric.key):
            by_value[value] = samples
    if not by_value:
        return []
    tolerance = max(TOLERANCE, noise(measured, metric.key))
    ratios = [median(sample.ratio for sample in samples) for samples in by_value.values()]
    level = on_plateau(ratios, higher_is_better=metric.higher_is_better, tolerance=tolerance)
    return [
        Row(
            parameter=parameter.name,
            value=parameter.text(value),
            default=value == parameter.default,
            metric=metric.key,
            unit=metric.unit,
            better="higher" if metric.higher_is_better else "lower",
            median=median(sample.value for sample in samples),
            ceiling=median(sample.ceiling for sample in samples),
            ratio=ratio,
            ratio_min=min(sample.ratio for sample in samples),
            ratio_max=max(sample.ratio for sample in samples),
            repeats=len(samples),
            tolerance=tolerance,
            plateau=flat,
        )
        for (value, samples), ratio, flat in zip(by_value.items(), ratios, level, strict=True)
    ]


def to_csv(table: Iterable[Row]) -> str:
    """The table with a head; truth as 1 and 0, numbers with four digits that count."""
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(field.name for field in fields(Row))
    writer.writerows([_cell(value) for value in astuple(row)] for row in table)
    return file.getvalue()


def _cell(value: str | float) -> str | int:
    if isinstance(value, bool):
        return int(value)
    return f"{value:.4g}" if isinstance(value, float) else value


def off_plateau(table: Iterable[Row]) -> list[str]:
    """Where a default is not on the plateau, as `parameter: metric`."""
    return [f"{row.parameter}: {row.metric}" for row in table if row.default and not row.plateau]
