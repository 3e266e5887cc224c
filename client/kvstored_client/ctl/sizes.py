"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re
from typing import Final

from kvstored_client.ctl.connection import Exit, Failure
from kvstored_client.ctl.output import size

_UNITS: Final[dict[str, int]] = {
    **{unit: 1 << (10 * power) for power, unit in enumerate(("", "kib", "mib", "gib", "tib"))},
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
}
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)")


def parse_size(option: str, text: str, *, least: int = 0, or_none: bool = False) -> int:
    """Bytes; raises Failure that names the option where it is no size, or less than the least."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise Failure(f'{option} {text}: give a size in bytes, such as 8589934592 or "8GiB"', Exit.USAGE)
    unit = _UNITS[match[2]]
    size_bytes = round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size_bytes < least and not (or_none and size_bytes == 0):
        raise Failure(f"{option} {text}: give {size(least)} or more{', or 0' * or_none}", Exit.USAGE)
    return size_bytes
