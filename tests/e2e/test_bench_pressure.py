"""The pressure bench with small tiers: every put finds room, and every figure is there."""

from argparse import Namespace

import pytest

from bench.common import MIB
from bench.pressure import FIGURES, PressureBench
from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.waiting import PATIENCE_S


@pytest.mark.timeout(300)
def test_puts_into_a_full_tier_are_never_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("bench.pressure._PUT_WAIT_S", PATIENCE_S)
    settings = {
        "limits.put_wait_max_s": str(PATIENCE_S),
        "dram.capacity_bytes": str(64 * MIB),
        "dram.segment_bytes": str(8 * MIB),
        "nvme.capacity_bytes": str(512 * MIB),
    }
    arguments = Namespace(seconds=0.3, windows=1, block_bytes=128 << 10, dram_mib=64)
    with DaemonProcess(settings, nvme=True, parent_directory=tmp_path) as daemon:
        values = PressureBench(daemon, arguments).run()
    assert set(values) == {figure.key for figure in FIGURES} - {"foreign_cpu_share"}
    assert values["refused_blocks"] == 0
    assert values["put_blocks"] > 0
    assert values["lookup_p99_ratio"] > 0
