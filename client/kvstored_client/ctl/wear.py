"""`kvstorectl wear`: what was written to the drives, what of the budget is left, and how long they will last."""

from __future__ import annotations

from typing import Any, Final

import typer
from kvstored_proto.v1.admin_pb2 import PathWear, WearReply, WearRequest
from kvstored_proto.v1.kvstored_pb2 import OPERATION_WEAR

from kvstored_client.ctl.connection import connected, options_of
from kvstored_client.ctl.output import ago, as_dict, print_json, print_table, share, size

YEAR_S: Final = 365.25 * 86_400
COUNTED_MIN_S: Final = 3600.0  # of less nothing is foretold


def wear(context: typer.Context) -> None:
    """Show what was written to each NVMe drive, and how long it lasts at that rate.

    Everything that the daemon writes is counted, the index too. The forecast takes the rate of the last 30 days,
    and the drive's endurance from nvme.endurance_tbw.
    """
    options = options_of(context)
    with connected(options, "asking for wear") as client:
        reply = client.call(OPERATION_WEAR, WearRequest(), WearReply)
    if options.output == "json":
        print_json({"paths": [_as_dict(path) for path in reply.paths]})
        return
    columns = (
        "path",
        "today ",
        "this month ",
        "in total ",
        "counted since",
        "of endurance ",
        "life left ",
        "budget left ",
        "amplification ",
    )
    print_table(columns, map(_row, reply.paths))


def life_left_years(path: PathWear) -> float | None:
    """Years until the drive's endurance is used up, at the rate of the last 30 days; None: not known."""
    if path.total_bytes >= path.endurance_bytes > 0:
        return 0.0
    if not path.endurance_bytes or path.recent_s < COUNTED_MIN_S or not path.recent_bytes:
        return None
    return (path.endurance_bytes - path.total_bytes) / (path.recent_bytes / path.recent_s) / YEAR_S


def _as_dict(path: PathWear) -> dict[str, Any]:
    return as_dict(path) | {"life_left_years": life_left_years(path)}


def _row(path: PathWear) -> tuple[str, ...]:
    years = life_left_years(path)
    budget = "-"
    if path.budget_bytes_per_day:
        left = path.budget_left_bytes
        of_day = f"of {size(path.budget_bytes_per_day)} a day"
        budget = f"{size(left)} {of_day}" if left >= 0 else f"overdrawn by {size(-left)} {of_day}"
    return (
        path.path,
        size(path.today_bytes),
        size(path.month_bytes),
        size(path.total_bytes),
        ago(path.since_s),
        share(path.total_bytes, path.endurance_bytes) if path.endurance_bytes else "unknown",
        _life(years),
        budget,
        _amplification(path),
    )


def _life(years: float | None) -> str:
    if years is None:
        return "unknown"
    return "used up" if not years else f"{years:.1f} years" if years < 100 else "over 100 years"


def _amplification(path: PathWear) -> str:
    """All bytes written since the daemon started, to those that were put; of these, what was written again."""
    if not path.stored_bytes:
        return "-"
    again = f", {size(path.reinserted_bytes)} written again" if path.reinserted_bytes else ""
    return f"{path.written_bytes / path.stored_bytes:.2f}{again}"
