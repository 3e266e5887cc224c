"""What most tests with a real vLLM start from. Imports at their use: without vLLM these modules are skipped."""

import pytest

from kvstored.testing.daemon_process import DaemonProcess


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(directory):
    from tests.vllm import models

    return models.tiny_llama(directory / "tiny")


@pytest.fixture
def daemon():
    from tests.vllm.test_engine import SETTINGS

    with DaemonProcess(SETTINGS) as process:
        yield process
