"""A result says where it was measured, on machines that tell little, too."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import onnxruntime
import pytest

from bench.tools import machine


def test_the_description_fits_json_and_names_what_was_measured() -> None:
    described = machine.describe()
    assert json.loads(json.dumps(asdict(described)))["onnxruntime"] == onnxruntime.__version__
    assert described.memory_limit_bytes > 0
    assert described.threads >= 1
    assert f"onnxruntime {onnxruntime.__version__}" in described.line


def test_a_commit_with_changes_on_top_is_marked() -> None:
    clean = replace(machine.describe(), commit="0123456789abcdef", modified=False)
    assert "commit 0123456789," in clean.line
    assert "commit 0123456789+," in replace(clean, modified=True).line
    assert "commit" not in replace(clean, commit=None).line


def test_a_command_names_its_files_without_the_folders_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "quality", "/home/me/a model.gguf", "--rounds", "2"])
    assert machine.describe().command == "python -m bench quality 'a model.gguf' --rounds 2"
