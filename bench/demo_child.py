"""Runs the processes of the demo one after the other and shows what each is doing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

from rich.console import Console

REPOSITORY: Final = Path(__file__).parents[1]
_ERROR_TAIL_LINES: Final = 15


class ChildFailed(RuntimeError):
    """A process of the demo failed; the text holds the end of what it said."""


class Children:
    """Starts processes that work in `directory`, waits for each, and kills it where the wait ends early."""

    def __init__(self, console: Console, directory: Path) -> None:
        self._console = console
        self._directory = directory
        self._started_s = time.monotonic()
        # Nothing is fetched, and what the libraries cache goes with the directory.
        self._environment = os.environ | {
            "HF_HOME": str(directory / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def read(self, name: str, job: Mapping[str, object]) -> dict[str, Any]:
        """Run a job of `bench.demo_reader` that answers a question; returns its result. Raises ChildFailed."""
        result = self._directory / f"{name}.result.json"
        self.run(name, {**job, "result_path": str(result)})
        answer: dict[str, Any] = json.loads(result.read_bytes())
        return answer

    def run(self, name: str, job: Mapping[str, object]) -> None:
        """Run a job of `bench.demo_reader` that has no result. Raises ChildFailed."""
        job_path = self._directory / f"{name}.job.json"
        job_path.write_text(json.dumps(job))
        command = [sys.executable, "-m", "bench.demo_reader", str(job_path)]
        with (self._directory / f"{name}.log").open("w+") as log, self._console.status(name) as spinner:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=self._environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    spinner.update(f"{name}: {line.strip()}")
                    self.announce(f"{name}: {line.strip()}")
                code = process.wait()
            finally:
                end(process)
            if code:
                raise ChildFailed(f"{name} ended with status {code}:\n{_tail(log)}")

    def announce(self, what: str) -> None:
        """One line with the seconds since the start."""
        self._console.print(f"[dim]{time.monotonic() - self._started_s:5.1f} s[/dim]  {what}")


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that still runs, and reap it."""
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "".join(log.readlines()[-_ERROR_TAIL_LINES:])
