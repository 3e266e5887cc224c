"""An engine process (`vllm_engine`) as tests and benches hold it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_LOG_TAIL: Final = 6000
_STOP_S: Final = 180.0


class VLLMProcess:
    """One engine. `do` waits for its answer; `begin` does not, and `answer` does. Options: see `vllm_engine`."""

    def __init__(self, model: str, *, environ: Mapping[str, str] | None = None, **options: Any) -> None:
        """Start it, and wait until it is there or has said why not (`refused`)."""
        self._directory = tempfile.TemporaryDirectory(prefix="vllm-")
        self._log_path = Path(self._directory.name) / "log"
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstored.testing.vllm_engine", json.dumps({"model": model, **options})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(environ or {})},
            )
        self.refused: str = self.answer().get("refused", "")

    def begin(self, action: str, **arguments: Any) -> None:
        """Have it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What came of it. Raises RuntimeError, with the end of its log, where the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"the engine has ended with {code}; the end of its log:\n{self.log()[-_LOG_TAIL:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Both."""
        self.begin(action, **arguments)
        return self.answer()

    def generate(self, prompts: list[list[int]], **arguments: Any) -> dict[str, Any]:
        """See `vllm_engine.generate`. Raises RuntimeError where the engine was refused."""
        if self.refused:
            raise RuntimeError(self.refused)
        return self.do("generate", prompts=prompts, **arguments)

    def log(self) -> str:
        """All that it has written."""
        return self._log_path.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_STOP_S if kind is None else 1.0)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
            if kind is None:
                raise
        finally:
            self._directory.cleanup()
