"""`kvstorectl whatif`: what a recorded workload would have hit, by tier sizes, eviction order and admission.

It needs no daemon: orders and admissions are the daemon's own code, run over the trace.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer
from rich.console import Console
from rich.progress import BarColumn as Bar
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from kvstored.policy.admission import ADMISSIONS
from kvstored.policy.orders import ORDERS
from kvstored.policy.trace import Call, parse_calls, text_lines
from kvstored_client.ctl.connection import Exit, Failure, options_of
from kvstored_client.ctl.output import duration, print_json, print_table, size
from kvstored_client.ctl.plot import hit_rate_page
from kvstored_client.ctl.sizes import parse_size
from kvstored_client.ctl.whatif_runs import OPT, Cell, Result, Workload, as_json, run_cell

POLICIES: Final = (*ORDERS, OPT)
FRACTIONS: Final = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
BLOCK_BYTES: Final = 2 << 20  # where neither the trace nor the user says
GZIP_MAGIC: Final = b"\x1f\x8b"
READ_LINES: Final = 500  # between two looks at how far the file was read

Results = dict[Cell, Result]
TraceArgument = Annotated[
    Path,
    typer.Argument(metavar="TRACE", help="JSONL (Mooncake), compact CSV, or of `trace start`; may be gzipped."),
]
CapacitiesOption = Annotated[
    str,
    typer.Option(metavar="N,N,...", help="DRAM in blocks, or as 64GiB; default: 1/32 to all of the trace's blocks."),
]
NvmeOption = Annotated[
    str, typer.Option("--nvme", metavar="N,N,...", help="NVMe below it, in blocks or as 2TiB; default: none.")
]
PoliciesOption = Annotated[str, typer.Option(metavar="P,P,...", help=f"Of {', '.join(POLICIES)}; default: all.")]
AdmissionsOption = Annotated[
    str, typer.Option(metavar="A,A,...", help=f"To NVMe, of {', '.join(ADMISSIONS)} (a trace has no hints).")
]
BlockOption = Annotated[str, typer.Option(metavar="SIZE", help="Of one block; default: what was recorded, else 2MiB.")]
EnduranceOption = Annotated[
    str, typer.Option("--tbw", metavar="SIZE", help="What the drives may be written in their life, as 7000TB.")
]
PredictOption = Annotated[
    bool,
    typer.Option("--predict", help="With NVMe: as with prefetch.predict = true."),
]
PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page with hit rate over tier size: FILE.html or FILE.svg.")
]


def whatif(  # one parameter an option
    context: typer.Context,
    trace: TraceArgument,
    capacities: CapacitiesOption = "",
    nvme: NvmeOption = "",
    policies: PoliciesOption = "",
    admissions: AdmissionsOption = "",
    block_bytes: BlockOption = "",
    tbw: EnduranceOption = "",
    predict: PredictOption = False,
    plot: PlotOption = None,
) -> None:
    """Simulate eviction orders, tier sizes and admissions on a trace.

    Hits are leading blocks found / blocks asked for; opt is a tier, as large as all together, that knows the future.
    """
    options = options_of(context)
    chosen = _names("--policies", policies, POLICIES, POLICIES)
    if plot is not None and plot.suffix not in (".html", ".svg"):
        raise Failure(f"--plot {plot}: the name must end in .html or .svg", Exit.USAGE)
    admitted = _names("--admissions", admissions, tuple(ADMISSIONS), ("admit_all",))
    endurance_bytes = parse_size("--tbw", tbw, least=1) if tbw else 0
    given_bytes = parse_size("--block-bytes", block_bytes, least=1) if block_bytes else 0
    _check_sizes("--capacities", capacities)
    _check_sizes("--nvme", nvme)
    calls = read_calls(trace)
    work = _workload(calls, given_bytes, predict)
    if not work.asked_blocks:
        raise Failure(f"reading trace {trace}: no request asks for a whole block (lookups alone do not)", Exit.USAGE)
    distinct = len({block_id for call in calls for block_id in call.ids})
    sizes = _sizes("--capacities", capacities, work.block_bytes)
    sizes = sizes or sorted({max(1, round(distinct * fraction)) for fraction in FRACTIONS})
    below = _sizes("--nvme", nvme, work.block_bytes, least=2) or [0]
    results = _run(work, _cells(chosen, admitted, sizes, below))
    rates, axis = lines(results, work)
    if plot is not None:
        title = f"{trace.name}: hit rate over {axis} in blocks (log)"
        _write(plot, hit_rate_page(title, rates, page=plot.suffix == ".html"))
    requests = sum(call.gets for call in calls)
    if options.output == "json":
        by_name = {name: {str(at): rate for at, rate in by_size.items()} for name, by_size in rates.items()}
        counts = {"requests": requests, "blocks": work.asked_blocks, "distinct_blocks": distinct}
        counts |= {"block_bytes": work.block_bytes}
        runs = [as_json(work, cell, result, endurance_bytes) for cell, result in results.items()]
        recorded = recorded_hits(calls)
        found = {"recorded_hits": recorded, "hit_rate": by_name, "references_per_s": references_per_s(work, results)}
        print_json({"trace": str(trace), **counts, **found, "runs": runs})
        return
    print(f"{trace.name}: {requests} requests, {work.asked_blocks} blocks, {distinct} distinct")
    if (recorded := recorded_hits(calls)) is not None:
        print(f"the daemon's own hits: {recorded}, {100 * recorded / work.asked_blocks:.2f} %")
    if below == [0]:
        rows = [[name, *(f"{100 * rate:.2f} %" for rate in by_size.values())] for name, by_size in rates.items()]
        print_table(["hit rate at", *(f"{at} " for at in sizes)], rows)
    else:
        _print_tiers(work, results, endurance_bytes)
    speeds = references_per_s(work, results)
    slowest = min(speeds, key=speeds.__getitem__)
    print(f"simulated {speeds[slowest]:,.0f} references to blocks a second or more ({slowest})")


def read_calls(path: Path) -> list[Call]:
    """All calls of a trace file."""
    try:
        with path.open("rb") as file, _progress("reading", path.stat().st_size) as advance:
            zipped = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            file.seek(0)
            lines = gzip.GzipFile(fileobj=file) if zipped else file
            return list(parse_calls(text_lines(_watched(lines, file, advance))))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise Failure(f"reading trace {path}: {reason}", Exit.USAGE) from error


def _watched(lines: Iterable[bytes], file: BinaryIO, advance: Callable[[int], None]) -> Iterator[bytes]:
    """The lines; `advance` is told how far the file was read for them."""
    told = 0
    for number, line in enumerate(lines):
        if not number % READ_LINES:
            advance(file.tell() - told)
            told = file.tell()
        yield line


def _workload(calls: Sequence[Call], block_bytes: int, predict: bool) -> Workload:
    sized = [call for call in calls if call.size_bytes]
    stored = sum(len(call.ids) - call.start for call in sized)
    if not block_bytes and stored:
        block_bytes = max(1, round(sum(call.size_bytes for call in sized) / stored))
    span_ms = max((call.t_ms for call in calls), default=0.0) - min((call.t_ms for call in calls), default=0.0)
    asked_blocks = sum(len(c.ids) for c in calls if c.gets)
    return Workload(calls, block_bytes or BLOCK_BYTES, asked_blocks, span_ms / 1000, predict)


def recorded_hits(calls: Sequence[Call]) -> int | None:
    """The hits that the daemon itself had; None: this is no recording."""
    found = [call.found for call in calls if call.gets and call.found >= 0]
    return sum(found) if found else None


def _cells(policies: Sequence[str], admissions: Sequence[str], dram: Sequence[int], nvme: Sequence[int]) -> list[Cell]:
    cells = []
    for policy, below, at in product(policies, nvme, dram):
        rules = admissions if below and policy != OPT else [""]
        cells += [Cell(policy, rule, at, below) for rule in rules]
    return cells


def _run(work: Workload, cells: Sequence[Cell]) -> Results:
    with _progress("simulating", len(work.calls) * len(cells)) as advance:
        return {cell: run_cell(work, cell, advance) for cell in cells}


def references_per_s(work: Workload, results: Results) -> dict[str, float]:
    """How many blocks that the trace asks for were simulated a second, by policy, over all of its cells."""
    spent_s: dict[str, list[float]] = {}
    for cell, result in results.items():
        spent_s.setdefault(cell.policy, []).append(result.seconds)
    return {policy: work.asked_blocks * len(spent) / max(sum(spent), 1e-9) for policy, spent in spent_s.items()}


def lines(results: Results, work: Workload) -> tuple[dict[str, dict[int, float]], str]:
    """The lines of the plot, and what its axis is: NVMe where there are several sizes of it, else DRAM."""
    dram, nvme = ({getattr(cell, f"{tier}_blocks") for cell in results} for tier in ("dram", "nvme"))
    over_nvme = len(nvme) > 1
    rates: dict[str, dict[int, float]] = {}
    for cell, result in sorted(results.items(), key=lambda item: (item[0].nvme_blocks, item[0].dram_blocks)):
        name = cell.policy
        if len({other.admission for other in results} - {""}) > 1 and cell.admission:
            name += f" {cell.admission}"
        if over_nvme and len(dram) > 1:
            name += f" over DRAM {cell.dram_blocks}"
        at = cell.nvme_blocks if over_nvme else cell.dram_blocks
        rates.setdefault(name, {})[at] = result.hits / work.asked_blocks
    names = sorted(rates, key=lambda name: list(POLICIES).index(name.split()[0]))
    return {name: rates[name] for name in names}, "NVMe size" if over_nvme else "DRAM size" if max(
        nvme
    ) else "tier size"


def _print_tiers(work: Workload, results: Results, endurance_bytes: int) -> None:
    span = f"in {duration(work.span_s)}" if work.span_s else "without times"
    print(f"blocks of {size(work.block_bytes)}, {span}; bytes are those of the whole trace")
    columns = [
        "policy",
        "admission",
        "DRAM ",
        "NVMe ",
        "hit rate ",
        "DRAM read ",
        "DRAM written ",
        "NVMe read ",
        "NVMe written ",
    ]
    ahead = ["read ahead ", "of it in time "] if work.predict else []
    print_table(
        [*columns, "a day ", "drive's life ", *ahead], [_row(work, *item, endurance_bytes) for item in results.items()]
    )


def _row(work: Workload, cell: Cell, result: Result, endurance_bytes: int) -> list[str]:
    found = as_json(work, cell, result, endurance_bytes)
    keys = ("dram_read_bytes", "dram_written_bytes", "nvme_read_bytes", "nvme_written_bytes")
    moved = [_size_or_dash(found[key]) for key in (*keys, "nvme_written_bytes_per_day")]
    years = found["drive_life_years"]
    life = "-" if years is None else f"{years:.1f} years" if years < 100 else "over 100 years"
    sizes = [str(cell.dram_blocks), str(cell.nvme_blocks)]
    ahead = [size(found[f"nvme_read_ahead_{key}"]) for key in ("bytes", "used_bytes")] if work.predict else []
    return [cell.policy, cell.admission or "-", *sizes, f"{100 * found['hit_rate']:.2f} %", *moved, life, *ahead]


def _size_or_dash(size_bytes: Any) -> str:
    return "-" if size_bytes is None else size(size_bytes)


def _names(option: str, text: str, known: Sequence[str], default: Sequence[str]) -> list[str]:
    chosen = [name.strip() for name in text.split(",")] if text else list(default)
    for name in chosen:
        if name not in known:
            raise Failure(f"{option}: {name!r} is none of {', '.join(known)}", Exit.USAGE)
    return list(dict.fromkeys(chosen))


def _check_sizes(option: str, text: str) -> None:
    """The same refusals as when sizes are made of it, before a long trace is read."""
    _sizes(option, text, 1)


def _sizes(option: str, text: str, block_bytes: int, least: int = 1) -> list[int]:
    """Blocks; a number with a unit is one of bytes."""
    sizes = set()
    for part in text.split(",") if text else []:
        try:
            sizes.add(int(part))
        except ValueError:
            if not part.strip()[:1].isdigit():
                raise Failure(f"{option} {text}: give numbers of blocks with commas between", Exit.USAGE) from None
            sizes.add(parse_size(option, part) // block_bytes)
    if sizes and min(sizes) < least:
        raise Failure(f"{option}: {min(sizes)} blocks are no tier; give {least} or more", Exit.USAGE)
    return sorted(sizes)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error where that is a terminal; yields what moves it on by a part of the total."""
    console = Console(stderr=True)
    columns = (TextColumn(what), Bar(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda more: progress.advance(task, more)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"writing {path}: {error.strerror}") from error
