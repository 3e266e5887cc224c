"""`kvstorectl whatif`: what a recorded workload would have hit, by tier size and eviction order.

It needs no daemon: the orders are the daemon's own code, run over the trace.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn as Bar
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from kvstored.policy.ideal import ideal_hits
from kvstored.policy.orders import ORDERS, make_order
from kvstored.policy.simulator import simulate
from kvstored.policy.trace import Request, parse
from kvstored_client.ctl.connection import Exit, Failure, options_of
from kvstored_client.ctl.output import print_json, print_table
from kvstored_client.ctl.plot import hit_rate_page

OPT: Final = "opt"
POLICIES: Final = (*ORDERS, OPT)
FRACTIONS: Final = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
STEP_REQUESTS: Final = 200
GZIP_MAGIC: Final = b"\x1f\x8b"

Rates = dict[str, dict[int, float]]
TraceArgument = Annotated[
    Path, typer.Argument(metavar="TRACE", help="JSONL (Mooncake) or compact CSV; may be gzipped.")
]
CapacitiesOption = Annotated[
    str, typer.Option(metavar="N,N,...", help="Tier sizes in blocks; default: 1/32 to all of the trace's blocks.")
]
PoliciesOption = Annotated[str, typer.Option(metavar="P,P,...", help=f"Of {', '.join(POLICIES)}; default: all.")]
PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page with hit rate over tier size: FILE.html or FILE.svg.")
]


def whatif(
    context: typer.Context,
    trace: TraceArgument,
    capacities: CapacitiesOption = "",
    policies: PoliciesOption = "",
    plot: PlotOption = None,
) -> None:
    """Simulate eviction orders and tier sizes on a trace.

    Hits are leading blocks found / blocks asked for; opt is a tier that knows the future.
    """
    options = options_of(context)
    chosen = _policies(policies)
    if plot is not None and plot.suffix not in (".html", ".svg"):
        raise Failure(f"--plot {plot}: the name must end in .html or .svg", Exit.USAGE)
    sizes = _capacities(capacities)
    requests = read_requests(trace)
    blocks, distinct = sum(map(len, requests)), len({block_id for ids in requests for block_id in ids})
    if not blocks:
        raise Failure(f"reading trace {trace}: no request asks for a whole block", Exit.USAGE)
    sizes = sizes or sorted({max(1, round(distinct * fraction)) for fraction in FRACTIONS})
    with _progress(len(requests) * len(sizes) * len(chosen)) as advance:
        rates = {p: {size: _hits(p, requests, size, advance) / blocks for size in sizes} for p in chosen}
    if plot is not None:
        _write(plot, hit_rate_page(trace.name, rates, page=plot.suffix == ".html"))
    if options.output == "json":
        by_name = {policy: {str(size): rate for size, rate in by_size.items()} for policy, by_size in rates.items()}
        counts = {"requests": len(requests), "blocks": blocks, "distinct_blocks": distinct}
        print_json({"trace": str(trace), **counts, "hit_rate": by_name})
    else:
        print(f"{trace.name}: {len(requests)} requests, {blocks} blocks, {distinct} distinct")
        rows = [[policy, *(f"{100 * rate:.2f} %" for rate in by_size.values())] for policy, by_size in rates.items()]
        print_table(["hit rate at", *(f"{size} " for size in sizes)], rows)


def read_requests(path: Path) -> list[Request]:
    """All requests of a trace file."""
    try:
        with path.open("rb") as probe:
            zipped = probe.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        with gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8") as file:
            return list(parse(file))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise Failure(f"reading trace {path}: {reason}", Exit.USAGE) from error


def _policies(text: str) -> list[str]:
    chosen = [name.strip() for name in text.split(",")] if text else list(POLICIES)
    for name in chosen:
        if name not in POLICIES:
            raise Failure(f"--policies: {name!r} is none of {', '.join(POLICIES)}", Exit.USAGE)
    return list(dict.fromkeys(chosen))


def _capacities(text: str) -> list[int]:
    if not text:
        return []
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise Failure(f"--capacities {text}: give numbers of blocks with commas between", Exit.USAGE) from None
    if sizes[0] < 1:
        raise Failure(f"--capacities: {sizes[0]} blocks are no tier; give 1 or more", Exit.USAGE)
    return sizes


def _hits(policy: str, requests: Sequence[Request], size: int, advance: Callable[[int], None]) -> int:
    if policy == OPT:
        hits = sum(ideal_hits(requests, size))
        advance(len(requests))
        return hits
    hits = 0
    for number, found in enumerate(simulate(requests, make_order(policy), size), 1):
        hits += found
        if not number % STEP_REQUESTS:
            advance(STEP_REQUESTS)
    advance(len(requests) % STEP_REQUESTS)
    return hits


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error where that is a terminal; yields what moves it on."""
    console = Console(stderr=True)
    columns = (TextColumn("simulating"), Bar(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda requests: progress.advance(task, requests)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"writing {path}: {error.strerror}") from error
