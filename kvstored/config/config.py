"""The effective configuration: `--set` over environment over file over default.

Environment variables are `KVSTORED_SECTION__KEY` (two underscores), for example
`KVSTORED_DRAM__CAPACITY_BYTES=8GiB`; `KVSTORED_TENANTS` takes a JSON list. Variables without the
two underscores (`KVSTORED_ADDRESS`, ...) belong to the clients. Every value remembers its origin,
which `kvstored check-config` prints. An unknown key is an error: a misspelt limit is no limit.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from kvstored.config.schema import Config, Section, Tenant, flatten
from kvstored.errors import ConfigError

__all__ = ["Config", "LoadedConfig", "load_config"]

ENVIRONMENT_PREFIX: Final = "KVSTORED_"
_TENANTS: Final = "tenants"
_SECRET_KEYS: Final = frozenset({"tokens_sha256"})  # a wrong value there may be the token itself


@dataclass(frozen=True)
class LoadedConfig:
    """The settings, and where each one came from by `section.key`."""

    config: Config
    origins: dict[str, str]


class _Found(NamedTuple):
    """A value as it was given."""

    value: Any
    origin: str


_Layer = dict[str, _Found]  # by `section.key`


def load_config(path: Path | None, overrides: Mapping[str, str]) -> LoadedConfig:
    """Read, merge and check all settings.

    `overrides` are the `--set key=value` of the command line. Raises ConfigError with one line
    for every wrong setting: its key, its value, where it stands and what would be right.
    """
    found = _file_layer(path) | _environment_layer(os.environ) | _override_layer(overrides)
    try:
        config = Config.model_validate(_nest(found))
    except ValidationError as error:
        raise ConfigError("\n".join(_problems(error, found))) from None
    return LoadedConfig(config, {key: _origin(found, key) for key, _ in flatten(config)})


# --- layers ---


def _file_layer(path: Path | None) -> _Layer:
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from error
    return {key: _Found(value, f"file {path}") for key, value in _leaves(document)}


def _leaves(document: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield name, value


def _environment_layer(environment: Mapping[str, str]) -> _Layer:
    layer: _Layer = {}
    for name, text in environment.items():
        section, separator, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if name.startswith(ENVIRONMENT_PREFIX) and (separator or section == _TENANTS):
            path = f"{section}.{key}" if separator else section
            layer[path] = _Found(_decode(path, text), f"environment {name}")
    return layer


def _override_layer(overrides: Mapping[str, str]) -> _Layer:
    return {key: _Found(_decode(key, text), "--set") for key, text in overrides.items()}


def _decode(key: str, text: str) -> Any:
    """Text of the environment or the command line; lists are JSON, or items between commas."""
    if key not in _LISTS:
        return text
    if not text.lstrip().startswith("["):
        return [item for item in text.split(",") if item]
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{key} is not a JSON list: {error}") from error


# --- merging ---


def _nest(found: _Layer) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, (value, _) in found.items():
        section, separator, key = path.partition(".")
        branch = tree.setdefault(section, {}) if separator else tree
        if isinstance(branch, dict):  # else a plain value stands where a section should: validation says so
            branch[key or section] = value
    return tree


def _origin(found: _Layer, key: str) -> str:
    return found[key].origin if key in found else "default"


def _known() -> Iterator[tuple[str, FieldInfo]]:
    """Every key with its field."""
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            yield from ((f"{name}.{key}", inner) for key, inner in section.model_fields.items())
        else:
            yield name, field


_KEYS: Final = frozenset(key for key, _ in _known())
_LISTS: Final = frozenset(key for key, field in _known() if get_origin(field.annotation) is list)


# --- what is wrong ---


def _problems(error: ValidationError, found: _Layer) -> list[str]:
    return [_problem(item["type"], item["loc"], item["input"], item["msg"], found) for item in error.errors()]


def _problem(kind: str, where: tuple[int | str, ...], value: Any, text: str, found: _Layer) -> str:
    key = ".".join(map(str, where))
    text = text.removeprefix("Value error, ").replace("Input should", "must")
    if kind == "value_error" and isinstance(value, dict):
        return text  # a check across settings: it names them all
    given = f"{key}{_given_at(where, found)}"
    if kind == "extra_forbidden":
        return f"{given}: no such setting{_did_you_mean(key)}"
    if kind == "model_type":
        return f"{given}: must be a section with settings of its own"
    if kind == "missing":
        return f"{given}: missing"
    return f"{given}: {text}" if not _SECRET_KEYS.isdisjoint(where) else f"{given}: {_shown(value)} {text}"


def _given_at(where: tuple[int | str, ...], found: _Layer) -> str:
    """The origin of the setting that the location lies in, or of one in that section."""
    for length in (2, 1):
        setting = found.get(".".join(map(str, where[:length])))
        if setting is not None:
            return f" ({setting.origin})"
    inside = (origin for key, (_, origin) in found.items() if key.startswith(f"{where[0]}."))
    return next((f" ({origin})" for origin in inside), "")


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."


def _did_you_mean(key: str) -> str:
    section, _, name = key.rpartition(".")
    known = _KEYS if section else _KEYS | Config.model_fields.keys()
    if section.startswith(_TENANTS):
        known = frozenset(f"{section}.{field}" for field in Tenant.model_fields)
    close = difflib.get_close_matches(key, known, n=1) or [other for other in known if other.rpartition(".")[2] == name]
    return f"; did you mean {close[0]}?" if close else ""
