"""`proto/README.md` is enough: digests and hashes once more, from its words alone, sharing no code with the package."""

import hashlib
import json
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstored_client import keys
from kvstored_proto import namespace
from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

PROTO = Path(__file__).parents[2] / "proto"
DOCUMENT = (PROTO / "README.md").read_text()
NAMESPACES = json.loads((PROTO / "vectors" / "namespace.json").read_text())["vectors"]
CHAINS = json.loads((PROTO / "vectors" / "chain.json").read_text())["cases"]

# number, name, type, whether it is of the shard: the rows of the document's table
TABLE = {
    name: (int(number), kind, shard == "yes")
    for number, name, kind, shard in re.findall(
        r"^\| (\d+) \| (\w+) \| (text|integer|double) \| (yes|) ?\|", DOCUMENT, re.M
    )
}


# ---- the other implementation ----


def encode(prefix, tenant, spec, with_shard):
    fields = {0: tenant.encode("utf-8")}
    for name, value in spec.items():
        number, kind, shard = TABLE[name]
        if not value or (shard and not with_shard):
            continue
        if kind == "text":
            fields[number] = value.encode("utf-8")
        else:
            fields[number] = struct.pack("<d", value) if kind == "double" else int(value).to_bytes(8, "little")
    out = prefix
    for number in sorted(fields):
        out += number.to_bytes(2, "little") + len(fields[number]).to_bytes(4, "little") + fields[number]
    return out


def encoding_of(tenant, spec):
    return encode(b"kvstored.namespace.v1\x00", tenant, spec, with_shard=True)


def digest_of(tenant, spec):
    return hashlib.sha256(encoding_of(tenant, spec)).digest()[:16]


def seed_of(tenant, spec):
    return hashlib.sha256(encode(b"kvstored.chain.v1\x00", tenant, spec, with_shard=False)).digest()[:16]


def hashes_of(seed, token_ids, block_tokens, parent, extra):
    previous, hashes = parent if parent else seed, []
    for number in range(len(token_ids) // block_tokens):
        tokens = token_ids[number * block_tokens : (number + 1) * block_tokens]
        width = 8 if any(each >= 2**32 for each in tokens) else 4
        text = len(previous).to_bytes(1, "little") + previous
        text += width.to_bytes(1, "little") + block_tokens.to_bytes(4, "little")
        for each in tokens:
            text += each.to_bytes(width, "little")
        previous = hashlib.sha256(text + (extra[number] if isinstance(extra, list) else extra)).digest()
        hashes.append(previous)
    return hashes


# ---- against the vectors, and against the package ----


@pytest.mark.parametrize("vector", NAMESPACES, ids=lambda vector: vector["name"])
def test_the_document_gives_the_vectors_of_namespaces(vector):
    tenant, spec = vector["tenant"], vector["spec"]
    assert encoding_of(tenant, spec).hex() == vector["encoding"]
    assert digest_of(tenant, spec).hex() == vector["digest"]
    assert seed_of(tenant, spec).hex() == vector["chain_seed"]


@pytest.mark.parametrize("case", CHAINS, ids=lambda case: case["name"])
def test_the_document_gives_the_vectors_of_chains(case):
    seed, parent = bytes.fromhex(case["seed"]), bytes.fromhex(case["parent"])
    extra = case["extra"]
    extra = [bytes.fromhex(each) for each in extra] if isinstance(extra, list) else bytes.fromhex(extra)
    assert [h.hex() for h in hashes_of(seed, case["token_ids"], case["block_tokens"], parent, extra)] == case["hashes"]
    if "spec" in case:
        assert seed_of(case["tenant"], case["spec"]) == seed


def test_the_document_lists_the_fields_of_the_schema():
    kinds = {"text": str, "integer": int, "double": float}
    listed = {name: (number, kinds[kind]) for name, (number, kind, _) in TABLE.items()}
    fields = NamespaceSpec.DESCRIPTOR.fields
    assert listed == {each.name: (each.number, type(getattr(NamespaceSpec(), each.name))) for each in fields}


def test_a_vector_changes_every_field_alone():
    base = next(vector for vector in NAMESPACES if vector["name"] == "only a model")
    alone = [vector for vector in NAMESPACES if vector["name"].startswith("only a model and ")]
    changes = [{name for name, value in vector["spec"].items() if base["spec"].get(name) != value} for vector in alone]
    assert sorted(map(sorted, changes)) == [[name] for name in sorted(TABLE)]
    assert len({vector["digest"] for vector in [base, *alone]}) == len(alone) + 1
    for vector, (changed,) in zip(alone, changes, strict=True):
        assert (vector["chain_seed"] == base["chain_seed"]) == TABLE[changed][2]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = {"text": TEXT, "integer": st.integers(0, 2**32 - 1), "double": st.floats(allow_nan=False)}
SPECS = st.fixed_dictionaries({}, optional={name: VALUES[kind] for name, (_, kind, _) in TABLE.items()})


@given(TEXT, SPECS)
def test_document_and_package_agree_on_any_namespace(tenant, spec):
    message = NamespaceSpec(**spec)
    assert namespace.digest(tenant, message) == digest_of(tenant, spec)
    assert namespace.chain_seed(tenant, message) == seed_of(tenant, spec)


@given(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 200_000) | st.sampled_from([2**32 - 1, 2**32]), max_size=24),
    st.integers(1, 5),
    st.sampled_from([b"", b"p" * 8, b"p" * 32, b"p" * 64]),
    st.binary(max_size=8) | st.lists(st.binary(max_size=8), min_size=24, max_size=24),
)
def test_document_and_package_agree_on_any_chain(token_ids, block_tokens, parent, extra):
    seed = bytes(range(16))
    assert keys.chain(seed, token_ids, block_tokens, parent, extra) == hashes_of(
        seed, token_ids, block_tokens, parent, extra
    )
