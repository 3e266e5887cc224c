"""Printing: tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

LINE_COLUMNS_MAX: Final = 4000
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def print_json(document: dict[str, Any]) -> None:
    """One object on standard output."""
    print(json.dumps(document, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """A table; columns whose name ends in a space are aligned to the right. Nothing without rows.

    Lines are neither folded nor cut: a digest in two pieces can be copied from no terminal.
    """
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if table.row_count:
        Console(markup=False, highlight=False, width=LINE_COLUMNS_MAX).print(table)


def as_dict(message: Message) -> dict[str, Any]:
    """A message as JSON types, defaults included; bytes are hex."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Message):
        return as_dict(value)
    if hasattr(value, "items"):
        return {str(key): _plain(value[key]) for key in sorted(value)}
    return [_plain(item) for item in value]


def printable(text: str) -> str:
    """The text without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def size(size_bytes: float) -> str:
    """Bytes with a unit."""
    for unit in _UNITS[:-1]:
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} {_UNITS[-1]}"


def share(part: int, whole: int) -> str:
    """A percentage; a dash where there is nothing to divide by."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def ago(wall_s: float) -> str:
    """How long ago something was, given in seconds since 1970; 0: never."""
    return f"{duration(max(0.0, time.time() - wall_s))} ago" if wall_s else "-"


def duration(seconds: float) -> str:
    """Days, hours, minutes and seconds, the two largest that matter."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{n}{unit}" for n, unit in ((days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")) if n]
    return " ".join(parts[:2]) or "0s"
