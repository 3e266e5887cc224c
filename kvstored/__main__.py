"""The command `kvstored`: serve, check the configuration, rebuild the index, print the version."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, Literal, NoReturn

import typer

from kvstored.config.config import LoadedConfig, load_config
from kvstored.config.schema import Config
from kvstored.errors import ConfigError
from kvstored.reporting import logs
from kvstored.supervise import replace_this_process

EXIT_CONFIG: Final = 78  # EX_CONFIG: a restart will not help
_HELP: Final = frozenset({"--help", "--install-completion", "--show-completion"})

app = typer.Typer(
    help="Per-node storage daemon for the KV cache of LLM inference. "
    "Without a command: serve, with the options of `kvstored serve --help`.",
    epilog="Exit codes: 0 ended in order, 1 failed, 2 usage, 78 a setting is wrong (check-config: 1).",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", envvar="KVSTORED_CONFIG", help="TOML file; none: defaults."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key, as in dram.capacity_bytes=8GiB; may be repeated."),
]
OutputOption = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="How to print it.")]


SuperviseOption = Annotated[
    bool,
    typer.Option(
        "--supervise", help="Restart the daemon when it dies, and keep its memory meanwhile; SIGHUP: restart in order."
    ),
]


@app.command()
def serve(config: ConfigOption = None, settings: SetOption = None, supervise: SuperviseOption = False) -> None:
    """Run the daemon in the foreground until SIGTERM, SIGINT or SIGHUP."""
    if supervise:
        options = ["--config", str(config)] if config is not None else []
        replace_this_process([*options, *(f"--set={setting}" for setting in settings or [])])
    try:
        loaded = _load(config, settings)
    except ConfigError as error:
        _complain(error)
        raise typer.Exit(EXIT_CONFIG) from None
    logs.configure(loaded.config.log.format, loaded.config.log.level)
    raise typer.Exit(_run(loaded))


@app.command("check-config")
def check_config(config: ConfigOption = None, settings: SetOption = None, output: OutputOption = "table") -> None:
    """Print the effective configuration and where each value came from; exit 1 where one is wrong.

    So it is where it does not go together with what admins changed of the tenants (in server.state_dir).
    """
    from kvstored.config import report as config_report

    try:
        loaded = _load(config, settings)
        _check_tenants(loaded.config)
    except ConfigError as error:
        if output == "json":
            print(json.dumps({"ok": False, "errors": str(error).splitlines()}, indent=2))
        else:
            _complain(error)
        raise typer.Exit(1) from None
    config_report.print_report(loaded, output)


@app.command("rebuild-index")
def rebuild_index(config: ConfigOption = None, settings: SetOption = None, output: OutputOption = "table") -> None:
    """Make the NVMe index anew from the extents, while the daemon is stopped, and print what was found.

    The daemon does so by itself where the index is damaged or lost.
    """
    from kvstored.daemon import rebuild_index as command

    try:
        loaded = _load(config, settings)
        raise typer.Exit(command.run(loaded.config, output))
    except ConfigError as error:
        _complain(error)
        raise typer.Exit(EXIT_CONFIG) from None


@app.command("version")
def show_version() -> None:
    """Print the version."""
    print(installed_version("kvstored"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; `kvstored` and `kvstored --set ...` mean `kvstored serve ...`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        given = ["version"]
    if not given or (given[0].startswith("-") and given[0] not in _HELP):
        given.insert(0, "serve")
    app(given, prog_name="kvstored")


def _load(config: Path | None, settings: list[str] | None) -> LoadedConfig:
    return load_config(config, dict(map(_assignment, settings or [])))


def _check_tenants(config: Config) -> None:
    """Raises ConfigError where the daemon would not start with these tenants and those that it keeps on file."""
    from kvstored.device.state_directory import StateDirectory
    from kvstored.tenancy.file import FILE_NAME, open_tenants

    state = StateDirectory(config.server.state_dir)
    if os.access(state.path / FILE_NAME, os.R_OK):  # else it is the daemon's alone, or not there yet
        open_tenants(config.tenants, state, config.check_tenants, take=False)


def _assignment(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise typer.BadParameter(f"{text!r} is not KEY=VALUE, such as dram.capacity_bytes=8GiB", param_hint="--set")
    return key.strip(), value


def _complain(error: ConfigError) -> None:
    for line in str(error).splitlines():
        print(f"kvstored: {line}", file=sys.stderr)


def _run(loaded: LoadedConfig) -> int:
    # Until the daemon listens to signals itself: the first process of a container never sees those without a handler.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _leave)
    from kvstored.daemon import process  # the other commands need neither uvloop nor the tiers

    try:
        return process.run(loaded.config)
    except ConfigError as error:  # what only the machine can tell: a path, huge pages, a port
        _complain(error)
        return EXIT_CONFIG


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
