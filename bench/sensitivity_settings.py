"""What the sensitivity bench varies: one parameter at a time, all others at their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.common import MIB
from kvstored.config.schema import Config, flatten

KIB: Final = 1 << 10
BLOCK_BYTES: Final = "block_bytes"
STAGING_BYTES: Final = "staging_bytes"
OF_THE_CLIENT: Final[dict[str, float]] = {BLOCK_BYTES: 512 * KIB, STAGING_BYTES: 64 * MIB}
"""Parameters that are no settings of the daemon, with what the bench takes as their default."""


@dataclass(frozen=True)
class Parameter:
    """`values` from the smallest to the largest, the default among them."""

    name: str
    meaning: str
    values: tuple[float, ...]

    @property
    def default(self) -> float:
        """The daemon's own default, or the bench's."""
        if self.name in OF_THE_CLIENT:
            return OF_THE_CLIENT[self.name]
        return float(dict(flatten(Config()))[self.name])

    def text(self, value: float) -> str:
        """The value as the daemon's command line takes it, and as people read it where it is bytes."""
        return f"{value:.0f}" if value == int(value) else f"{value:g}"

    def label(self, value: float) -> str:
        """The value for people."""
        if "bytes" not in self.name:
            return self.text(value)
        return f"{value / MIB:g} MiB" if value >= MIB else f"{value / KIB:g} KiB"


PARAMETERS: Final = (
    Parameter(BLOCK_BYTES, "size of each block", (64 * KIB, 256 * KIB, 512 * KIB, 2 * MIB, 4 * MIB)),
    Parameter(STAGING_BYTES, "staging ring of the client that puts", (8 * MIB, 32 * MIB, 64 * MIB, 128 * MIB)),
    Parameter("mover.high_watermark", "demotion starts when DRAM is this full", (0.75, 0.8, 0.85, 0.9, 0.95)),
    Parameter("mover.low_watermark", "and goes on to here", (0.3, 0.5, 0.7, 0.8, 0.85)),
    Parameter("mover.batch_share", "share of DRAM demoted in one batch", (0.01, 0.02, 0.05, 0.1, 0.2)),
    Parameter("mover.forecast_half_life_s", "decay of the rate that the forecast goes by; 0: none", (0, 1, 5, 20, 60)),
    Parameter(
        "prefetch.inflight_bytes",
        "read at once for nobody who waits: the depth of a prefetch",
        (1 * MIB, 8 * MIB, 32 * MIB, 64 * MIB, 128 * MIB),
    ),
    Parameter("nvme.io_threads", "threads per path; 0: by the number of CPUs", (0, 1, 2, 4, 8)),
)


@dataclass(frozen=True)
class Setting:
    """One parameter at one value; `parameter` is None where everything has its default."""

    parameter: Parameter | None = None
    value: float = 0.0

    def of(self, name: str) -> float:
        """The value of a parameter of the client."""
        return self.value if self.parameter is not None and self.parameter.name == name else OF_THE_CLIENT[name]

    def options(self) -> dict[str, str]:
        """What the daemon is told."""
        if self.parameter is None or self.parameter.name in OF_THE_CLIENT:
            return {}
        return {self.parameter.name: self.parameter.text(self.value)}

    def __str__(self) -> str:
        return "defaults" if self.parameter is None else f"{self.parameter.name} {self.parameter.label(self.value)}"


BASE: Final = Setting()


@dataclass(frozen=True)
class Scale:
    """How large and how long each cell is."""

    dram_bytes: int = 768 * MIB
    nvme_bytes: int = 1536 * MIB
    chain_bytes: int = 128 * MIB
    """What is put and got at once in DRAM, got from NVMe, and prefetched (twice)."""
    window_s: float = 1.5
    repeats_within: int = 5
    """Puts and gets behind each median of a cell."""


QUICK: Final = Scale(384 * MIB, 1024 * MIB, 64 * MIB, 0.4, 3)
QUICK_PARAMETERS: Final = tuple(
    name for name in (p.name for p in PARAMETERS) if name not in (STAGING_BYTES, "mover.low_watermark")
)


def chosen(names: Sequence[str], *, extremes_only: bool = False) -> list[Parameter]:
    """The parameters of these names; with `extremes_only` the default and the values farthest from it.

    Raises ValueError that lists the names where there is no such parameter.
    """
    known = {parameter.name: parameter for parameter in PARAMETERS}
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no parameter; there are {', '.join(known)}")
    picked = [known[name] for name in dict.fromkeys(names)]
    return [_extremes(parameter) for parameter in picked] if extremes_only else picked


def _extremes(parameter: Parameter) -> Parameter:
    others = [value for value in parameter.values if value != parameter.default]
    values = tuple(sorted({others[0], parameter.default, others[-1]}))
    return Parameter(parameter.name, parameter.meaning, values)


def settings(parameters: Sequence[Parameter]) -> list[Setting]:
    """One cell each, the defaults first: they are measured once for all parameters."""
    others = [Setting(p, value) for p in parameters for value in p.values if value != p.default]
    return [BASE, *others]
