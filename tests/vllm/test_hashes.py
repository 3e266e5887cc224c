"""What the connector relies on vLLM's block hashes for, in the vLLM that is installed, without an engine."""

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK = 32
TOKENS = list(range(100, 100 + 4 * BLOCK))


def hashes(**request):
    """The block hashes of a request of four blocks."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    given = {"prompt_token_ids": TOKENS, "sampling_params": SamplingParams(max_tokens=1), **request}
    return Request("r", pooling_params=None, block_hasher=get_request_block_hasher(BLOCK, sha256), **given).block_hashes


def image(identifier, offset=BLOCK, length=10):
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    position = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=position)


def lora(name, path):
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1, path)


def test_what_separates_from_the_first_block_on():
    made = {
        "nothing": hashes(),
        "a salt": hashes(cache_salt="a"),
        "another": hashes(cache_salt="b"),
        "an adapter": hashes(lora_request=lora("a", "/one")),
        "another's name": hashes(lora_request=lora("b", "/one")),
        "another's path": hashes(lora_request=lora("a", "/two")),
    }
    assert made["nothing"] == hashes()
    for place in range(4):
        assert len({each[place] for each in made.values()}) == len(made)


def test_inputs_other_than_text_separate_from_where_they_lie_on():
    without, one = hashes(), hashes(mm_features=[image("cat")])
    other, moved = hashes(mm_features=[image("dog")]), hashes(mm_features=[image("cat", BLOCK + 3)])
    assert without[0] == one[0] == other[0] == moved[0]  # before the image
    for place in range(1, 4):
        assert len({each[place] for each in (without, one, other, moved)}) == 4


def test_embeddings_in_place_of_tokens_separate():
    given = [hashes(prompt_token_ids=None, prompt_embeds=torch.full((4 * BLOCK, 8), value)) for value in (0.0, 1.0)]
    assert given[0][0] != given[1][0]


def test_a_new_process_starts_from_the_same_hash():
    from vllm.v1.core import kv_cache_utils

    assert kv_cache_utils.DEFAULT_NONE_HASH_SEED  # what the connector takes for the seed where none is set
