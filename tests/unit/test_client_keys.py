import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstored_client import keys

VECTORS = Path(__file__).parents[2] / "proto" / "vectors" / "chain.json"
SEED = bytes(range(16))


@pytest.mark.parametrize("case", json.loads(VECTORS.read_text())["cases"], ids=lambda case: case["name"])
def test_chains_match_the_published_vectors(case):
    extra = case["extra"]
    hashes = keys.chain(
        bytes.fromhex(case["seed"]),
        case["token_ids"],
        case["block_tokens"],
        bytes.fromhex(case["parent"]),
        bytes.fromhex(extra) if isinstance(extra, str) else [bytes.fromhex(e) for e in extra],
    )
    assert [h.hex() for h in hashes] == case["hashes"]


@given(st.lists(st.integers(0, 1 << 33), max_size=40), st.integers(1, 5), st.integers(0, 8))
def test_a_chain_made_in_two_parts_is_the_chain_made_at_once(tokens, block_tokens, blocks):
    cut = min(blocks, len(tokens) // block_tokens)
    first = keys.chain(SEED, tokens[: cut * block_tokens], block_tokens)
    rest = keys.chain(SEED, tokens[cut * block_tokens :], block_tokens, first[-1] if first else b"")
    assert first + rest == keys.chain(SEED, tokens, block_tokens)


def test_one_changed_token_changes_every_hash_from_there_on():
    tokens = list(range(12))
    changed = [*tokens[:5], 99, *tokens[6:]]
    before, after = keys.chain(SEED, tokens, 3), keys.chain(SEED, changed, 3)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False]


def test_lists_arrays_and_tensors_of_ids_have_the_same_hashes():
    torch = pytest.importorskip("torch")
    ids = [5, 6, 7, 8]
    expected = keys.chain(SEED, ids, 2)
    assert keys.chain(SEED, np.array(ids, np.int64), 2) == expected
    assert keys.chain(SEED, torch.tensor(ids), 2) == expected
    assert keys.chain(SEED, iter(ids), 2) == expected


@pytest.mark.parametrize("ids", [[-1, 2], [2**33, -1]])
def test_negative_ids_are_refused(ids):
    with pytest.raises(ValueError, match="negative"):
        keys.chain(SEED, ids, 2)


def test_too_few_extras_are_refused():
    with pytest.raises(ValueError, match="3 blocks, and extra for 1"):
        keys.chain(SEED, range(6), 2, extra=[b"x"])


def test_hashes_travel_packed_and_come_apart_again():
    packed = keys.pack([b"a" * 8, b"b" * 8, b"c" * 8])
    assert (packed.data, packed.hash_bytes, packed.length) == (b"a" * 8 + b"b" * 8 + b"c" * 8, 8, 3)
    assert packed.one(1) == b"b" * 8
    assert packed.part(1, 9) == keys.Packed(b"b" * 8 + b"c" * 8, 8, 2)


@pytest.mark.parametrize(
    ("hashes", "error"),
    [
        ([b"a" * 8, b"b" * 9], ValueError),
        ([b"a" * 8, b"b" * 9, b"c" * 7], ValueError),
        ([b"short"], ValueError),
        ([b"l" * 65], ValueError),
        (["text" * 4], TypeError),
        (b"a" * 32, TypeError),
    ],
)
def test_hashes_that_make_no_sense_are_refused(hashes, error):
    with pytest.raises(error):
        keys.pack(hashes)
