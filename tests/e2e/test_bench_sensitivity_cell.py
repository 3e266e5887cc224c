"""One cell of the sensitivity bench with small tiers: every metric is there, and no byte is wrong."""

from dataclasses import replace

import pytest

from bench.common import MIB
from bench.sensitivity_cell import METRICS, measure
from bench.sensitivity_settings import QUICK, Setting, chosen
from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.waiting import PATIENCE_S


@pytest.mark.timeout(400)
def test_a_cell_has_every_metric_beside_its_ceiling(tmp_path, monkeypatch):
    """Room is waited for longer than by the bench: no disk is so slow that it refuses."""
    limits = {"limits.put_wait_max_s": str(PATIENCE_S)}
    monkeypatch.setattr("bench.pressure._PUT_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(
        "bench.sensitivity_cell.DaemonProcess", lambda options, **more: DaemonProcess({**options, **limits}, **more)
    )
    small = replace(
        QUICK, dram_bytes=96 * MIB, nvme_bytes=256 * MIB, chain_bytes=16 * MIB, window_s=0.2, repeats_within=1
    )
    (staging,) = chosen(["staging_bytes"])
    samples = measure(Setting(staging, 8 * MIB), small, tmp_path)
    assert set(samples) == {metric.key for metric in METRICS}
    assert samples.pop("refused").value == 0
    assert all(sample.value > 0 and sample.ceiling > 0 for sample in samples.values())
    assert 20 < samples["private"].value < 1000
    assert 8 < samples["staging"].value < 16  # the rings of those who only read are not there
    assert not list(tmp_path.iterdir())


def test_a_setting_of_the_daemon_reaches_it(tmp_path):
    (threads,) = chosen(["nvme.io_threads"])
    with pytest.raises(Exception, match=r"nvme\.io_threads"):
        measure(Setting(threads, 65), QUICK, tmp_path)
