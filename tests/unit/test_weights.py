"""Fingerprints of weight files: what changes them, what does not, and that a cache never makes them wrong."""

import json
import os
import shutil
import struct

import pytest
from kvstored_client import fingerprint_cache, weights
from kvstored_client.fingerprint_cache import FingerprintCache, cache_path
from kvstored_client.weights import SAMPLE_BYTES, WeightsError, weights_fingerprint

TENSOR_BYTES = 40_000


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache file of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "_caches", {})


@pytest.fixture
def eager(monkeypatch):
    """Files that were written just now are remembered too."""
    monkeypatch.setattr(fingerprint_cache, "SETTLED_S", -3600.0)


def tick(path, before):
    """Wait until the file system's clock shows another time than that of an earlier change."""
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(path)


def forget():
    """As in a new process."""
    weights._caches.clear()


def safetensors(path, tensors=3, fill=1, dtype="F16", size=TENSOR_BYTES, metadata=None):
    header = {"__metadata__": metadata} if metadata else {}
    for number in range(tensors):
        span = [number * size, (number + 1) * size]
        header[f"layers.{number}.weight"] = {"dtype": dtype, "shape": [size // 2], "data_offsets": span}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes([fill]) * (tensors * size))
    return path


def model(folder, shards=2, index=True):
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{number}.safetensors" for number in range(shards)]
    for number, name in enumerate(names):
        safetensors(folder / name, fill=number + 1)
    if index:
        tensors = {f"layers.{number}.weight": name for number, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": tensors}))
    return folder


def data_start(path):
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def sampled_places(path, monkeypatch):
    """Begin and end of all that is read of a file."""
    reads, pread, end = [], os.pread, path.stat().st_size
    monkeypatch.setattr(
        os, "pread", lambda fd, size, at: reads.append((at, min(at + size, end))) or pread(fd, size, at)
    )
    weights_fingerprint(path)
    monkeypatch.setattr(os, "pread", pread)
    return reads


# ---- what changes it ----


def test_a_copy_has_the_same_fingerprint(tmp_path):
    first = model(tmp_path / "a")
    shutil.copytree(first, tmp_path / "b")
    assert weights_fingerprint(first) == weights_fingerprint(tmp_path / "b")
    assert weights_fingerprint(first).startswith("sampled:")


@pytest.mark.parametrize("tensor", range(3))
def test_a_tensor_that_was_trained_changes_it(tmp_path, tensor):
    path = safetensors(tmp_path / "model.safetensors")
    before = weights_fingerprint(path)
    overwrite(path, data_start(path) + tensor * TENSOR_BYTES, b"\2" * TENSOR_BYTES)
    assert weights_fingerprint(path) != before


@pytest.mark.parametrize("tensors", [1, 3, 100, 1500])
def test_every_byte_that_is_sampled_counts_and_each_tensor_has_a_sample(tmp_path, monkeypatch, tensors):
    path = safetensors(tmp_path / "model.safetensors", tensors, size=4096)
    start = data_start(path)
    places = [place for place in sampled_places(path, monkeypatch) if place[0] >= start]
    assert len(places) <= weights.SAMPLES_MAX + 1
    unseen = [
        n for n in range(tensors) if not any(a < start + (n + 1) * 4096 and b > start + n * 4096 for a, b in places)
    ]
    assert len(unseen) <= max(0, tensors - weights.SAMPLES_MAX)
    before = weights_fingerprint(path)
    for begin, end in places[:: len(places) // 5]:
        for offset in (begin, end - 1):
            overwrite(path, offset, b"\7")
            assert weights_fingerprint(path) != before
            overwrite(path, offset, b"\1")
    assert weights_fingerprint(path) == before


@pytest.mark.parametrize(
    "changed", [{"dtype": "BF16"}, {"tensors": 4}, {"metadata": {"format": "pt"}}, {"size": TENSOR_BYTES + 2}]
)
def test_any_change_of_the_header_changes_it(tmp_path, changed):
    one, other = safetensors(tmp_path / "a.safetensors"), safetensors(tmp_path / "b.safetensors", **changed)
    assert weights_fingerprint(one) != weights_fingerprint(other)


def test_a_shard_more_or_less_or_another_changes_it(tmp_path):
    found = {weights_fingerprint(model(tmp_path / str(shards), shards)) for shards in (1, 2, 3)}
    other = model(tmp_path / "other", 3)
    safetensors(other / "model-2.safetensors", fill=9)
    assert len(found | {weights_fingerprint(other)}) == 4


def test_what_only_a_full_hash_sees(tmp_path, monkeypatch):
    path = safetensors(tmp_path / "model.safetensors", 1, size=10 << 20)
    read = sampled_places(path, monkeypatch)
    hole = next(at for at in range(data_start(path), path.stat().st_size) if not any(a <= at < b for a, b in read))
    sampled, full = weights_fingerprint(path), weights_fingerprint(path, full=True)
    overwrite(path, hole, b"\7")
    assert weights_fingerprint(path) == sampled
    assert weights_fingerprint(path, full=True) != full
    assert full.startswith("sha256:")


# ---- which files ----


def test_files_of_another_format_are_sampled_with_beginning_and_end(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(bytes(2 << 20))
    found = {weights_fingerprint(tmp_path)}
    for offset in (0, 60_000, (2 << 20) - 200_000, (2 << 20) - 1):
        overwrite(path, offset, b"\7")
        found.add(weights_fingerprint(tmp_path))
    path.write_bytes(bytes((2 << 20) + 1))
    assert len(found | {weights_fingerprint(tmp_path)}) == 6


def test_safetensors_go_before_other_files_and_what_is_no_weights_is_not_looked_at(tmp_path):
    before = weights_fingerprint(model(tmp_path))
    for name in ("pytorch_model.bin", "training_args.bin", "config.json", "README.md"):
        (tmp_path / name).write_text("x")
    assert weights_fingerprint(tmp_path) == before


@pytest.mark.parametrize(
    "content", [b"", b"\1", b"\xff" * 64, struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"]
)
def test_a_damaged_file_has_a_fingerprint_of_its_own(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert weights_fingerprint(path) != weights_fingerprint(safetensors(tmp_path / "other.safetensors"))


def test_a_tensor_outside_of_its_file_is_not_looked_for(tmp_path):
    path = safetensors(tmp_path / "model.safetensors")
    whole = weights_fingerprint(path)
    os.truncate(path, path.stat().st_size - 1)
    assert weights_fingerprint(path) != whole


def test_missing_weights_are_said(tmp_path):
    with pytest.raises(WeightsError, match="absent is not there"):
        weights_fingerprint(tmp_path / "absent")
    with pytest.raises(WeightsError, match="has no weights"):
        weights_fingerprint(tmp_path)
    (model(tmp_path / "m") / "model-1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks model-1\.safetensors"):
        weights_fingerprint(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors.index.json").write_text("{")
    with pytest.raises(WeightsError, match="is no index"):
        weights_fingerprint(tmp_path / "m")


# ---- the cache ----


@pytest.fixture
def hashed(eager, monkeypatch):
    """Sizes of the files that were hashed, not found in a cache."""
    sizes, sampled = [], weights._sampled
    monkeypatch.setattr(weights, "_sampled", lambda fd, size: sizes.append(size) or sampled(fd, size))
    return sizes


def test_a_file_is_hashed_once_also_by_the_next_process(tmp_path, hashed):
    folder = model(tmp_path / "m")
    first = weights_fingerprint(folder)
    assert weights_fingerprint(folder) == first
    forget()
    assert weights_fingerprint(folder) == first
    assert len(hashed) == 2
    assert cache_path().stat().st_mode & 0o777 == 0o600


def test_a_file_that_changed_is_hashed_again(tmp_path, hashed):
    path = safetensors(tmp_path / "model.safetensors")
    first, stat = weights_fingerprint(path), path.stat()
    safetensors(path, fill=2)
    tick(path, stat)
    second = weights_fingerprint(path)
    os.replace(safetensors(tmp_path / "new", fill=1), path)
    assert weights_fingerprint(path) == first != second
    assert len(hashed) == 3


@pytest.mark.usefixtures("eager")
def test_a_clock_that_was_set_back_does_not_hide_a_change(tmp_path):
    path = safetensors(tmp_path / "model.safetensors")
    before, stat = weights_fingerprint(path), path.stat()
    safetensors(path, fill=2)
    tick(path, stat)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert weights_fingerprint(path) != before


def test_a_file_changed_a_moment_ago_is_not_remembered(tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(fingerprint_cache, "SETTLED_S", 3600.0)
    path = safetensors(tmp_path / "model.safetensors")
    assert weights_fingerprint(path) == weights_fingerprint(path)
    assert len(hashed) == 2
    assert not cache_path().exists()


@pytest.mark.usefixtures("eager")
def test_a_file_that_changes_while_it_is_read_is_not_remembered(tmp_path, monkeypatch):
    path = safetensors(tmp_path / "model.safetensors")
    sampled = weights._sampled

    def change(fd, size):
        stat, digest = path.stat(), sampled(fd, size)
        safetensors(path, fill=2)
        tick(path, stat)
        return digest

    monkeypatch.setattr(weights, "_sampled", change)
    weights_fingerprint(path)
    monkeypatch.setattr(weights, "_sampled", sampled)
    assert not cache_path().exists()


@pytest.mark.usefixtures("eager")
def test_full_and_sampled_hashes_are_cached_apart(tmp_path):
    path = safetensors(tmp_path / "model.safetensors")
    assert weights_fingerprint(path) != weights_fingerprint(path, full=True)
    forget()
    assert weights_fingerprint(path, full=True).startswith("sha256:")
    assert weights_fingerprint(path).startswith("sampled:")


def damaged(content):
    """Ways in which a cache file can be wrong."""
    yield b""
    yield content[:-9]
    yield b"\xff" + content
    yield b"[" * 100_000
    yield b"[]"
    yield b'{"version": 1, "entries": [], "checksum": ""}'
    yield content.replace(b'"version": 1', b'"version": 2')
    for at in range(0, len(content), 7):
        yield content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.usefixtures("eager")
def test_a_damaged_cache_file_is_no_error_and_never_believed(tmp_path):
    path = safetensors(tmp_path / "model.safetensors")
    right = weights_fingerprint(path)
    content = cache_path().read_bytes()
    for wrong in damaged(content):
        cache_path().write_bytes(wrong)
        forget()
        assert weights_fingerprint(path) == right


@pytest.mark.usefixtures("eager")
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = safetensors(tmp_path / "model.safetensors")
    assert weights_fingerprint(path) == weights_fingerprint(path)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


@pytest.mark.usefixtures("eager")
def test_the_cache_is_bounded_and_keeps_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint_cache, "ENTRIES_MAX", 3)
    path = tmp_path / "cache.json"
    cache, stats = FingerprintCache(path), []
    for number in range(5):
        file = tmp_path / str(number)
        file.write_bytes(bytes(number))
        stats.append(file.stat())
        cache.put(stats[-1], "sampled", str(number))
        cache.save()
    again = FingerprintCache(path)
    assert [again.get(stat, "sampled") for stat in stats] == [None, None, "2", "3", "4"]


@pytest.mark.usefixtures("eager")
def test_two_processes_add_to_one_cache_file(tmp_path):
    path, stats = tmp_path / "cache.json", []
    both = [FingerprintCache(path), FingerprintCache(path)]
    for number, cache in enumerate(both):
        (tmp_path / str(number)).touch()
        stats.append((tmp_path / str(number)).stat())
        cache.get(stats[-1], "sampled")  # both have read the empty file
        cache.put(stats[-1], "sampled", str(number))
    for cache in both:
        cache.save()
    assert [FingerprintCache(path).get(stat, "sampled") for stat in stats] == ["0", "1"]


def test_sizes_are_those_documented():
    assert (SAMPLE_BYTES, weights.SAMPLES_MIN, weights.SAMPLES_MAX) == (1024, 64, 1024)
