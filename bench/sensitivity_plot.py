"""The sensitivity table as a page: for each parameter its throughput, its latency and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from kvstored_client.ctl.plot import Line, Point, chart, even_ticks, html_page

from bench.sensitivity_settings import Parameter
from bench.sensitivity_table import Metric, Row

PANELS: Final = {
    "rates / ceiling": ("put", "put_full", "get_dram", "get_nvme", "prefetch"),
    "time beside puts / idle": ("lookup_p99", "get_p99"),
    "time beside a prefetch / one direct read": ("cold_get_p50",),
    "MiB": ("private", "staging"),
}
"""The plots of each parameter: metrics of one order of magnitude. Not drawn: what is zero unless something is wrong."""


def sensitivity_page(table: Sequence[Row], parameters: Sequence[Parameter], metrics: Sequence[Metric]) -> str:
    """HTML that stands by itself. A full dot is on the plateau, a ring is not."""
    legend = "".join(
        f"<li><b>{escape(m.key)}</b> ({escape(m.unit)}): {escape(m.meaning)}"
        f"{f', to {escape(m.ceiling)}' if m.ceiling else ''}</li>"
        for m in metrics
    )
    bodies = [
        "<h1>One parameter at a time</h1><p>Everything else has its default, which is marked *. A full dot is within "
        "the tolerance of the best (5 %, or the noise of the run where that is more), a ring is worse.</p>"
        f"<ul>{legend}</ul>"
    ]
    for parameter in parameters:
        bodies.append(f"<h2>{escape(parameter.name)}</h2><p>{escape(parameter.meaning)}</p>")
        rows = [row for row in table if row.parameter == parameter.name]
        bodies += [_panel(parameter, rows, title) for title in PANELS]
    return html_page("kvstored: sensitivity", bodies)


def _panel(parameter: Parameter, rows: Sequence[Row], title: str) -> str:
    places = {parameter.text(v): n / max(1, len(parameter.values) - 1) for n, v in enumerate(parameter.values)}
    by_metric = {metric: [row for row in rows if row.metric == metric] for metric in PANELS[title]}
    lines = [Line(name, [_point(row, places[row.value]) for row in of]) for name, of in by_metric.items() if of]
    if not lines:
        return ""
    ticks = [(places[parameter.text(v)], _label(parameter, v)) for v in parameter.values]
    top = max(point.y for line in lines for point in line.points)
    return chart(f"{parameter.name}: {title}", lines, ticks, even_ticks(top))


def _label(parameter: Parameter, value: float) -> str:
    return parameter.label(value) + ("*" if value == parameter.default else "")


def _point(row: Row, place: float) -> Point:
    spread = f", {row.ratio_min:.3g} to {row.ratio_max:.3g} in {row.repeats} repeats" if row.repeats > 1 else ""
    note = f"{row.metric} at {row.value}: {row.median:.4g} {row.unit}, ratio {row.ratio:.3g}{spread}"
    return Point(place, row.ratio, note, hollow=not row.plateau)
