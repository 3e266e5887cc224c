"""On which terms blocks are put (when the put is done, how long they are kept), and what a lookup asks for."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict, get_args

_NUMBER_MAX: Final = (1 << 31) - 1  # what the field holds; which priorities there are the daemon says
TTL_MAX_S: Final = 100 * 365 * 86400.0
Durability = Literal["memory", "nvme"]
"""When a put is done: in DRAM, or on NVMe too, so that it survives the death of the daemon and of the machine."""


class PutHints(TypedDict, total=False):
    """What a put may say of its blocks; see `Client.hint`."""

    priority: int
    soft_pin_s: float
    hard_pin_s: float
    continues: bool
    final: bool


@dataclass(frozen=True, slots=True)
class Terms:
    """Of one put, or of a namespace's puts that do not say. `ttl_s` 0, `durability` None: it does not say."""

    durability: Durability | None = None
    ttl_s: float = 0.0
    sliding: bool = False
    hint: PutHints | None = None  # of one put alone

    def check(self) -> Terms:
        """The same; raises ValueError where they make no sense."""
        if self.durability is not None and self.durability not in get_args(Durability):
            raise ValueError(f"durability {self.durability!r}: it must be one of {', '.join(get_args(Durability))}")
        if self.ttl_s != 0 and not 0.001 <= self.ttl_s <= TTL_MAX_S:
            raise ValueError(f"ttl_s is {self.ttl_s}: seconds from the put on (100 years at most), or 0 for no end")
        if self.sliding and not self.ttl_s:
            raise ValueError("sliding needs ttl_s: how long after its last use a block ends")
        check_hint(self.hint or {}, PutHints)
        return self

    def want_nvme(self, otherwise: Terms) -> bool:
        """Whether a put is done when it is on NVMe; `otherwise`: what its namespace says of puts that do not."""
        return (self.durability or otherwise.durability) == "nvme"

    @property
    def ttl_ms(self) -> int:
        """For the protocol, rounded down."""
        return int(self.ttl_s * 1000)


def check_hint(said: Mapping[str, Any], kind: type) -> None:
    """Raises ValueError for what a hint of this kind (a TypedDict) does not know, and for times that are none."""
    for name, value in said.items():
        if name not in kind.__annotations__:
            raise ValueError(f"hint {name!r}: there are {', '.join(kind.__annotations__)}")
        if name.endswith("_s"):
            check_seconds(name, value)
        elif value is not None and abs(operator.index(_plain(value))) > _NUMBER_MAX:
            raise ValueError(f"hint {name} is {value}: that is too large")


def _plain(value: Any) -> Any:
    """Python's own of one of numpy's: its bool is no index, and the message takes it all the same."""
    return value.item() if hasattr(value, "item") else value


def check_wait(wait_s: Any) -> None:
    """Raises ValueError for what is no time, or TypeError for what is no number; less than 0 is no wait."""
    if math.isnan(wait_s):
        raise ValueError(f"wait_s is {wait_s}: how many seconds to wait, or 0")


def check_seconds(name: str, value: Any) -> None:
    """Raises ValueError, or TypeError for what is no number."""
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {value}: seconds from now, or 0 for no end")


@dataclass(frozen=True, slots=True)
class Asking:
    """What a lookup asks for beside where the blocks are."""

    prefill_tokens_per_s: float = 0.0  # how fast the engine computes, for an estimate; 0: none
    prefetch: bool = False
    prefetch_deadline_s: float = 0.0  # 0: none

    def check(self, block_tokens: int) -> Asking:
        """The same; raises ValueError where it makes no sense for blocks of so many tokens (0: not known)."""
        rate = self.prefill_tokens_per_s
        if not 0 <= rate < float("inf"):
            raise ValueError(f"prefill_tokens_per_s is {rate}: tokens that the engine computes a second, or 0")
        if rate and not block_tokens:
            raise ValueError("prefill_tokens_per_s needs a spec with block_tokens: how many tokens a block has")
        check_seconds("prefetch_deadline_s", self.prefetch_deadline_s)
        return self

    def but(self, prefill_tokens_per_s: float | None, prefetch: bool | None, deadline_s: float) -> Asking:
        """With what one lookup says; None: as it is here."""
        return Asking(
            self.prefill_tokens_per_s if prefill_tokens_per_s is None else prefill_tokens_per_s,
            self.prefetch if prefetch is None else prefetch,
            deadline_s,
        )
