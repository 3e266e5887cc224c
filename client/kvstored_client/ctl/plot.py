"""Plots without a plotting library: lines in an SVG, by itself or in a page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log, log10
from typing import Final

IDEAL: Final = "opt"
WIDTH: Final = 960
HEIGHT: Final = 480
LEFT, RIGHT, TOP, BOTTOM = 60, 230, 40, 50
COLOURS: Final = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e5572", "#c98a1b", "#3d5a80")
NAME_HEIGHT: Final = 16
STEPS: Final = 6  # of the y axis, about

Tick = tuple[float, str]


@dataclass(frozen=True)
class Point:
    """`x` is 0 at the left end of the plot and 1 at the right; `note` shows under the pointer; `hollow`: a ring."""

    x: float
    y: float
    note: str
    hollow: bool = False


@dataclass(frozen=True)
class Line:
    """Points from left to right, with a name beside the last. An ideal is grey and dashed."""

    name: str
    points: Sequence[Point]
    ideal: bool = False


def hit_rate_page(title: str, rates: Mapping[str, Mapping[int, float]], *, page: bool) -> str:
    """Hit rate over tier size; with `page` inside HTML. `rates` is line -> capacity in blocks -> share.

    Lines whose name begins with `opt` are ideals.
    """
    sizes = sorted({size for by_size in rates.values() for size in by_size})
    top = max((rate for by_size in rates.values() for rate in by_size.values()), default=0.0) or 1.0
    top = min(1.0, (int(top * 10) + 1) / 10)
    span = log(sizes[-1] / sizes[0]) or 1.0
    place = {size: log(size / sizes[0]) / span for size in sizes}
    lines = [_hit_rate_line(policy, by_size, place) for policy, by_size in rates.items()]
    ticks = [(step / 10, f"{10 * step} %") for step in range(round(top * 10) + 1)]
    svg = chart(title, lines, [(place[size], f"{size:,}") for size in sizes], ticks)
    return html_page(title, [svg]) if page else svg


def _hit_rate_line(policy: str, by_size: Mapping[int, float], place: Mapping[int, float]) -> Line:
    points = [
        Point(place[size], rate, f"{policy} at {size:,} blocks: {100 * rate:.2f} %")
        for size, rate in sorted(by_size.items())
    ]
    ideal = policy.startswith(IDEAL)
    return Line(policy.replace(IDEAL, f"{IDEAL} (ideal)", 1) if ideal else policy, points, ideal)


def html_page(title: str, bodies: Sequence[str]) -> str:
    """HTML with these parts, one below the other."""
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>'
    return f'{head}<body style="font-family: sans-serif">{"".join(bodies)}</body></html>\n'


def even_ticks(top: float, unit: str = "") -> list[Tick]:
    """Ticks of an axis from 0 to `top` or a little more, at steps of 1, 2 or 5 times a power of ten."""
    top = top or 1.0
    least = top / STEPS
    power = 10.0 ** floor(log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
    count = 1
    while count * step < top * 0.999:
        count += 1
    return [(number * step, f"{number * step:g}{unit}") for number in range(count + 1)]


def chart(title: str, lines: Sequence[Line], ticks_x: Sequence[Tick], ticks_y: Sequence[Tick]) -> str:
    """One plot; the last tick of the y axis is its upper end."""

    def x(share: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / ticks_y[-1][0]

    parts = [_text(LEFT, TOP - 16, title, "start")]
    for value, label in ticks_y:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y(value) + 4, label, "end"))
    parts += [_text(x(share), HEIGHT - BOTTOM + 20, label, "middle") for share, label in ticks_x]
    lines = sorted(lines, key=lambda line: -line.points[-1].y)
    ends = _apart([y(line.points[-1].y) for line in lines])
    for number, line in enumerate(lines):
        colour = "#555" if line.ideal else COLOURS[number % len(COLOURS)]
        dashes = ' stroke-dasharray="6 4"' if line.ideal else ""
        path = " ".join(f"{x(point.x):.1f},{y(point.y):.1f}" for point in line.points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dashes} points="{path}"/>')
        parts += [_dot(x(point.x), y(point.y), point, colour) for point in line.points]
        parts.append(_text(WIDTH - RIGHT + 10, ends[number] + 4, line.name, "start", colour))
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="13">\n{inner}\n</svg>\n'
    )


def _apart(places: Sequence[float]) -> list[float]:
    """Where names stand: beside the ends of their lines, from the top down, not over each other and not below."""
    ends: list[float] = []
    for place in places:
        ends.append(max([place, *(other + NAME_HEIGHT for other in ends[-1:])]))
    for number in range(len(ends) - 1, -1, -1):
        ends[number] = min(ends[number], HEIGHT - NAME_HEIGHT * (len(ends) - number))
    return ends


def _dot(x: float, y: float, point: Point, colour: str) -> str:
    look = f'r="4" fill="#fff" stroke="{colour}" stroke-width="2"' if point.hollow else f'r="3" fill="{colour}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" {look}><title>{escape(point.note)}</title></circle>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
