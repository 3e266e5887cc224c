"""`kvstorectl explain` for prompts and namespaces: what it reads, what it asks, what it says."""

import io
import json
import sys

import pytest
from fake_daemon import PATIENT
from kvstored_client import Client, ctl
from kvstored_client.ctl.connection import Exit, Failure
from kvstored_client.ctl.token_files import read_spec, read_tokens
from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec
from patient_ctl import be_patient

from kvstored.testing.daemon_process import DaemonProcess

TOKENS = list(range(100, 164))
SIZE = 16
BLOCK_BYTES = 4096


def run(*arguments):
    with pytest.raises(SystemExit) as stopped:
        ctl.main(arguments)
    return int(stopped.value.code or 0)


def spec(**fields):
    return NamespaceSpec(**{"model": "m", "dtype": "bf16", "block_tokens": SIZE, **fields})


def options(made):
    return [f"--field={field.name}={value}" for field, value in made.ListFields()]


# ---- files ----


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3]",
        "[[1, 2, 3]]",
        '{"token_ids": [1, 2, 3]}',
        '{"attention_mask": [1], "input_ids": [[1, 2, 3]]}',
        "1 2 3",
        "1\n2\n3\n",
        "1, 2,\t3",
    ],
)
def test_tokens_are_read_as_json_or_text(tmp_path, text):
    (tmp_path / "t").write_text(text)
    assert read_tokens(tmp_path / "t") == [1, 2, 3]


def test_tokens_are_read_from_standard_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[4, 5]")))
    assert read_tokens(tmp_path.__class__("-")) == [4, 5]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[1, 2.5]",
        "[true]",
        '["1"]',
        "[[1], [2]]",
        "{}",
        '{"token_ids": 5}',
        "one two",
        "1 -2",
        "[-1]",
        "[1",
        "²",
    ],
)
def test_what_are_no_tokens_is_refused_with_the_file_named(tmp_path, text):
    (tmp_path / "wrong").write_text(text)
    with pytest.raises(Failure, match="wrong") as failed:
        read_tokens(tmp_path / "wrong")
    assert failed.value.code == Exit.USAGE


def test_a_file_that_is_no_text_or_not_there_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("binary", "absent"):
        with pytest.raises(Failure, match=name):
            read_tokens(tmp_path / name)


def test_a_spec_comes_from_a_file_and_fields_win(tmp_path):
    (tmp_path / "s").write_text(json.dumps({"model": "m", "dtype": "bf16", "rope_theta": 1e6, "layers": 4}))
    made = read_spec(None, tmp_path / "s", ["dtype=fp16"])
    assert made == NamespaceSpec(model="m", dtype="fp16", rope_theta=1e6, layers=4)
    assert read_spec(None, None, ["model=x"]) == NamespaceSpec(model="x")
    assert read_spec(None, None, []) is None


def test_a_spec_comes_from_a_models_directory(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 2, "dtype": "bfloat16"})
    )
    made = read_spec(tmp_path, None, ["model_version=v", "block_tokens=32", "layout=x"])
    assert (made.layers, made.dtype, made.model_version, made.block_tokens, made.layout) == (
        2,
        "bfloat16",
        "v",
        32,
        "x",
    )
    with pytest.raises(Failure, match="model_version"):
        read_spec(tmp_path, None, [])


@pytest.mark.parametrize("text", ["[]", "{", '{"modle": "m"}', '{"layers": "many"}'])
def test_what_is_no_spec_is_refused(tmp_path, text):
    (tmp_path / "s").write_text(text)
    with pytest.raises(Failure) as failed:
        read_spec(None, tmp_path / "s", [])
    assert failed.value.code == Exit.USAGE


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--tokens", "t"),
        ("00" * 32, "--namespace", "00" * 16),
        ("00" * 32, "--tokens", "t"),
        ("--namespace", "00" * 16, "--field", "model=m"),
        ("--model", "d", "--spec", "s"),
        ("--namespace", "00"),
        ("--field", "model=m", "--block-tokens", "0"),
    ],
)
def test_it_says_what_to_give(capsys, arguments):
    assert run("explain", *arguments) == Exit.USAGE
    assert capsys.readouterr().err


# ---- with a daemon ----


@pytest.fixture(scope="module")
def daemon():
    with DaemonProcess({"dram.capacity_bytes": "16MiB"}) as process:
        yield process


@pytest.fixture
def real(daemon, monkeypatch):
    monkeypatch.setenv("KVSTORED_ADDRESS", daemon.address)
    be_patient(monkeypatch)
    return daemon


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS + [7] * 5))
    return str(path)


def put(daemon, made, count, tokens=TOKENS):
    """The first blocks of the tokens."""
    with Client(daemon.address, **PATIENT) as client:
        namespace = client.namespace(made)
        hashes = namespace.chain(tokens)[:count]
        result = client.put(namespace, hashes, [bytes(BLOCK_BYTES)] * count, wait_s=60)
        assert result.stored == count, result
        return hashes


def answer_of(capsys, *arguments):
    code = run("explain", *arguments, "--json")
    return code, json.loads(capsys.readouterr().out)


def test_a_prompt_that_is_stored_hits(real, capsys, tokens):
    made = spec(extra="hit")
    put(real, made, 4)
    code, answer = answer_of(capsys, "--tokens", tokens, *options(made))
    assert code == Exit.OK
    assert (answer["verdict"], answer["hit_blocks"], answer["blocks"], answer["tokens"]) == ("hit", 4, 4, 69)
    assert answer["elsewhere"] is None
    assert run("explain", "--tokens", tokens, *options(made)) == Exit.OK
    said = capsys.readouterr().out
    assert "all 4 blocks (64 tokens) are stored (4 in DRAM)" in said
    assert "the last 5 tokens fill no block" in said


def test_a_prompt_that_breaks_is_told_where_and_why(real, capsys, tokens):
    made = spec(extra="break")
    hashes = put(real, made, 4)
    with Client(real.address, **PATIENT) as client:
        client.delete(client.namespace(made), hashes[2:3])
    code, answer = answer_of(capsys, "--tokens", tokens, *options(made))
    assert code == Exit.NO
    assert (answer["verdict"], answer["hit_blocks"], answer["missing"]) == ("deleted", 2, hashes[2].hex())
    assert (answer["missing_blocks"], answer["stored_after"]) == ({"deleted": 1}, 1)
    assert run("explain", "--tokens", tokens, "--namespace", answer["namespace"]) == Exit.NO
    said = capsys.readouterr().out
    assert "deleted: the first 2 of 4 blocks (32 of 69 tokens) are stored (2 in DRAM)" in said
    assert "1 blocks behind the break are stored" in said


@pytest.mark.parametrize("known", [False, True])
def test_a_prompt_under_a_namespace_with_other_hashes_is_found_there(real, capsys, tokens, known):
    ours, theirs = spec(extra=f"found {known}"), spec(extra=f"found {known}", tokenizer_version="2")
    put(real, spec(extra=f"found {known}", tokenizer_version="3", dtype="fp8"), 4)
    put(real, theirs, 3)
    if known:
        put(real, ours, 1)
    code, answer = answer_of(capsys, "--tokens", tokens, *options(ours))
    assert code == Exit.NO
    assert (answer["verdict"], answer["known"], answer["hit_blocks"]) == ("namespace_differs", known, int(known))
    assert answer["elsewhere"]["tokens"] == 48
    assert answer["elsewhere"]["differences"] == [{"field": "tokenizer_version", "ours": "unset", "theirs": "2"}]
    assert run("explain", "--tokens", tokens, *options(ours)) == Exit.NO
    said = capsys.readouterr().out
    assert "48 of the tokens are stored under a namespace that differs in: tokenizer_version unset / 2" in said


def test_a_prompt_under_other_sizes_of_blocks_or_another_shard_is_found_there(real, capsys, tokens):
    ours = spec(extra="sizes")
    put(real, spec(extra="sizes", block_tokens=32), 2)
    assert answer_of(capsys, "--tokens", tokens, *options(ours))[1]["elsewhere"]["tokens"] == 64
    shard = spec(extra="shards")
    put(real, spec(extra="shards", tp_rank=1, tp_size=2), 2)
    put(real, shard, 1)
    found = answer_of(capsys, "--tokens", tokens, *options(shard))[1]
    assert (found["verdict"], found["hit_blocks"], found["elsewhere"]["tokens"]) == ("namespace_differs", 1, 32)


def test_a_nearer_namespace_that_has_no_more_than_ours_is_passed_over(real, capsys, tokens):
    ours = spec(model="more")
    put(real, ours, 2)
    put(real, spec(model="more", tokenizer_version="2"), 2)
    put(real, spec(model="more", tokenizer_version="3", layout="x"), 3)
    answer = answer_of(capsys, "--tokens", tokens, *options(ours))[1]
    assert (answer["hit_blocks"], answer["elsewhere"]["tokens"]) == (2, 48)
    assert [each["field"] for each in answer["elsewhere"]["differences"]] == ["layout", "tokenizer_version"]


def test_a_prompt_without_full_blocks_or_their_size_is_refused(real, capsys, tmp_path, tokens):
    (tmp_path / "short").write_text("1 2 3")
    assert run("explain", "--tokens", str(tmp_path / "short"), *options(spec())) == Exit.USAGE
    assert "fill no block of 16" in capsys.readouterr().err
    assert run("explain", "--tokens", tokens, "--field", "model=sizeless") == Exit.USAGE
    assert "--block-tokens" in capsys.readouterr().err
    assert run("explain", "--tokens", tokens, "--field", "model=sizeless", "--block-tokens", "8") == Exit.NO
    assert run("explain", "--tokens", tokens, "--namespace", "00" * 16) == Exit.NO
    assert "digest" in capsys.readouterr().err


def test_a_namespace_is_known_or_its_nearest_is_named(real, capsys):
    put(real, spec(model="near"), 3)
    code, answer = answer_of(capsys, *options(spec(model="near")))
    assert (code, answer["known"], answer["dram_blocks"]) == (Exit.OK, True, 3)
    assert run("explain", *options(spec(model="near", dtype="fp16"))) == Exit.NO
    said = capsys.readouterr().out
    assert "the nearest namespace of this model differs in: dtype fp16 / bf16" in said
    assert answer["digest"] in said
    assert run("explain", "--namespace", answer["digest"]) == Exit.OK


def test_status_shows_misses_by_reason(real, capsys):
    with Client(real.address, **PATIENT) as client:
        namespace = client.namespace(spec(model="status"))
        assert client.lookup(namespace, namespace.chain(TOKENS)).prefix_blocks == 0
    assert run("status") == 0
    assert "never_stored " in capsys.readouterr().out
