"""Both halves of the vLLM connector on a real daemon; the engine's memory is plain tensors, and there is no vLLM."""

import threading
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kvstored_client import Client, NamespaceSpec  # noqa: E402
from kvstored_client.engines.vllm.orders import Load, Run, Save, Step  # noqa: E402
from kvstored_client.engines.vllm.pages import pages_of  # noqa: E402
from kvstored_client.engines.vllm.settings import Settings, UnsupportedError  # noqa: E402
from kvstored_client.engines.vllm.worker import WorkerSide  # noqa: E402

from kvstored.testing.daemon_process import DaemonProcess  # noqa: E402

SETTINGS = {"dram.capacity_bytes": "64MiB", "dram.segment_bytes": "8MiB"}
BLOCKS, LAYERS = 24, 4
SHAPE = (BLOCKS, 4, 32, 64)  # blocks, heads, tokens, keys and values: 16 KiB a block and layer
HASHES = [bytes([i]) * 32 for i in range(BLOCKS)]


@pytest.fixture(scope="module")
def daemon():
    with DaemonProcess(SETTINGS) as process:
        yield process


class Worker:
    """A worker's half and its memory."""

    def __init__(self, address, model, seed=None, **settings):
        draw = torch.Generator().manual_seed(seed or 0)
        self.layers = {
            f"layer.{i}": torch.randint(0, 255, SHAPE, generator=draw, dtype=torch.uint8).view(torch.uint8).clone()
            if seed is not None
            else torch.zeros(SHAPE, dtype=torch.uint8)
            for i in range(LAYERS)
        }
        self.client = Client(address)
        chosen = Settings(**settings)
        pages = [pages_of(self.layers, BLOCKS)]
        self.side = WorkerSide(
            chosen, self.client, pages, lambda g, a: [self.client.namespace(NamespaceSpec(model=model + g, adapter=a))]
        )
        self.jobs = 0

    def block(self, index):
        return torch.stack([layer[index] for layer in self.layers.values()])

    def step(self, **fields):
        step = Step(**fields)
        self.side.before(step)
        self.side.load(step)
        self.side.save(step)
        finished = self.side.take_finished()
        return SimpleNamespace(
            saved=finished[0],
            loaded=finished[1],
            failed=self.side.take_failed(),
            bad=self.side.take_bad_blocks(),
            report=self.side.take_report(),
        )

    def save(self, hashes, blocks, parent=b"", request="r", adapter="", alone=False):
        self.jobs += 1
        return Save(self.jobs, request, Run(0, hashes, blocks), parent, adapter, alone)

    def until(self, done, **fields):
        """Steps until one answers what `done` wants; all bad blocks of the steps."""
        end, answer, bad = time.monotonic() + 60, self.step(**fields), set()
        while True:
            bad |= answer.bad
            if done(answer):
                return answer, bad
            assert time.monotonic() < end
            answer = self.step(idle=True)

    def load(self, hashes, blocks, request="l", adapter=""):
        order = Load(request, [Run(0, hashes, blocks)], adapter)
        return self.until(lambda a: request in a.loaded, loads=[order])[1]


@pytest.fixture
def worker(daemon):
    made = []

    def make(model, seed=None, **settings):
        made.append(Worker(daemon.address, model, seed, **settings))
        return made[-1]

    yield make
    for each in made:
        each.side.close()


def test_what_one_worker_saves_another_loads_into_other_blocks(worker):
    writer, reader = worker("a", seed=1), worker("a")
    save = writer.save(HASHES[:6], [3, 4, 5, 10, 11, 2])
    writer.until(lambda a: a.report.saved == {save.job_id: 1}, saves=[save])
    assert reader.load(HASHES[:6], [20, 7, 8, 9, 0, 1]) == set()
    for source, target in zip([3, 4, 5, 10, 11, 2], [20, 7, 8, 9, 0, 1], strict=True):
        assert torch.equal(writer.block(source), reader.block(target))
    assert reader.block(12).sum() == 0
    counts = writer.side.take_counts()
    assert (counts["saved_blocks"], counts["saved_bytes"]) == (6, 6 * LAYERS * 8192)
    assert reader.side.take_counts()["loaded_blocks"] == 6


def test_what_is_missing_from_the_first_on_is_reported(worker):
    writer, reader = worker("b", seed=2), worker("b")
    save = writer.save(HASHES[:3], [0, 1, 2])
    writer.until(lambda a: a.report.saved, saves=[save])
    assert reader.load(HASHES[:5], [0, 1, 2, 3, 4]) == {3, 4}
    assert torch.equal(writer.block(2), reader.block(2))


def test_what_is_missing_of_a_load_is_told_of_its_request_too(worker):
    writer, reader = worker("k", seed=10), worker("k")
    writer.until(lambda a: a.report.saved, saves=[writer.save(HASHES[:3], [0, 1, 2])])
    orders = [Load("whole", [Run(0, HASHES[:3], [3, 4, 5])]), Load("part", [Run(0, HASHES[:4], [6, 7, 8, 9])])]
    failed, loaded = set(), set()

    def both(answer):
        failed.update(answer.failed)
        loaded.update(answer.loaded)
        return loaded == {"whole", "part"}

    reader.until(both, loads=orders)
    assert failed == {"part"}


def test_what_was_computed_with_an_adapter_is_that_adapter_s(worker):
    writer = worker("l", seed=11)
    writer.until(lambda a: a.report.saved, saves=[writer.save(HASHES[:2], [0, 1], adapter="tone:1")])
    assert writer.load(HASHES[:2], [5, 6], "without") == {5, 6}
    assert writer.load(HASHES[:2], [5, 6], "another's", adapter="tone:2") == {5, 6}
    assert writer.load(HASHES[:2], [5, 6], "its", adapter="tone:1") == set()
    assert torch.equal(writer.block(0), writer.block(5))


def test_a_load_within_the_step(worker):
    writer, reader = worker("c", seed=3), worker("c", load_async=False)
    save = writer.save(HASHES[:2], [0, 1])
    writer.until(lambda a: a.report.saved, saves=[save])
    answer = reader.step(loads=[Load("l", [Run(0, HASHES[:2], [5, 6])])])
    assert torch.equal(writer.block(1), reader.block(6))
    assert (answer.loaded, answer.bad, answer.report.loaded) == (set(), set(), {"l": 1})


def test_nothing_is_stored_of_a_step_that_computed_upon_blocks_that_did_not_come(worker):
    reader = worker("d", seed=4, load_async=False)
    save = reader.save(HASHES[6:8], [1, 2])
    answer = reader.step(loads=[Load("l", [Run(0, HASHES[:2], [5, 6])])], saves=[save])
    assert answer.bad == {5, 6}
    assert answer.report.saved == {save.job_id: 1}  # ended, so that its blocks are free
    assert not any(reader.client.contains(reader.client.namespace(NamespaceSpec(model="d")), HASHES[6:8]))


def test_a_save_that_is_taken_back_reads_nothing_any_more(worker):
    writer = worker("e", seed=5)
    entered, go_on = threading.Event(), threading.Event()
    stage = writer.client.stage

    def slow(*args, **kwargs):
        entered.set()
        assert go_on.wait(60)
        return stage(*args, **kwargs)

    writer.client.stage = slow
    save = writer.save(HASHES[:2], [0, 1])
    writer.step(saves=[save])
    assert entered.wait(60)
    writer.step(taken={save.job_id: {0, 1}})
    for layer in writer.layers.values():
        layer[0] = 0  # the engine writes another request's tokens
    go_on.set()
    writer.until(lambda a: a.report.saved)
    assert not any(writer.client.contains(writer.client.namespace(NamespaceSpec(model="e")), HASHES[:2]))


@pytest.mark.parametrize(("alone", "stored"), [(False, {0, 1}), (True, {0, 1, 4, 5})])
@pytest.mark.parametrize("late", [False, True])
def test_of_a_save_what_was_not_taken_back_is_stored(worker, alone, stored, late):
    model = f"m{alone}{late}"
    writer = worker(model, seed=12)
    entered, go_on = threading.Event(), threading.Event()
    stage, asked = writer.client.stage, []

    def slow(namespace, hashes, *args, **kwargs):
        asked.append(list(hashes))
        if len(asked) == 1:  # after the room for all of it was taken, or before
            staged = stage(namespace, hashes, *args, **kwargs) if late else None
            entered.set()
            assert go_on.wait(60)
            return staged or stage(namespace, hashes, *args, **kwargs)
        return stage(namespace, hashes, *args, **kwargs)

    writer.client.stage = slow
    save = writer.save(HASHES[:6], [10, 11, 12, 13, 14, 15], alone=alone)
    writer.step(saves=[save])
    assert entered.wait(60)
    writer.step(taken={save.job_id: {12, 13}})
    for layer in writer.layers.values():
        layer[12:14] = 0
    go_on.set()
    writer.until(lambda a: a.report.saved)
    found = writer.client.contains(writer.client.namespace(NamespaceSpec(model=model)), HASHES[:6])
    assert {i for i, outcome in enumerate(found) if outcome} == stored
    assert writer.side.take_counts()["cancelled_saves"] == 1
    assert writer.load([HASHES[i] for i in sorted(stored)], list(range(len(stored)))) == set()
    for place, number in enumerate(sorted(stored)):
        assert torch.equal(writer.block(place), writer.block(10 + number))


def test_a_request_leaves_when_its_saves_have_ended(worker):
    writer = worker("f", seed=6)
    gate = threading.Event()
    stage = writer.client.stage
    writer.client.stage = lambda *args, **kwargs: gate.wait(60) and stage(*args, **kwargs)
    writer.step(saves=[writer.save(HASHES[:2], [0, 1])])
    assert writer.step(leaving=["r", "nothing to save"]).saved == {"nothing to save"}
    assert writer.step().saved == set()
    gate.set()
    writer.until(lambda a: a.saved == {"r"})


def test_a_step_without_a_forward_pass_begins_its_saves_once(worker):
    writer = worker("idle", seed=7)
    save = writer.save(HASHES[:2], [0, 1])
    step = Step(saves=[save], leaving=["r"], idle=True)
    writer.side.before(step)
    writer.side.load(step)
    writer.side.end(step)  # an older vLLM has not said before that its saves can begin
    writer.side.save(step)
    writer.until(lambda a: a.saved == {"r"})
    assert writer.side.take_counts()["saved_blocks"] == 2
    computed = Step(saves=[writer.save(HASHES[2:4], [2, 3])])
    writer.side.end(computed)  # of a forward pass it is said
    assert not writer.side.take_report()


def test_after_a_reset_nothing_older_is_found(worker):
    writer = worker("g", seed=7)
    writer.until(lambda a: a.report.saved, saves=[writer.save(HASHES[:2], [0, 1])])
    step = Load("l", [Run(0, HASHES[:2], [5, 6])])
    _, bad = writer.until(lambda a: "l" in a.loaded, loads=[step], generation="new")
    assert bad == {5, 6}


def test_every_load_is_reported_while_the_daemon_is_gone_and_works_when_it_is_back():
    with DaemonProcess(SETTINGS) as daemon:
        writer = Worker(daemon.address, "h", seed=8)
        writer.until(lambda a: a.report.saved, saves=[writer.save(HASHES[:2], [0, 1])])
        daemon.kill()
        assert writer.load(HASHES[:2], [5, 6], "gone") == {5, 6}
        lost = writer.save(HASHES[:2], [0, 1])
        writer.until(lambda a: a.report.saved, saves=[lost])
        writer.side.take_counts()
        daemon.start()
        end = time.monotonic() + 60
        while not writer.side.take_counts().get("saved_blocks"):
            writer.until(lambda a: a.report.saved, saves=[writer.save(HASHES[:2], [0, 1])])
            assert time.monotonic() < end
            time.sleep(0.05)
        assert writer.load(HASHES[:2], [5, 6], "back") == set()
        assert torch.equal(writer.block(0), writer.block(5))
        writer.side.close()


def test_a_load_that_has_not_begun_in_time_is_given_up(worker):
    writer = worker("i", seed=9, load_timeout_s=0.0)
    time.sleep(0.01)
    assert writer.load(HASHES[:2], [5, 6]) == {5, 6}


def test_blocks_of_another_size_are_not_taken(worker):
    reader = worker("j")
    namespace = reader.client.namespace(NamespaceSpec(model="j"))
    reader.client.put(namespace, HASHES[:1], [bytes(32768 + 4096)])
    assert reader.load(HASHES[:1], [0]) == {0}


# ---- pages ----


def test_kernel_blocks_smaller_than_the_engines():
    tensor = torch.arange(8 * 64, dtype=torch.uint8).reshape(8, 1, 8, 8)
    kv, target = pages_of({"a": tensor}, 4), torch.zeros(128, dtype=torch.uint8)
    kv.at([1]).place(1, writable=False).read([0], [target.data_ptr()])
    assert torch.equal(target, tensor[2:4].flatten())


def test_layers_that_lie_together_block_by_block():
    memory = torch.arange(4 * 3 * 64, dtype=torch.uint8).reshape(4, 3, 1, 8, 8)  # blocks, layers
    together = pages_of({f"{i}": memory[:, i] for i in range(3)}, 4)
    apart = pages_of({f"{i}": memory[:, i].clone() for i in range(3)}, 4)
    targets = torch.zeros(2, 3 * 64, dtype=torch.uint8)
    for kv, target in zip((together, apart), targets, strict=True):
        kv.at([2]).place(1, writable=False).read([0], [target.data_ptr()])
    assert torch.equal(targets[0], targets[1])
    assert torch.equal(targets[0], memory[2].flatten())


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        (torch.zeros(7, 1, 8, 8), "7 blocks"),
        ([torch.zeros(4)], "Mamba"),
        (torch.zeros(4, 1, 8, 8, device="meta"), "meta"),
    ],
)
def test_memory_that_is_not_understood_is_refused(tensor, named):
    with pytest.raises(UnsupportedError, match=named):
        pages_of({"a": tensor}, 4)
