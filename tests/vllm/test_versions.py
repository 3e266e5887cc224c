"""The same connector in an older vLLM: `make venv-vllm` puts one beside the other's packages."""

import sys
from pathlib import Path

import pytest

from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.vllm_process import VLLMProcess as Engine
from tests.vllm import models
from tests.vllm.test_engine import FULL, PROMPTS, SETTINGS, store

OLDER = Path(sys.prefix) / "vllm-0.30"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not OLDER.is_dir(), reason="vLLM 0.30 is not there: make venv-vllm"),
]


@pytest.mark.parametrize("windows", [False, True])
def test_an_older_engine(tmp_path, windows):
    model = models.tiny_gemma(tmp_path / "tiny", 128) if windows else models.tiny_llama(tmp_path / "tiny")
    environ = {"PYTHONPATH": str(OLDER)}
    with Engine(model, environ=environ) as alone:
        expected = alone.generate(PROMPTS)["outputs"]
    with DaemonProcess(SETTINGS) as daemon:
        with Engine(model, environ=environ, kvstored=store(daemon)) as engine:
            cold = engine.generate(PROMPTS)
            assert (cold["outputs"], cold["cached"]) == (expected, [0, 0, 0])
            assert engine.do("settle")["reset"]
        with Engine(model, environ=environ, kvstored=store(daemon)) as engine:
            warm = engine.generate(PROMPTS)
            assert (warm["outputs"], warm["cached"]) == (expected, [FULL] * 3)
