"""`kvstored check-config`: every setting with its effective value and where that came from."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstored.config.config import LoadedConfig
from kvstored.config.schema import Section, flatten

_LINE_COLUMNS_MAX = 4000
_DIGEST_SHOWN = 8  # enough to tell tokens apart


def as_json(loaded: LoadedConfig) -> str:
    """One object: `settings` maps each key to its `value` and `origin`."""
    settings = {key: {"value": _plain(value), "origin": loaded.origins[key]} for key, value in flatten(loaded.config)}
    return json.dumps({"ok": True, "settings": settings}, indent=2)


def as_table(loaded: LoadedConfig) -> Table:
    """Key, value and origin, one row a setting."""
    table = Table(box=None, pad_edge=False)
    for column in ("setting", "value", "from"):
        table.add_column(column, no_wrap=True)
    for key, value in flatten(loaded.config):
        shown = json.dumps(_plain(value)) if isinstance(value, list | bool) else _text(value)
        table.add_row(key, shown, loaded.origins[key])
    return table


def print_report(loaded: LoadedConfig, output: str) -> None:
    """Print the table, or JSON where `output` is `json`."""
    if output == "json":
        print(as_json(loaded))
    else:
        # A line is a record: it is neither folded nor cut.
        Console(markup=False, highlight=False, width=_LINE_COLUMNS_MAX).print(as_table(loaded))


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _plain(value: Any) -> Any:
    """The value as JSON types; of token digests only the start."""
    if isinstance(value, Section):
        plain = {name: _plain(getattr(value, name)) for name in type(value).model_fields}
        if "tokens_sha256" in plain:
            plain["tokens_sha256"] = [digest[:_DIGEST_SHOWN] + "..." for digest in plain["tokens_sha256"]]
        return plain
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
