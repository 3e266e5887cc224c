"""KV events of the connector, as vLLM would publish them."""

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.vllm_process import VLLMProcess as Engine
from tests.vllm import models
from tests.vllm.test_engine import BLOCK, FULL, PROMPTS, SETTINGS, store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def told(engine):
    """Of each kind of event the blocks: hash, parent, tokens."""
    blocks = {"BlockStored": [], "BlockRemoved": []}
    for kind, hashes, parent, tokens in engine.do("events")["events"]:
        for i, each in enumerate(hashes):
            before = hashes[i - 1] if i else parent
            blocks[kind].append((each, before, tokens[i * BLOCK : (i + 1) * BLOCK]))
    return blocks


def test_events_tell_what_is_stored_and_what_did_not_come(tmp_path):
    model = models.tiny_llama(tmp_path / "tiny")
    options = {"events": True, "actions": "tests.vllm.breakage"}
    prompt = PROMPTS[0]
    with DaemonProcess(SETTINGS) as daemon, Engine(model, kvstored=store(daemon), **options) as engine:
        engine.do("watch_events")
        answer = engine.generate([prompt], tokens=68)
        engine.do("settle")
        stored = told(engine)["BlockStored"]
        text = prompt + answer["outputs"][0]
        ends = (541 + 68 - 1) // BLOCK  # the last token has no KV
        assert [tokens for _, _, tokens in stored] == [text[i * BLOCK : (i + 1) * BLOCK] for i in range(ends)]
        assert [before for _, before, _ in stored] == [None, *(each for each, _, _ in stored[:-1])]

        assert engine.generate([prompt], tokens=1)["cached"] == [FULL]
        engine.do("settle")
        assert told(engine) == {"BlockStored": [], "BlockRemoved": []}  # loaded blocks were stored before

        engine.do("lose_loads")
        assert engine.generate([prompt], tokens=1)["outputs"][0] == answer["outputs"][0][:1]
        engine.do("settle")
        after = told(engine)
        assert [each for each, _, _ in after["BlockRemoved"]] == [each for each, _, _ in stored[: FULL // BLOCK]]
        assert [each for each, _, _ in after["BlockStored"]] == [each for each, _, _ in stored[: FULL // BLOCK]]
