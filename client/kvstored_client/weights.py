"""Fingerprint of a model's weight files: which weights these are, without reading them all.

Of each file goes in: its size, the header of a safetensors file (names, types, shapes and places of all tensors), and
samples of 1 KiB: one in each tensor (in 1,024 of them, evenly spread, where a file has more), at least 64 a file, and
the end of the file. Where they lie follows from a hash of the header, so they are the same wherever the file is.
Other files (`.bin`, `.gguf`) are sampled too, with 64 KiB of their beginning and 256 KiB of their end: PyTorch's zip
archives have their directory there, with a CRC of each tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from kvstored_client.fingerprint_cache import FingerprintCache, cache_path

SAMPLE_BYTES: Final = 1024
SAMPLES_MIN: Final = 64
SAMPLES_MAX: Final = 1024
_HEADER_BYTES_MAX: Final = 100 << 20  # the format's own limit
_INDEX_BYTES_MAX: Final = 64 << 20
_HEAD_BYTES: Final = 64 << 10
_TAIL_BYTES: Final = 256 << 10
_CHUNK_BYTES: Final = 4 << 20
_THREADS: Final = 8
_FORMAT: Final = b"kvstored.weights.v1\0"
_OTHER_SUFFIXES: Final = (".bin", ".pt", ".pth", ".gguf")
# Beside the weights, not weights: what a training run leaves.
_NOT_WEIGHTS: Final = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")

_caches: dict[Path | None, FingerprintCache] = {}


class WeightsError(ValueError):
    """The weights are not there, or not all of them; the message says which."""


def weights_fingerprint(path: str | os.PathLike[str], *, full: bool = False) -> str:
    """Text that tells one set of weights from another: for `NamespaceSpec.model_version`.

    It cannot see a change that leaves names, types, shapes and sizes alone and none of the samples: an edit of some
    rows (of an embedding, say) may stay unseen. Training, merging and quantising change nearly all bytes of the tensors
    that they touch, and so the samples in them. Where weights are edited by hand, `full=True` hashes every byte, at the
    speed of the disk or about 1 GB/s for each of up to 8 files; the two kinds of fingerprint never equal each other.

    Digests of files are cached in memory and in `~/.cache/kvstored/weights.json` by device, inode, size, mtime and
    ctime. Whoever changes a file and sets its clock back gets the old one; delete that file to have all hashed anew.

    Names of files play no part, and files are hashed in no order: a moved or copied model keeps its fingerprint, one
    that was sharded anew does not.

    Args:
        path: a weight file, or a directory: all its `.safetensors`, else all its `.bin`, `.pt`, `.pth`, `.gguf`.
        full: hash every byte.

    Raises:
        WeightsError: there are no weights, or files that the index names are missing.
        OSError: a file cannot be read.
    """
    where = Path(path)
    files, index = _files(where)
    place = cache_path()
    cache = _caches.setdefault(place, FingerprintCache(place))
    if full:
        with ThreadPoolExecutor(min(_THREADS, len(files))) as pool:
            digests = list(pool.map(lambda file: _cached(cache, file, full), files))
    else:  # small reads in many threads would wait for each other's turn of the interpreter more than for the disk
        digests = [_cached(cache, file, full) for file in files]
    cache.save()
    digest = hashlib.sha256(_FORMAT + index)
    for each in sorted(digests):
        digest.update(bytes.fromhex(each))
    return f"{_kind(full)}:{digest.hexdigest()[:32]}"


def has_weights(directory: Path) -> bool:
    """Whether there are files in it that `weights_fingerprint` takes for weights."""
    return bool(_weight_files(directory))


def _kind(full: bool) -> str:
    return "sha256" if full else "sampled"


def _files(path: Path) -> tuple[list[Path], bytes]:
    """The weight files, and a digest of which tensor is in which of them where an index says so."""
    if not path.is_dir():
        if not path.is_file():
            raise WeightsError(f"{path} is not there: give the path of a weight file, or of the model's directory")
        return [path], b""
    files = _weight_files(path)
    if not files:
        raise WeightsError(f"{path} has no weights: no .safetensors and no {', '.join(_OTHER_SUFFIXES)} file")
    index = hashlib.sha256()
    named: set[str] = set()
    suffix = f"{files[0].suffix}.index.json"
    for file in sorted(each for each in path.iterdir() if each.name.endswith(suffix)):
        tensors = _weight_map(file)
        named |= set(tensors.values())
        index.update(json.dumps(tensors, sort_keys=True).encode())
    missing = sorted(named - {file.name for file in files})
    if missing:
        raise WeightsError(f"{path} lacks {', '.join(missing[:3])}, which its index names: download the model again")
    return files, index.digest() if named else b""


def _weight_files(directory: Path) -> list[Path]:
    names = sorted(directory.iterdir()) if directory.is_dir() else []
    files = [each for each in names if each.is_file() and not each.name.startswith(_NOT_WEIGHTS)]
    tensors = [each for each in files if each.suffix == ".safetensors"]
    return tensors or [each for each in files if each.suffix in _OTHER_SUFFIXES]


def _weight_map(file: Path) -> dict[str, str]:
    try:
        with open(file, "rb") as opened:
            tensors = json.loads(opened.read(_INDEX_BYTES_MAX))["weight_map"]
        return {str(name): str(place) for name, place in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{file} is no index of weights: {error!r}; download the model again") from error


def _cached(cache: FingerprintCache, path: Path, full: bool) -> str:
    """Digest of one file, hashed where it is not known."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = os.fstat(descriptor)
        known = cache.get(stat, _kind(full))
        if known is not None:
            return known
        digest = (_full if full else _sampled)(descriptor, stat.st_size)
        after = os.fstat(descriptor)
        if (after.st_mtime_ns, after.st_ctime_ns, after.st_size) == (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size):
            cache.put(stat, _kind(full), digest)
        return digest
    finally:
        os.close(descriptor)


def _full(descriptor: int, _size: int) -> str:
    digest, offset = hashlib.sha256(), 0
    while chunk := os.pread(descriptor, _CHUNK_BYTES, offset):
        digest.update(chunk)
        offset += len(chunk)
    return digest.hexdigest()


def _sampled(descriptor: int, size: int) -> str:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: most of what it brings is not looked at
    head, start, tensors = _head(descriptor, size)
    tail = SAMPLE_BYTES if start else _TAIL_BYTES
    digest = hashlib.sha256(_FORMAT + size.to_bytes(8, "little") + len(head).to_bytes(8, "little") + head)
    offsets = list(_offsets(random.Random(digest.digest()), start, size, tensors))
    for offset in offsets:  # all at once to the disk
        os.posix_fadvise(descriptor, offset, SAMPLE_BYTES, os.POSIX_FADV_WILLNEED)
    for offset in offsets:
        digest.update(os.pread(descriptor, SAMPLE_BYTES, offset))
    digest.update(os.pread(descriptor, tail, max(0, size - tail)))
    return digest.hexdigest()


def _head(descriptor: int, size: int) -> tuple[bytes, int, list[tuple[int, int]]]:
    """Header of a safetensors file, where its data starts, and where its tensors lie; else the file's beginning."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if 2 <= length <= min(_HEADER_BYTES_MAX, size - 8):
        header = os.pread(descriptor, length, 8)
        try:
            return header, 8 + length, _tensors(json.loads(header), 8 + length, size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # none of that format
    return os.pread(descriptor, _HEAD_BYTES, 0), 0, []


def _tensors(header: dict[str, Any], start: int, size: int) -> list[tuple[int, int]]:
    """Begin and end of each tensor in the file, in the order of their places."""
    offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    spans = sorted((start + begin, start + end) for begin, end in offsets)
    if any(not start <= begin <= end <= size for begin, end in spans):
        raise ValueError("a tensor lies outside of the file")
    return [(begin, end) for begin, end in spans if begin < end]


def _offsets(draw: random.Random, start: int, size: int, tensors: list[tuple[int, int]]) -> Iterable[int]:
    """Where the samples begin, ascending within each kind."""
    if len(tensors) > SAMPLES_MAX:
        tensors = [tensors[index * len(tensors) // SAMPLES_MAX] for index in range(SAMPLES_MAX)]
    for begin, end in tensors:
        yield _place(draw, begin, end)
    rest = SAMPLES_MIN - len(tensors)
    for index in range(rest):
        yield _place(draw, start + (size - start) * index // rest, start + (size - start) * (index + 1) // rest)


def _place(draw: random.Random, begin: int, end: int) -> int:
    """Begin of a sample that lies within the span, where that is long enough."""
    return begin + int(draw.random() * (max(0, end - begin - SAMPLE_BYTES) + 1))
