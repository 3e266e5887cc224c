"""Namespace digests against vectors that other languages can use too."""

import hashlib
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvstored_proto import namespace
from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

VECTORS = json.loads((Path(__file__).parents[2] / "proto" / "vectors" / "namespace.json").read_text())["vectors"]
FIELDS = [(field.number, field.name) for field in NamespaceSpec.DESCRIPTOR.fields]
SHARD = {"tp_rank", "tp_size", "pp_rank", "pp_size", "kv_group", "kv_group_kind", "window_tokens"}


def by_the_description(tenant, spec, prefix=b"kvstored.namespace.v1\0", omit=frozenset()):
    """The encoding once more, from the words of the module's docstring."""
    out = bytearray(prefix)
    values = {0: tenant} | {number: getattr(spec, name) for number, name in FIELDS if name not in omit}
    for number in sorted(values):
        value = values[number]
        if number and value in ("", 0, 0.0):
            continue
        raw = (
            value.encode() if isinstance(value, str) else struct.pack("<d" if isinstance(value, float) else "<Q", value)
        )
        out += number.to_bytes(2, "little") + len(raw).to_bytes(4, "little") + raw
    return bytes(out)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_vectors(vector):
    spec = NamespaceSpec(**vector["spec"])
    assert namespace.encode(vector["tenant"], spec).hex() == vector["encoding"]
    assert namespace.digest(vector["tenant"], spec).hex() == vector["digest"]
    assert namespace.chain_seed(vector["tenant"], spec).hex() == vector["chain_seed"]


def test_vectors_cover_every_field():
    covered = {name for vector in VECTORS for name in vector["spec"]}
    assert covered == {name for _, name in FIELDS}


def value_of(name):
    kind = type(getattr(NamespaceSpec(), name))
    return {
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        int: st.integers(0, 2**32 - 1),
        float: st.floats(allow_nan=False),
    }[kind]


SPECS = st.fixed_dictionaries({}, optional={name: value_of(name) for _, name in FIELDS}).map(
    lambda fields: NamespaceSpec(**fields)
)
TENANTS = st.text(st.characters(codec="ascii", min_codepoint=97, max_codepoint=122), min_size=1, max_size=8)


@given(TENANTS, SPECS)
def test_the_encoding_is_the_one_described(tenant, spec):
    encoding = by_the_description(tenant, spec)
    assert namespace.encode(tenant, spec) == encoding
    assert namespace.digest(tenant, spec) == hashlib.sha256(encoding).digest()[:16]
    seed = by_the_description(tenant, spec, b"kvstored.chain.v1\0", SHARD)
    assert namespace.chain_seed(tenant, spec) == hashlib.sha256(seed).digest()[:16]


@given(TENANTS, TENANTS, SPECS, SPECS)
def test_what_differs_encodes_differently(tenant, other_tenant, spec, other):
    same = tenant == other_tenant and namespace.fields(spec) == namespace.fields(other)
    assert (namespace.encode(tenant, spec) == namespace.encode(other_tenant, other)) == same


def test_a_field_at_its_default_does_not_change_the_digest():
    assert namespace.digest("t", NamespaceSpec(model="m")) == namespace.digest(
        "t", NamespaceSpec(model="m", layers=0, adapter="", rope_theta=0.0)
    )


def test_text_does_not_run_over_into_the_next_field():
    a, b = NamespaceSpec(model="ab", model_version="c"), NamespaceSpec(model="a", model_version="bc")
    assert namespace.digest("t", a) != namespace.digest("t", b)


def test_fields_for_people_are_those_that_are_set():
    assert namespace.fields(NamespaceSpec(model="m", layers=4, rope_theta=1e4)) == {
        "model": "m",
        "layers": "4",
        "rope_theta": "10000.0",
    }
