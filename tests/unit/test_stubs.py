from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

GENERATOR = Path(__file__).parents[2] / "proto" / "generate.py"


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    return module


def test_the_stubs_are_what_the_schema_generates(generate, capsys):
    assert generate.main() == 0, capsys.readouterr().out


def test_a_stub_that_was_changed_or_is_missing_is_named(generate, monkeypatch, tmp_path, capsys):
    target = tmp_path / "v1"
    shutil.copytree(generate.TARGET, target)
    (target / "admin_pb2.py").write_text("# edited\n")
    (target / "kvstored_pb2.pyi").unlink()
    monkeypatch.setattr(generate, "TARGET", target)
    assert generate.main() == 1
    said = capsys.readouterr().out
    assert "admin_pb2.py" in said
    assert "kvstored_pb2.pyi" in said
    assert "kvstored_pb2_grpc.py" not in said
