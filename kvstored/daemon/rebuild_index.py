"""The command `kvstored rebuild-index`: the NVMe index made anew from the extents, while no daemon runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kvstored.config.config import Config
from kvstored.device.file import FileDevice
from kvstored.errors import ConfigError, DeviceError
from kvstored.tiers.directory import VolumeDirectory
from kvstored.tiers.index_check import mark_clean, rebuild, source_of
from kvstored.tiers.markers import MARKERS
from kvstored.tiers.sources import Report

_COLUMNS = {
    "sealed_extents": "sealed",
    "salvaged_extents": "open",
    "extents": "extents",
    "records": "blocks",
    "salvaged_records": "of open",
    "deleted_records": "deleted",
    "duplicate_records": "duplicate",
    "live_bytes": "bytes",
    "namespaces": "namespaces",
}


def run(config: Config, output: str) -> int:
    """Rebuild every path's index and print what was found; exit status 1 where one failed.

    Raises ConfigError where there is no path, or one is in use, no volume, or of an older format.
    """
    if not config.nvme.paths:
        raise ConfigError("nvme.paths is empty: there is no index to rebuild")
    for path in config.nvme.paths:
        if not any((path / name).exists() for name in MARKERS):
            raise ConfigError(f"nvme.paths: {path} holds no volume (no FORMAT file): name the daemon's own directory")
    reports: dict[Path, Report] = {}
    failed = False
    for path in config.nvme.paths:
        try:
            reports[path] = _rebuild(path, config.nvme.extent_bytes)
        except DeviceError as error:
            print(f"kvstored: {error}", file=sys.stderr)
            failed = True
    _print(reports, output)
    return 1 if failed else 0


def _rebuild(path: Path, extent_bytes: int) -> Report:
    device = FileDevice()
    directory = VolumeDirectory(device, path, open_files_max=1)
    directory.open(extent_bytes, require_direct_io=False)
    try:
        if directory.old_format:
            raise ConfigError(f"nvme.paths: {path} has an older format: start kvstored once, which converts it")
        report = rebuild(source_of(directory))
        mark_clean(directory)
        return report
    finally:
        directory.close()


def _print(reports: dict[Path, Report], output: str) -> None:
    if output == "json":
        print(json.dumps({str(path): msgspec.to_builtins(report) for path, report in reports.items()}, indent=2))
        return
    Console(markup=False, highlight=False, width=200).print(_table(reports))


def _table(reports: dict[Path, Report]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("path", no_wrap=True)
    for title in _COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True)
    for path, report in reports.items():
        values: Sequence[int] = [getattr(report, name) for name in _COLUMNS]
        table.add_row(str(path), *map(str, values))
    return table
