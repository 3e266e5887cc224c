"""What it costs to tell which weights a model has: `python -m bench.fingerprint [--gib 4 | --path DIRECTORY]`.

The generated model has safetensors shards of a gigabyte with 120 tensors each. Its files have holes (no bytes on the
disk), so that the time is that of headers, system calls and hashing, as with files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import tempfile
import time
from pathlib import Path

from kvstored_client.weights import weights_fingerprint

from bench.cold import drop_cache

_SHARD_BYTES = 1 << 30
_TENSORS = 120


def generate(folder: Path, size_bytes: int) -> Path:
    """A model of that size in files with holes."""
    folder.mkdir()
    for shard in range(max(1, size_bytes // _SHARD_BYTES)):
        size = min(size_bytes, _SHARD_BYTES) // _TENSORS
        header = {
            f"model.layers.{shard}.{number}.weight": {
                "dtype": "BF16",
                "shape": [size // 2],
                "data_offsets": [number * size, (number + 1) * size],
            }
            for number in range(_TENSORS)
        }
        text = json.dumps(header).encode()
        with open(folder / f"model-{shard}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + _TENSORS * size)
    return folder


def report(name: str, path: Path) -> None:
    """Print the time of one fingerprint."""
    begin = time.perf_counter()
    found = weights_fingerprint(path)
    print(f"{name:<28}{(time.perf_counter() - begin) * 1e3:8.1f} ms  {found}")


def main() -> None:
    """Measure: first look from the disk, from the page cache, and with the digests known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="size of the generated model")
    parser.add_argument("--path", type=Path, help="a model's directory or file, in place of a generated one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/cache"
        path = options.path or generate(Path(scratch) / "model", int(options.gib * (1 << 30)))
        drop_cache(path)
        report("first, from the disk", path)
        time.sleep(2.1)  # files that were written just now are not remembered
        os.environ["XDG_CACHE_HOME"] = f"{scratch}/other"
        report("first, from the page cache", path)
        report("again", path)


if __name__ == "__main__":
    main()
