"""Memory nodes and the GPUs on them, read from trees as sysfs has them."""

import os
import subprocess
import sys

import pytest

from kvstored.device import numa


def machine(root, cpus, devices):
    """A tree of nodes with these lists of CPUs, and PCI devices: vendor, class, node."""
    for node, listed in cpus.items():
        path = root / f"devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(listed + "\n")
    for address, (vendor, kind, node) in devices.items():
        path = root / "bus/pci/devices" / address
        path.mkdir(parents=True)
        (path / "vendor").write_text(vendor + "\n")
        (path / "class").write_text(kind + "\n")
        if node is not None:
            (path / "numa_node").write_text(f"{node}\n")
    return root


GPU, NIC = ("0x10de", "0x030200"), ("0x15b3", "0x020700")
DEVICES = {
    "0000:3b:00.0": (*GPU, 1),
    "0000:5e:00.0": (*NIC, 0),
    "0000:86:00.0": ("0x10de", "0x030000", 2),
    "0000:86:00.1": ("0x10de", "0x040300", 0),  # its sound
    "0000:af:00.0": (*GPU, -1),
    "0000:b0:00.0": (*GPU, None),
}


def test_nodes_and_the_gpus_on_them(tmp_path):
    sysfs = machine(tmp_path, {0: "0-3,8", 1: "4-7", 2: "9", 3: ""}, DEVICES)
    assert numa.nodes(sysfs) == {0: {0, 1, 2, 3, 8}, 1: {4, 5, 6, 7}, 2: {9}}, "a node without CPUs is no place"
    assert numa.gpu_nodes(sysfs) == [1, 2]
    assert numa.places(sysfs) == {1: {4, 5, 6, 7}, 2: {9}}
    assert [numa.node_of_pci(address, sysfs) for address in ("0000:3B:00.0", "0000:AF:00.0", "0000:B0:00.0")] == [
        1,
        -1,
        -1,
    ]


@pytest.mark.parametrize("cpus", [{}, {0: "0-7"}, {0: "0-7", 1: ""}, {0: "nonsense", 1: "0-"}])
def test_where_there_are_not_several_nodes_nothing_is_done(tmp_path, cpus):
    sysfs = machine(tmp_path, cpus, DEVICES)
    assert numa.places(sysfs) == {}
    before = os.sched_getaffinity(0)
    assert not numa.run_on(0, sysfs)
    with numa.near(numa.places(sysfs), 3):
        assert os.sched_getaffinity(0) == before


def test_a_thread_is_next_to_the_gpus_by_turns_and_then_back():
    before = os.sched_getaffinity(0)
    one, other = frozenset([min(before)]), frozenset([max(before)])
    for turn, expected in enumerate((one, other, one)):
        with numa.near({0: one, 5: other}, turn):
            assert os.sched_getaffinity(0) == expected
        assert os.sched_getaffinity(0) == before
    with numa.near({0: frozenset([4096])}, 0):
        assert os.sched_getaffinity(0) == before, "what is not ours is not taken"


def test_a_process_runs_on_its_gpus_node(tmp_path):
    mine = min(os.sched_getaffinity(0))
    machine(tmp_path, {0: str(mine), 1: "4096"}, {})
    code = f"""
import os
from pathlib import Path
import re
from kvstored.device import numa
sysfs = Path({str(tmp_path)!r})
print(numa.run_on(7, sysfs), numa.run_on(1, sysfs), numa.run_on(0, sysfs), os.sched_getaffinity(0) == {{{mine}}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True", "True"]
