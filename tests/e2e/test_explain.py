"""Why a miss was one, as an operator asks it: by the command line, of a real daemon, over restarts."""

import json

import pytest
from kvstored_client import Client, ctl
from kvstored_client.ctl.connection import Exit
from kvstored_proto.v1.kvstored_pb2 import NamespaceSpec

from kvstored.testing.daemon_process import DaemonProcess

MIB = 1 << 20
BLOCK_BYTES = 1 * MIB
TOKENS = list(range(1000, 1128))
BLOCK_TOKENS = 16


def spec(**fields):
    return NamespaceSpec(**{"model": "m", "dtype": "bf16", "block_tokens": BLOCK_TOKENS, **fields})


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    settings = {
        "dram.capacity_bytes": str(16 * MIB),
        "nvme.capacity_bytes": str(96 * MIB),
        "nvme.extent_bytes": str(32 * MIB),
    }
    with DaemonProcess(settings, nvme=True, parent_directory=tmp_path) as running:
        monkeypatch.setenv("KVSTORED_ADDRESS", running.address)
        yield running


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps({"input_ids": TOKENS}))
    return str(path)


def put(daemon, made, tokens):
    with Client(daemon.address) as client:
        namespace = client.namespace(made)
        hashes = namespace.chain(tokens)
        buffers = [hash_ * (BLOCK_BYTES // 32) for hash_ in hashes]
        for _ in range(20):  # room comes as fast as NVMe writes
            done = client.put(namespace, hashes, buffers, wait_s=60.0)
            if not done.refused:
                break
        assert not done.refused
        return hashes


def explained(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        ctl.main(["explain", *arguments, "--json", "--timeout", "60"])
    return int(stopped.value.code or 0), json.loads(capsys.readouterr().out)


def fields(made):
    return [f"--field={field.name}={value}" for field, value in made.ListFields()]


def test_two_dtypes_are_two_namespaces_and_it_says_so_before_and_after_a_restart(daemon, capsys, prompt):
    bf16, fp16 = spec(), spec(dtype="fp16")
    put(daemon, bf16, TOKENS)
    for _ in range(2):
        code, answer = explained(capsys, "--tokens", prompt, *fields(bf16))
        assert (code, answer["verdict"], answer["hit_blocks"]) == (Exit.OK, "hit", 8)
        code, answer = explained(capsys, "--tokens", prompt, *fields(fp16))
        assert (code, answer["verdict"], answer["known"]) == (Exit.NO, "namespace_differs", False)
        assert answer["elsewhere"]["differences"] == [{"field": "dtype", "ours": "fp16", "theirs": "bf16"}]
        assert answer["elsewhere"]["tokens"] == len(TOKENS)
        code, answer = explained(capsys, *fields(fp16))
        assert (code, answer["known"]) == (Exit.NO, False)
        assert "differs in: dtype fp16 / bf16" in answer["detail"]
        daemon.restart()
    assert answer["near"][0]["fields"] == {"model": "m", "dtype": "bf16", "block_tokens": "16"}


def test_what_nvme_recycled_is_explained_after_a_restart_too(daemon, capsys, prompt):
    made = spec()
    first = put(daemon, made, TOKENS)
    for number in range(1, 21):
        put(daemon, made, [number * 10_000 + token for token in range(8 * BLOCK_TOKENS)])
    code, before = explained(capsys, "--tokens", prompt, *fields(made))
    assert (code, before["verdict"], before["hit_blocks"]) == (Exit.NO, "evicted", 0)
    assert "recycled" in before["detail"]
    assert before["missing"] == first[0].hex()
    with Client(daemon.address) as client:
        namespace = client.namespace(made)
        client.lookup(namespace, first)
        (tenant,) = client.status().tenants
        assert dict(tenant.miss_reasons) == {"evicted": 1}
    daemon.kill()
    daemon.start()
    code, after = explained(capsys, "--tokens", prompt, *fields(made))
    assert (code, after["verdict"]) == (Exit.NO, "evicted")
    assert "recycled" in after["detail"]
