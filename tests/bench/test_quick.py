"""`python -m bench --quick` for real: server, engine and bare loop on a tiny random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specops.export import Quantization, export_checkpoint
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
def test_overhead_measures_all_sides_on_the_same_output(model: Path, tmp_path: Path) -> None:
    done = bench(model, tmp_path, "overhead", "--skip-tinyllama")
    assert done.returncode == 0, done.stderr
    assert "API, streaming" in done.stdout
    result = kept(tmp_path, "overhead")
    (measured,) = result["models"]
    assert result["quick"]
    assert measured["outputs_equal"]
    assert measured["idle_share"] < 0.5
    rates = measured["decode_tokens_per_second"]
    assert set(rates) == {"bare loop", "engine", "API", "API, streaming"}
    assert all(rate > 0 for side in rates.values() for rate in side)


@pytest.mark.e2e
def test_speculation_is_compared_and_all_results_become_a_page(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):\\n"}\n{"prompt": "return a + b\\n"}\n')
    done = bench(model, tmp_path, "compare", "--prompts", str(prompts))
    assert done.returncode == 0, done.stderr
    result = kept(tmp_path, "compare")
    ways = [(item["drafter"], item["adaptive"]) for item in result["categories"]["own"]]
    assert ways == [("none", False), ("ngram", False), ("ngram", True)]
    assert (tmp_path / "compare.png").is_file()
    done = bench(model, tmp_path, "report")
    assert done.returncode == 0, done.stderr
    assert "Drafters by kind of text" in (tmp_path / "report.html").read_text()


@pytest.mark.e2e
def test_equality_is_proven_in_pieces(model: Path, tmp_path: Path) -> None:
    done = bench(model, tmp_path, "equality", "--seconds", "600")
    assert done.returncode == 0, done.stderr
    result = kept(tmp_path, "equality")
    assert result["complete"]
    assert result["lossless"]


@pytest.mark.e2e
def test_being_watched_is_measured_and_told_apart(model: Path, tmp_path: Path) -> None:
    for runs in (1, 2):
        done = bench(model, tmp_path, "watched", "--add")
        assert done.returncode == 0, done.stderr
        found = kept(tmp_path, "watched")["runs"]
        assert len(found) == runs
    for run in found:
        assert set(run["rates"]) == {"1", "4"}
        assert all(
            rate > 0 for kinds in run["rates"].values() for kind in kinds.values() for rate in kind
        )
        assert run["costs"]["page_bytes"] > 10_000
        assert run["costs"]["scrape_service"] > 0


@pytest.mark.e2e
def test_a_missing_model_is_said_in_a_line(tmp_path: Path) -> None:
    done = bench(tmp_path / "nowhere", tmp_path, "compare")
    assert done.returncode == 2
    assert "nowhere holds no model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.e2e
def test_quantization_measures_quality_and_size(model: Path, tmp_path: Path) -> None:
    done = bench(model, tmp_path, "quantization")
    assert done.returncode == 0, done.stderr
    result = kept(tmp_path, "quantization")
    sizes = {title: item["bytes_per_weight"] for title, item in result["choices"].items()}
    assert 4 < sizes["fp32"] < 5
    assert 0.5 < sizes["int4-128"] < 0.7
    for item in result["choices"].values():
        assert len(item["document_bits"]) == len(result["document_bytes"]) == 2
        pairs = zip(item["document_bits"], result["document_bytes"], strict=True)
        assert all(0 < bits < 8 * size for bits, size in pairs)


@pytest.mark.e2e
def test_the_layer_stack_is_timed_for_every_kind_of_weights(model: Path, tmp_path: Path) -> None:
    done = bench(model, tmp_path, "layer-stack")
    assert done.returncode == 0, done.stderr
    seconds = kept(tmp_path, "layer-stack")["seconds"]
    assert len(seconds) == 12
    assert all(min(times) > 0 for widths in seconds.values() for times in widths.values())
