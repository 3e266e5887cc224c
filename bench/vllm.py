"""Time to first token of a real vLLM with the connector: computed, loaded from DRAM, loaded from NVMe.

SmolLM2-135M on vLLM's CPU backend; needs the environment of `make venv-vllm`. Beside it what the connector costs where
nothing is reused: decode throughput with it over that of vLLM alone, in turns, and the time that the scheduler's half
takes per step while 256 requests wait.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench.common import Figure, Values, emit, median, median_ratio, parser, progress, quiet_ratio, run
from bench.demo_child import Children
from bench.load import ForeignLoad
from bench.vllm_steps import generating_p99_ms, waiting_p99_ms
from kvstored.testing.daemon_process import DaemonProcess
from kvstored.testing.vllm_process import VLLMProcess

FIGURES: Final = (
    Figure("ttft_speedup_dram", "ttft_recompute_s / ttft_dram_s", ">= 5"),
    Figure("ttft_speedup_nvme", "ttft_recompute_s / ttft_nvme_s"),
    Figure(
        "decode_ratio",
        "tokens per second with the connector and no reuse over vLLM alone, in turns: of each the faster quarter",
        ">= 0.98",
    ),
    Figure("decode_cpu_ratio", "the same of CPU time that the engine's process used, all its threads: median of pairs"),
    Figure(
        "step_p99_ms", "CPU time of the scheduler's half per step while 256 requests wait for an answer, p99", "<= 1"
    ),
    Figure("generating_step_p99_ms", "the same while 256 requests generate, p99"),
    Figure("ttft_recompute_s", "time to first token of a prompt that nobody has computed, median"),
    Figure("ttft_dram_s", "of one that lies in DRAM, the engine's own cache empty, median"),
    Figure("ttft_nvme_s", "of one that lies on NVMe only, median"),
    Figure("prompt_tokens", "tokens of a prompt"),
    Figure("loaded_tokens", "of those, loaded in place of computed"),
    Figure("outputs_identical", "all first tokens are those of the computed prompt", "== 1"),
    Figure("decode_tokens_per_s", "of vLLM alone"),
    Figure("block_bytes", "bytes of a stored block"),
    Figure("threads", "threads of the engine"),
    Figure("repeats", "prompts of each kind"),
    Figure("foreign_cpu_share", "share of all CPUs that other processes of the machine used meanwhile"),
)

PROMPT_TOKENS: Final = 1_984
_VOCABULARY: Final = 49_152
_BLOCK_TOKENS: Final = 32
_BLOCK_BYTES: Final = 30 * 2 * 3 * 64 * 2 * _BLOCK_TOKENS  # layers, K and V, heads, elements, bytes
_ENGINE: Final = {"block_size": _BLOCK_TOKENS, "max_model_len": 2_304, "kv_cache_memory_bytes": 512 << 20}
_SETTINGS: Final = {"dram.capacity_bytes": "1536MiB", "nvme.capacity_bytes": "2GiB"}
_DECODE_PROMPTS, _DECODE_TOKENS = 4, 96


class Prompts:
    """Prompts that nobody has seen."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def take(self, count: int, tokens: int) -> list[list[int]]:
        """So many of this length."""
        return [[self._draw.randrange(1_000, _VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def times(engine: VLLMProcess, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Each prompt by itself, one token each."""
    return [engine.generate([prompt], tokens=1) for prompt in prompts]


def first_token(model: str, daemon: DaemonProcess, prompts: Prompts, repeats: int, environ: dict[str, str]) -> Values:
    """The three ways to a first token."""
    kvstored = {"address": daemon.address, "lookup_wait_s": 20.0, "timeout_s": 10.0}
    with VLLMProcess(model, environ=environ, engine=_ENGINE, kvstored=kvstored) as engine:
        chosen = prompts.take(repeats, PROMPT_TOKENS)
        times(engine, prompts.take(1, PROMPT_TOKENS))  # what is done once only
        computed = times(engine, chosen)
        progress("  computed: " + _seconds(computed))
        engine.do("settle")
        times(engine, chosen[:1])  # maps the daemon's memory
        engine.do("settle")
        dram = times(engine, chosen)
        progress("  from DRAM: " + _seconds(dram))
        engine.do("settle")
        daemon.restart()  # an orderly stop leaves all on NVMe
        time.sleep(2.5)  # the longest back-off of a client that found nobody
        for prompt in prompts.take(2, 512):  # its sessions open again
            engine.generate([prompt], tokens=1)
        nvme = times(engine, chosen)
        progress("  from NVMe: " + _seconds(nvme))
    outputs = [[each["outputs"] for each in way] for way in (computed, dram, nvme)]
    recompute_s, dram_s, nvme_s = (median([each["seconds"] for each in way]) for way in (computed, dram, nvme))
    return {
        "ttft_recompute_s": recompute_s,
        "ttft_dram_s": dram_s,
        "ttft_nvme_s": nvme_s,
        "ttft_speedup_dram": recompute_s / dram_s,
        "ttft_speedup_nvme": recompute_s / nvme_s,
        "loaded_tokens": min(each["cached"][0] for each in (*dram, *nvme)),
        "outputs_identical": int(outputs[0] == outputs[1] == outputs[2]),
    }


def decode(model: str, daemon: DaemonProcess, prompts: Prompts, rounds: int, environ: dict[str, str]) -> Values:
    """Decode with the connector and without, in turns: in the order A B B A, so that a drift counts for both.

    Both are one process, whose connector is taken out and put back: where its memory came to lie makes an engine up to
    4 % faster or slower than the next one, with a connector or without, for as long as it lives. The blocks of the
    prompts are saved while the decode is measured.
    """
    took: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with VLLMProcess(model, environ=environ, engine=_ENGINE, kvstored={"address": daemon.address}) as engine:
        engine.generate(prompts.take(1, 64), tokens=4)
        for number in range(rounds):
            for connected in (False, True) if number % 2 else (True, False):
                engine.do("connect", on=connected)
                # Prompts of their own: vLLM's prefix cache has none of them either. One token is the prefill.
                asked = prompts.take(_DECODE_PROMPTS, 288)
                engine.generate(asked, tokens=1)
                took[connected].append(engine.generate(asked, tokens=1 + _DECODE_TOKENS))
                engine.do("settle")
    seconds, cpu_seconds = (
        {connected: [float(each[key]) for each in way] for connected, way in took.items()}
        for key in ("seconds", "cpu_seconds")
    )
    values = {
        "decode_ratio": quiet_ratio(seconds[False], seconds[True]),
        "decode_cpu_ratio": median_ratio(cpu_seconds[False], cpu_seconds[True]),
        "decode_tokens_per_s": _DECODE_PROMPTS * _DECODE_TOKENS / median(seconds[False]),
    }
    progress("  decode: {decode_tokens_per_s:.1f} tokens/s alone, times {decode_ratio:.3f} connected".format(**values))
    return values


def _seconds(way: list[dict[str, Any]]) -> str:
    return ", ".join(f"{each['seconds']:.3f} s ({each['cached'][0]} tokens loaded)" for each in way)


def main() -> int:
    """Run the bench."""
    built = parser("bench.vllm", __doc__ or "", FIGURES)
    built.add_argument("--repeats", type=int, default=5, help="prompts of each kind (default 5)")
    built.add_argument("--rounds", type=int, default=12, help="rounds of decoding (default 12)")
    built.add_argument("--threads", type=int, default=1, help="threads of the engine (default 1)")
    options = built.parse_args()
    environ = {"OMP_NUM_THREADS": str(options.threads)}
    load, prompts = ForeignLoad(), Prompts(1)
    with tempfile.TemporaryDirectory(prefix="kvstored-vllm-") as directory:
        where = Path(directory)
        model = str(where / "SmolLM2-135M-Instruct")
        progress("unpacking the model")
        Children(Console(stderr=True), where).run("Model", {"model_dir": model, "threads": options.threads})
        with DaemonProcess(_SETTINGS, nvme=True, parent_directory=where) as daemon:
            values = dict(first_token(model, daemon, prompts, options.repeats, environ))
            values |= decode(model, daemon, prompts, options.rounds, environ)
    values |= {
        "step_p99_ms": waiting_p99_ms(),
        "generating_step_p99_ms": generating_p99_ms(),
        "prompt_tokens": PROMPT_TOKENS,
        "block_bytes": _BLOCK_BYTES,
        "threads": options.threads,
        "repeats": options.repeats,
        "foreign_cpu_share": load.share(),
    }
    emit(values, FIGURES, options.json)
    return 0


if __name__ == "__main__":
    run(main)
