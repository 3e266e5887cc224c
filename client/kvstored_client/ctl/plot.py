"""A plot without a plotting library: hit rate over tier size, as one SVG, by itself or in a page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from math import log
from typing import Final

IDEAL: Final = "opt"
WIDTH: Final = 860
HEIGHT: Final = 480
LEFT, RIGHT, TOP, BOTTOM = 60, 130, 40, 50
COLOURS: Final = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e5572", "#c98a1b", "#3d5a80")


def hit_rate_page(title: str, rates: Mapping[str, Mapping[int, float]], *, page: bool) -> str:
    """The plot; with `page` inside HTML that stands by itself. `rates` is policy -> capacity in blocks -> share."""
    svg = _svg(title, rates)
    if not page:
        return svg
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>'
    return f'{head}<body style="font-family: sans-serif">{svg}</body></html>\n'


def _svg(title: str, rates: Mapping[str, Mapping[int, float]]) -> str:
    sizes = sorted({size for by_size in rates.values() for size in by_size})
    top = max((rate for by_size in rates.values() for rate in by_size.values()), default=0.0) or 1.0
    top = min(1.0, (int(top * 10) + 1) / 10)

    def x(size: int) -> float:
        span = log(sizes[-1] / sizes[0]) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * log(size / sizes[0]) / span

    def y(rate: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * rate / top

    parts = [_text(LEFT, TOP - 16, f"{title}: hit rate over tier size in blocks (log)", "start")]
    for step in range(round(top * 10) + 1):
        line = y(step / 10)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{line:.1f}" y2="{line:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, line + 4, f"{10 * step} %", "end"))
    parts += [_text(x(size), HEIGHT - BOTTOM + 20, f"{size:,}", "middle") for size in sizes]
    ends: list[float] = []
    for number, (policy, by_size) in enumerate(sorted(rates.items(), key=lambda item: -max(item[1].values()))):
        colour = "#555" if policy == IDEAL else COLOURS[number % len(COLOURS)]
        dashes = ' stroke-dasharray="6 4"' if policy == IDEAL else ""
        points = " ".join(f"{x(size):.1f},{y(rate):.1f}" for size, rate in sorted(by_size.items()))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dashes} points="{points}"/>')
        parts += [
            f'<circle cx="{x(size):.1f}" cy="{y(rate):.1f}" r="3" fill="{colour}">'
            f"<title>{escape(policy)} at {size:,} blocks: {100 * rate:.2f} %</title></circle>"
            for size, rate in by_size.items()
        ]
        # Names stand beside the ends of their lines, not over each other.
        end = max([y(by_size[max(by_size)]), *(other + 16 for other in ends)])
        ends.append(end)
        parts.append(
            _text(WIDTH - RIGHT + 10, end + 4, f"{policy} (ideal)" if policy == IDEAL else policy, "start", colour)
        )
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="13">\n{inner}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
