"""Memory nodes of the machine, and which of them GPUs hang on, read from sysfs. Without several nodes all is a no-op.

Memory lies on the node of the thread that touches it first, so whoever populates the tier runs on the CPUs of
the GPUs' nodes meanwhile, and a device worker on its GPU's for good: no copy crosses from one node to another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")
_NVIDIA: Final = "0x10de"
_CLASSES: Final = ("0x0300", "0x0302")  # display and 3D controllers
UNKNOWN: Final = -1

Cpus = frozenset[int]


def nodes(sysfs: Path = SYSFS) -> dict[int, Cpus]:
    """CPUs of each node; of nodes that have some."""
    found = {}
    for path in sorted(sysfs.glob("devices/system/node/node[0-9]*")):
        cpus = _listed(_text(path / "cpulist"))
        if cpus:
            found[int(path.name.removeprefix("node"))] = cpus
    return found


def node_of_pci(address: str, sysfs: Path = SYSFS) -> int:
    """The node that a PCI device hangs on (`0000:3b:00.0`, in any case); UNKNOWN where nobody says."""
    text = _text(sysfs / "bus/pci/devices" / address.lower() / "numa_node")
    return int(text) if text.lstrip("-").isdigit() else UNKNOWN


def gpu_nodes(sysfs: Path = SYSFS) -> list[int]:
    """Nodes that NVIDIA's GPUs hang on, in order; none where the machine has but one node."""
    there = nodes(sysfs)
    if len(there) < 2:
        return []
    found = set()
    for path in sysfs.glob("bus/pci/devices/*"):
        if _text(path / "vendor") == _NVIDIA and _text(path / "class").startswith(_CLASSES):
            found.add(node_of_pci(path.name, sysfs))
    return sorted(found & there.keys())


def places(sysfs: Path = SYSFS) -> dict[int, Cpus]:
    """CPUs of each node with a GPU: where memory for GPUs is best populated, in turns."""
    there = nodes(sysfs)
    return {node: there[node] for node in gpu_nodes(sysfs)}


def run_on(node: int, sysfs: Path = SYSFS) -> bool:
    """Let this process run on the node's CPUs alone, where there are several nodes and this one is known."""
    there = nodes(sysfs)
    return len(there) > 1 and node in there and _move(there[node])


@contextmanager
def near(places: Mapping[int, Cpus], turn: int) -> Iterator[None]:
    """This thread on the CPUs of one of the nodes, by turns, and back; where there are none it stays."""
    if not places:
        yield
        return
    before = os.sched_getaffinity(0)
    _move(list(places.values())[turn % len(places)] & before)
    try:
        yield
    finally:
        _move(before)


def _move(cpus: Cpus | set[int]) -> bool:
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError):  # none of them is allowed to us
        return False
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _listed(text: str) -> Cpus:
    """`0-3,8` as numbers; nothing where it makes no sense."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return frozenset()
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
