"""The restart bench with small tiers: everything is there after each kill, and it says where the time went."""

from argparse import Namespace

import pytest

from bench.common import MIB
from bench.restart import FIGURES, restart, start_times


@pytest.mark.timeout(300)
def test_a_daemon_that_is_killed_has_everything_again(tmp_path):
    sizes = {"dram_bytes": 32 * MIB, "nvme_bytes": 32 * MIB, "small_blocks": 5000}
    values = restart(Namespace(**sizes, repeats=2, directory=tmp_path))
    assert set(values) == {figure.key for figure in FIGURES}
    assert (values["dram_survived"], values["nvme_survived"], values["small_survived"]) == (1.0, 1.0, 1.0)
    assert values["wrong_bytes"] == 0
    steps = sum(values[f"ready_{step}_s"] for step in ("process", "dram", "nvme", "listen"))
    assert steps > 0
    assert not list(tmp_path.iterdir())


def test_the_last_start_counts_and_other_lines_do_not():
    lines = ['{"event": "serving", "start_s": {"dram": 1}}', "x", '{"event": "stopped"}', '{"event": "serving"}']
    assert start_times("\n".join(lines)) == {"dram": 1}
    assert start_times("") == {}
