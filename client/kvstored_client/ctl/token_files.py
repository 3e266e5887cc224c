"""Token ids and namespace specs from files, as people write them down."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

from kvstored_client.ctl.connection import Exit, Failure
from kvstored_client.ctl.keys import parse_spec
from kvstored_client.identity import ConfigError, WeightsError, spec_from_hf_config

FILE_BYTES_MAX: Final = 64 << 20
_NAMES: Final = ("token_ids", "input_ids", "prompt_token_ids", "tokens")
_SEPARATORS: Final = re.compile(r"[\s,;]+")


def read_tokens(path: Path) -> list[int]:
    """Token ids of a file (`-`: standard input): a JSON list, an object with one, or numbers in text.

    Raises Failure.
    """
    text = _read(path)
    try:
        ids = _from_json(json.loads(text)) if text.lstrip()[:1] in ("[", "{") else _from_text(text)
    except ValueError as error:
        raise Failure(f"reading tokens {path}: {error}", Exit.USAGE) from error
    if not ids:
        raise Failure(f"reading tokens {path}: there are none", Exit.USAGE)
    if min(ids) < 0 or max(ids) >= 1 << 64:
        raise Failure(f"reading tokens {path}: a token id is a number from 0 to 2^64 - 1", Exit.USAGE)
    return ids


def read_spec(model: Path | None, spec: Path | None, fields: list[str]) -> NamespaceSpec | None:
    """The namespace of a model directory, of a JSON file with fields, or of fields alone, which win over both.

    None: nothing was given. Raises Failure.
    """
    if model is not None and spec is not None:
        raise Failure("--model and --spec exclude each other: either says which namespace", Exit.USAGE)
    given = parse_spec(fields)
    if model is not None:
        wanted = {field.name: value for field, value in given.ListFields()}
        try:
            return spec_from_hf_config(model, **wanted)
        except (ConfigError, WeightsError) as error:
            raise Failure(f"--model {model}: {error} (--field model_version=TEXT)", Exit.USAGE) from error
    if spec is not None:
        made = parse_spec(f"{name}={value}" for name, value in _object(spec).items())
        made.MergeFrom(given)
        return made
    return given if fields else None


def _object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(_read(path))
    except ValueError as error:
        raise Failure(f"reading spec {path}: {error}", Exit.USAGE) from error
    if not isinstance(document, dict):
        raise Failure(f"reading spec {path}: give one JSON object, with fields of the namespace", Exit.USAGE)
    return document


def _read(path: Path) -> str:
    try:
        if path == Path("-"):
            data = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        else:
            with path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise Failure(f"reading {path}: it has more than {FILE_BYTES_MAX} bytes", Exit.USAGE)
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"reading {path}: {error}", Exit.USAGE) from error


def _from_json(document: Any) -> list[int]:
    if isinstance(document, dict):
        document = next((document[name] for name in _NAMES if name in document), None)
    if isinstance(document, list) and len(document) == 1 and isinstance(document[0], list):
        document = document[0]  # a batch of one, as tokenizers give it
    if not isinstance(document, list) or not all(type(item) is int for item in document):
        raise ValueError(f"give a JSON list of numbers, or an object that has one under {', '.join(_NAMES)}")
    return document


def _from_text(text: str) -> list[int]:
    words = [word for word in _SEPARATORS.split(text) if word]
    wrong = next((word for word in words if not (word.isascii() and word.isdigit())), None)
    if wrong is not None:
        raise ValueError(f"{wrong[:40]!r} is no token id: give numbers, or JSON")
    return [int(word) for word in words]
