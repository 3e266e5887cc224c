"""A real model answers two questions about one long document, in two processes: `make demo`.

The first process reads the document and leaves its KV cache with the daemon. The second one,
fresh, asks something else: it takes the document's part of the cache from the daemon and starts
to answer at once. It then answers again without the store, to show what that would have taken
and that the tokens are the same. Exit status 0 only if they are, and if the prefix was reused.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench import common
from bench.common import Figure
from bench.demo_child import ChildFailed, Children
from kvstored.testing.daemon_process import DaemonFailed, DaemonProcess

DOCUMENT: Final = Path(__file__).with_name("demo_document.txt")
FIRST_QUESTION: Final = "What is the most valuable object in the archive?"
SECOND_QUESTION: Final = "Where is the archive kept today?"
SETTINGS: Final = {"dram.capacity_bytes": "384MiB", "nvme.capacity_bytes": "1GiB"}
STATUS_COMMAND: Final = "import sys; from kvstored_client.ctl import main; main(sys.argv[1:])"
FIGURES: Final = (
    Figure("ttft_cold_s", "second question, time to first token without the store"),
    Figure("ttft_warm_s", "second question, time to first token with the store, loading included"),
    Figure("ttft_speedup", "ttft_cold_s / ttft_warm_s", ">= 1"),
    Figure("tokens_identical", "both answers to it are the same, token for token", "== 1"),
    Figure("reused_tokens", "tokens of its prompt that came from the store", ">= 1"),
    Figure("prompt_tokens", "tokens of its prompt"),
    Figure("first_ttft_s", "first question, time to first token in the process that filled the store"),
    Figure("stored_blocks", "blocks that this process left with the daemon"),
    Figure("seconds", "the whole demo, unpacking of the weights included"),
)


def main() -> int:
    """Run the demo; returns the exit status."""
    options = _options()
    console = Console(stderr=True, highlight=False)
    try:
        with tempfile.TemporaryDirectory(prefix="kvstored-demo-") as directory:
            values, results = demo(console, options, Path(directory))
    except (ChildFailed, DaemonFailed) as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    if options.json is None:
        show_answers(options, *results)
    common.emit(values, FIGURES, options.json)
    return 0 if values["tokens_identical"] and values["reused_tokens"] else 1


def demo(console: Console, options: argparse.Namespace, directory: Path) -> tuple[common.Values, list[dict[str, Any]]]:
    """Run everything in `directory`; returns the figures and the results of both processes.

    Raises ChildFailed and DaemonFailed.
    """
    started_s = time.monotonic()
    children = Children(console, directory)
    job = {"model_dir": str(directory / "model"), "threads": options.threads}
    children.run("Model", job)
    with DaemonProcess(SETTINGS, nvme=True, parent_directory=directory) as daemon:
        children.announce(f"Daemon: serving, pid {daemon.pid}")
        job |= {"address": daemon.address, "document_path": str(options.document.resolve())}
        first = children.read("Process A", job | {"question": options.first_question})
        second = children.read("Process B", job | {"question": options.second_question, "compare": True})
        show_status(daemon.address, options.json is not None)
        children.announce("Daemon: stopping")
    return figures(first, second) | {"seconds": time.monotonic() - started_s}, [first, second]


def figures(first: dict[str, Any], second: dict[str, Any]) -> dict[str, common.Value]:
    """The demo's figures from the results of its two processes."""
    with_store, without = second["store"], second["plain"]
    return {
        "ttft_cold_s": without["ttft_s"],
        "ttft_warm_s": with_store["ttft_s"],
        "ttft_speedup": without["ttft_s"] / with_store["ttft_s"],
        "tokens_identical": with_store["tokens"] == without["tokens"],
        "reused_tokens": with_store["reused_tokens"],
        "prompt_tokens": second["prompt_tokens"],
        "first_ttft_s": first["store"]["ttft_s"],
        "stored_blocks": first["saved_blocks"],
    }


def show_status(address: str, to_stderr: bool) -> None:
    """The daemon's own view, as `kvstorectl status` prints it. Raises ChildFailed."""
    command = [sys.executable, "-c", STATUS_COMMAND, "--address", address, "status"]
    sys.stdout.flush()
    code = subprocess.run(command, stdout=sys.stderr if to_stderr else None, check=False).returncode
    if code:
        raise ChildFailed(f"kvstorectl status ended with status {code}")


def show_answers(options: argparse.Namespace, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Questions, answers, and how long each took to begin."""
    table = Table(
        "process", "question and answer", "first token", "from the store", title="Two processes, one document"
    )
    rows = (
        ("A", options.first_question, first["store"], first),
        ("B", options.second_question, second["store"], second),
        ("B, no store", options.second_question, second["plain"], second),
    )
    for process, question, answer, result in rows:
        reused = f"{answer['reused_tokens']} of {result['prompt_tokens']} tokens"
        table.add_row(process, f"{question}\n[bold]{answer['text']}[/bold]", f"{answer['ttft_s']:.2f} s", reused)
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = common.parser("bench.demo", "A real model answers two questions about one document.", FIGURES)
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="text to ask about (default: %(default)s)")
    parser.add_argument("--first-question", default=FIRST_QUESTION, help="default: %(default)s")
    parser.add_argument("--second-question", default=SECOND_QUESTION, help="default: %(default)s")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the model (default: %(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    common.run(main)
