"""The benches of GPUs on the fake driver: all of it runs, and no block is wrong. On a card with `-m gpu`."""

import subprocess
import sys

import pytest

from bench import gpu, gpu_check
from tests import fakecuda

needs_compiler = pytest.mark.skipif(bool(fakecuda.MISSING), reason=fakecuda.MISSING)


@needs_compiler
@pytest.mark.timeout(1000)
def test_every_stage_of_the_check_runs_on_the_fake(monkeypatch):
    for name in ("KVSTORED_LIBCUDA", "FAKECUDA_DIR", "FAKECUDA_MEM_MB"):
        monkeypatch.setenv(name, "")  # back as it was afterwards, whatever `check` sets
    monkeypatch.setenv("FAKECUDA_MEM_MB", "2048")
    monkeypatch.setattr(gpu_check, "STAGE_MAX_S", 300.0)  # they bound a card that hangs, not a busy machine
    monkeypatch.setattr(gpu_check, "BUDGET_S", 900.0)
    stages = [name for name in gpu_check.STAGES if name != "torch"]
    results = gpu_check.check("fake", stages, small=True)
    assert not [f"{name}: {result['failed']}" for name, result in results.items() if "failed" in result]
    assert results["ipc"]["bytes_after_it"] is True
    assert results["ipc"]["held_after_the_close_bytes"] == 4096, "its own 4 KiB, whose handle it tried to open"
    (values,) = results["end_to_end"].values()
    assert set(values) == {figure.key for figure in gpu.FIGURES}
    assert values["wrong_blocks"] == 0


def test_a_stage_that_fails_says_so_and_takes_nothing_along(monkeypatch):
    monkeypatch.setenv("KVSTORED_LIBCUDA", "libcuda-of-nowhere.so.1")
    result = gpu_check.run_stage("environment", 300.0, small=True)
    assert "cannot be loaded" in result["failed"]


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_a_real_card_passes_the_check(monkeypatch):
    monkeypatch.delenv("KVSTORED_LIBCUDA", raising=False)
    # In a process of its own: this one may have loaded the fake by the same name.
    probe = subprocess.run([sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"], capture_output=True)
    if probe.returncode:
        pytest.skip(f"there is no CUDA driver: {probe.stderr.decode().splitlines()[-1]}")
    results = gpu_check.check("cuda", [name for name in gpu_check.STAGES if name != "torch"])
    assert not [f"{name}: {result['failed']}" for name, result in results.items() if "failed" in result]
