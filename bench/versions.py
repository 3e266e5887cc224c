"""This code beside that of an earlier commit: what a get, a put and a lookup cost now, and what they did then.

Two daemons and two clients, each pair of one version, take turns on one machine: a round of every cell of one, the
same of the other, the order changing. So a slow spell of the machine hits both of a pair, and what is left is the
median of the ratios of pairs. The earlier code is unpacked from the checkout's history and runs on this Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from bench.common import MIB, Figure, Value, Values, emit, median, median_ratio, parser, progress, run
from bench.load import ForeignLoad
from bench.past_code import ROOT, unpack
from kvstored.testing.kept_daemon import KeptDaemon

CELLS: Final = {
    "lookup512_us": "lookup of a resident chain of 512, end to end, us",
    "get512_us": "get and release of that chain, no copy, us",
    "get1_us": "get and release of one resident block, no copy, us",
    "put_ratio": "time of a put of blocks of 512 KiB / time to memmove them",
    "get_ratio": "time of a get of them into the caller's buffers / time to memmove them from where they are mapped",
}
FIGURES: Final = (
    *(
        Figure(f"{cell}_{which}", f"{meaning}: {code}")
        for cell, meaning in CELLS.items()
        for which, code in (("old", "the earlier code"), ("new", "this code"))
    ),
    *(Figure(f"{cell}_new_to_old", "new / old, median of pairs", "<= 1.03") for cell in CELLS),
    Figure("wrong_blocks", "blocks delivered with other bytes than were put", "== 0"),
    Figure("against", "the earlier commit"),
    Figure("repeats", "pairs behind each median"),
    Figure("foreign_cpu_share", "share of all CPUs that other processes of the machine used meanwhile"),
)
PAIRS_PER_START: Final = 4  # then both daemons are started anew
PARTS: Final = ("kvstored", "client", "proto")


class Version:
    """A daemon and a client of one version's code (`source` None: this one's)."""

    def __init__(self, stack: ExitStack, source: Path | None, mib: int, calls: int) -> None:
        settings = {
            "dram.capacity_bytes": str(3 * mib * MIB + 256 * MIB),
            "limits.staging_bytes_per_session": str(2 * mib * MIB + 64 * MIB),
        }
        daemon = KeptDaemon(settings)
        daemon.source = source
        stack.enter_context(daemon)
        self._code = (source or ROOT) / "client"
        paths = [str(self._code), str((source or ROOT) / "proto")]
        # Without -P the directory of the script would come first, and modules there are called `io`, for one.
        script = str(ROOT / "bench" / "versions_client.py")
        self._client = subprocess.Popen(
            [sys.executable, "-P", script, daemon.address, str(mib), str(calls)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        stack.callback(self._client.wait)
        stack.callback(self._client.kill)

    def ready(self) -> Self:
        """Wait until its blocks are there and every cell has run once. Raises RuntimeError where it is other code."""
        assert self._client.stdout is not None, "piped"
        code = self._client.stdout.readline().strip()
        if Path(code) != self._code:
            raise RuntimeError(f"the client runs the code in {code or 'nowhere'}, not that in {self._code}")
        return self

    def round(self) -> Mapping[str, float]:
        """One round of every cell."""
        assert self._client.stdin is not None, "piped"
        print(file=self._client.stdin, flush=True)
        return self._read()

    def wrong_blocks(self) -> int:
        """After the last round: how many blocks were not what was put."""
        assert self._client.stdin is not None, "piped"
        self._client.stdin.close()
        return int(self._read()["wrong_blocks"])

    def _read(self) -> Mapping[str, float]:
        assert self._client.stdout is not None, "piped"
        line = self._client.stdout.readline()
        if not line:
            raise RuntimeError(f"the client ended with exit status {self._client.wait()}")
        found: Mapping[str, float] = json.loads(line)
        return found


def measure(against: str, repeats: int, mib: int, calls: int) -> Values:
    """All figures but the load. Raises LookupError where the history has no such commit."""
    rounds: dict[str, list[Mapping[str, float]]] = {"old": [], "new": []}
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="kvstored-past-") as directory:
        source = unpack(against, Path(directory), *PARTS)
        starts = max(1, repeats // PAIRS_PER_START)
        for start in range(starts):
            # The memory that comes second is slower to copy, by a tenth: so each is the second as often as the first.
            order = ("old", "new") if start % 2 else ("new", "old")
            with ExitStack() as stack:
                versions = {which: Version(stack, source if which == "old" else None, mib, calls) for which in order}
                for version in versions.values():
                    version.ready()
                for repeat in range(start * repeats // starts, (start + 1) * repeats // starts):
                    progress(f"pair {repeat + 1} of {repeats}")
                    for which in ("old", "new") if repeat % 2 else ("new", "old"):
                        rounds[which].append(versions[which].round())
                wrong += sum(version.wrong_blocks() for version in versions.values())
    values: dict[str, Value] = {"wrong_blocks": wrong, "against": against, "repeats": repeats}
    for cell in CELLS:
        old, new = ([each[cell] for each in rounds[which]] for which in ("old", "new"))
        values |= {f"{cell}_old": median(old), f"{cell}_new": median(new)}
        values[f"{cell}_new_to_old"] = median_ratio(new, old)
    return values


def main() -> int:
    """Entry point; exit status 1 where a block had wrong bytes."""
    built = parser("bench.versions", "This code beside that of an earlier commit, interleaved.", FIGURES)
    built.add_argument("--against", required=True, metavar="COMMIT", help="the earlier code, as git names it")
    built.add_argument("--repeats", type=int, default=32, help="pairs of rounds")
    built.add_argument("--mib", type=int, default=64, help="MiB moved by each get and put")
    built.add_argument("--calls", type=int, default=200, help="calls behind each median of a round")
    arguments = built.parse_args()
    load = ForeignLoad()
    try:
        values = measure(arguments.against, arguments.repeats, arguments.mib, arguments.calls)
    except LookupError as error:
        built.error(str(error))
    values = {**values, "foreign_cpu_share": load.share()}
    emit(values, FIGURES, arguments.json)
    return int(bool(values["wrong_blocks"]))


if __name__ == "__main__":
    run(main)
