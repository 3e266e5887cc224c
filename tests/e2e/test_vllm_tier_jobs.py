"""Jobs of the secondary tier on a real daemon; vLLM's pool is a numpy array, and there is no vLLM."""

import json
import time
from types import SimpleNamespace

import pytest

np = pytest.importorskip("numpy")

from kvstored_client import Client, NamespaceSpec  # noqa: E402
from kvstored_client.engines.vllm.settings import UnsupportedError  # noqa: E402
from kvstored_client.engines.vllm.tier_jobs import Jobs, chunk_spec, is_safe  # noqa: E402
from kvstored_client.paged import PagedKV  # noqa: E402

from kvstored.testing.daemon_process import DaemonProcess  # noqa: E402

SETTINGS = {"dram.capacity_bytes": "64MiB", "dram.segment_bytes": "8MiB"}
CHUNKS, CHUNK_BYTES = 16, 32768
KEYS = [bytes([i]) * 36 for i in range(CHUNKS)]


class Tier:
    """Jobs and the pool that they work on."""

    def __init__(self, address, model, seed=None):
        draw = np.random.default_rng(seed)
        shape = (CHUNKS, CHUNK_BYTES)
        self.pool = np.zeros(shape, np.uint8) if seed is None else draw.integers(0, 255, shape, np.uint8)
        self.client = Client(address)
        namespace = self.client.namespace(NamespaceSpec(model=model))
        self.jobs = Jobs(self.client, namespace, PagedKV([np.asarray(memoryview(self.pool))]), 60.0)

    def ended(self):
        self.jobs.drain()
        return [(job.job_id, job.done, job.complete, job.is_load) for job in self.jobs.take_ended()]


@pytest.fixture(scope="module")
def daemon():
    with DaemonProcess(SETTINGS) as process:
        yield process


@pytest.fixture
def tier(daemon):
    made = []

    def make(model, seed=None):
        made.append(Tier(daemon.address, model, seed))
        return made[-1]

    yield make
    for each in made:
        each.jobs.close()
        each.client.close()


def test_what_one_pool_stores_another_loads_elsewhere(tier):
    one, other = tier("a", 1), tier("a")
    assert other.jobs.stored(KEYS[:3]) == [False] * 3
    one.jobs.store(1, KEYS[:3], np.array([5, 2, 9]))
    assert one.ended() == [(1, 3, True, False)]
    assert other.jobs.stored(KEYS[:4]) == [True] * 3 + [False]
    other.jobs.load(2, KEYS[:3], np.array([0, 15, 7]))
    assert other.ended() == [(2, 3, True, True)]
    assert np.array_equal(other.pool[[0, 15, 7]], one.pool[[5, 2, 9]])
    assert other.ended() == []


def test_what_is_stored_already_is_stored(tier):
    one = tier("b", 2)
    one.jobs.store(1, KEYS[:2], np.array([0, 1]))
    one.jobs.store(2, KEYS[:3], np.array([0, 1, 2]))
    assert one.ended() == [(1, 2, True, False), (2, 3, True, False)]


def test_a_load_brings_what_is_there_and_says_how_much(tier):
    one = tier("c", 3)
    one.jobs.store(1, KEYS[:2], np.array([0, 1]))
    one.ended()
    one.jobs.load(2, KEYS[:4], np.array([8, 9, 10, 11]))
    assert one.ended() == [(2, 2, False, True)]
    assert np.array_equal(one.pool[8:10], one.pool[0:2])


def test_every_job_ends_while_the_daemon_is_gone():
    with DaemonProcess(SETTINGS) as daemon:
        one = Tier(daemon.address, "d", 4)
        one.jobs.store(1, KEYS[:2], np.array([0, 1]))
        assert one.ended() == [(1, 2, True, False)]
        daemon.kill()
        one.jobs.store(2, KEYS[2:4], np.array([2, 3]))
        one.jobs.load(3, KEYS[:2], np.array([4, 5]))
        assert sorted(one.ended()) == [(2, 0, False, False), (3, 0, False, True)]
        assert one.jobs.stored(KEYS[:1]) == [False]
        daemon.start()
        until = time.monotonic() + 60
        while not one.jobs.stored(KEYS[2:3])[0]:  # until the client has tried again
            one.jobs.store(4, KEYS[2:3], np.array([2]))
            one.ended()
            assert time.monotonic() < until
            time.sleep(0.05)
        one.jobs.close()
        one.client.close()


def test_a_job_that_raises_has_ended(tier):
    one = tier("e", 5)
    one.jobs.store(1, KEYS[:2], np.array([0, CHUNKS]))  # there is no such chunk
    one.jobs.refuse(2, KEYS[:1])
    assert sorted(one.ended()) == [(1, 0, False, False), (2, 0, False, False)]


def test_hashes_that_can_be_crafted_are_told():
    assert is_safe(bytes(36))
    assert not is_safe(bytes(20))  # xxhash


# ---- whose chunks they are ----

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8, "dtype": "bfloat16"}


def offloading(directory, **changes):
    """vLLM's OffloadingConfig, as far as it is looked at."""
    group = SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=("a", "b"))
    sizes = {f"{name}_size": 1 for name in ("world", "tp", "pp", "pcp", "dcp")}
    parallel = {name: changes.pop(name) for name in list(changes) if name in sizes}
    return SimpleNamespace(
        **{
            "groups": (group,),
            "model": SimpleNamespace(name=str(directory), dtype="bfloat16"),
            "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
            "parallel": SimpleNamespace(**{**sizes, **parallel}),
            "replicated_layout": False,
            "canonical_layout": False,
            "kv_cache_layout": "LBHNC",
            **changes,
        }
    )


def spec(config, chunk_bytes=CHUNK_BYTES, version="0.32", platform="cpu", model_version="v1"):
    made = chunk_spec(config, chunk_bytes, version=version, platform=platform, weights="", model_version=model_version)
    return made.SerializeToString(deterministic=True)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_whatever_decides_about_a_chunk_s_bytes_separates(model):
    plain = spec(offloading(model))
    assert plain == spec(offloading(model))
    group = SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=("b", "a"))
    others = [
        spec(offloading(model, world_size=2, tp_size=2)),
        spec(offloading(model, kv_cache_layout="BLHNC")),
        spec(offloading(model, canonical_layout=True)),
        spec(offloading(model, replicated_layout=True)),
        spec(offloading(model, groups=(group,))),
        spec(offloading(model, cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1))),
        spec(offloading(model, model=SimpleNamespace(name=str(model), dtype="fp8"))),
        spec(offloading(model), chunk_bytes=65536),
        spec(offloading(model), version="0.30"),
        spec(offloading(model), platform="cuda"),
        spec(offloading(model), model_version="v2"),
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_weights_that_nothing_tells_from_others_are_refused(model):
    with pytest.raises(UnsupportedError, match="secondary tier"):
        spec(offloading(model), model_version="")
    with pytest.raises(UnsupportedError, match="secondary tier"):
        spec(offloading("nobody/knows-it"))
