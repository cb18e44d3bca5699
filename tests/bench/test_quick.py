"""`python -m bench NAME --quick` for real, on a tiny random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specops.models.convert import Quantization, export_checkpoint
from tests.checkpoints import make_llama_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported model with room for the benchmark's prompt in its few-entry vocabulary."""
    folder = tmp_path_factory.mktemp("bench")
    checkpoint = make_llama_checkpoint(folder / "checkpoint", hidden=128, ffn=256, context=2048)
    export_checkpoint(checkpoint, folder / "model", quantization=Quantization.parse("int8-128"))
    return folder / "model"


def bench(model: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {"SPECOPS_TARGET": str(model), "SPECOPS_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "bench", *arguments, "--quick", "--results", str(folder)]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


def kept(folder: Path, name: str) -> dict[str, Any]:
    assert (folder / f"{name}.md").read_text().startswith("### ")
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return result


@pytest.mark.e2e
def test_speculation_is_compared_and_all_results_become_a_page(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):\\n"}\n{"prompt": "return a + b\\n"}\n')
    done = bench(model, tmp_path, "compare", "--prompts", str(prompts))
    assert done.returncode == 0, done.stderr
    result = kept(tmp_path, "compare")
    ways = [(item["drafter"], item["adaptive"]) for item in result["categories"]["own"]]
    assert ways == [("none", False), ("suffix", False), ("suffix", True)]
    assert (tmp_path / "compare.svg").is_file()
    done = bench(model, tmp_path, "report")
    assert done.returncode == 0, done.stderr
    assert "Drafters by kind of text" in (tmp_path / "report.html").read_text()


@pytest.mark.e2e
def test_a_missing_model_is_said_in_a_line(tmp_path: Path) -> None:
    done = bench(tmp_path / "nowhere", tmp_path, "compare")
    assert done.returncode == 2
    assert "nowhere holds no model" in done.stderr
    assert "Traceback" not in done.stderr
