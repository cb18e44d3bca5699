"""`specops bench load`: the times add up, and the memory is what a serving process holds."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specops.cli import load_bench
from specops.cli.main import main
from specops.cli.options import CommandError
from specops.engine.loading import WARM_UP
from specops.engine.model_info import ModelState
from tests.conftest import THREADS

SLOTS, KV_TOKENS = 2, 256


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPECOPS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPECOPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SPECOPS_THREADS", str(THREADS))
    monkeypatch.setenv("SPECOPS_SLOTS", str(SLOTS))
    monkeypatch.setenv("SPECOPS_KV_TOKENS", str(KV_TOKENS))
    monkeypatch.setenv("SPECOPS_KV_DTYPE", "fp32")


def measured(model: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["bench", "load", "--model", str(model), "--runs", "2", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_times_add_up_and_memory_holds_the_cache_of_the_model_alone(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The draft is not loaded.
    monkeypatch.setenv("SPECOPS_DRAFT", str(tiny_pair / "draft" / "onnx" / "int4-128-rtn"))
    found = measured(tiny_pair / "target" / "onnx" / "int4-128-rtn", capsys)
    assert len(found["runs"]) == 2
    for run in found["runs"]:
        assert run["ready_seconds"] == pytest.approx(sum(seconds for _, seconds in run["steps"]))
        assert 0 < run["read_ahead_seconds"] < run["load_seconds"] < run["ready_seconds"]
        assert run["import_seconds"] > 0
        # 2 layers, keys and values, 2 heads of 64 in float32.
        assert run["kv_cache"] == 2 * 2 * 2 * 64 * 4 * KV_TOKENS
        assert run["anonymous"] >= run["at_start"] + run["kv_cache"]
        assert run["file_backed"] > 0
        assert run["beyond_kv"] == run["anonymous"] + run["swapped"] - run["kv_cache"]
    assert found["beyond_kv_bytes"] < found["anonymous_bytes"]


def test_work_of_the_first_start_only_is_not_counted(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first start converts the checkpoint and lays out its weights; this is not loading.
    found = measured(tiny_pair / "target", capsys)
    steps = {step for run in found["runs"] for step, _ in run["steps"]}
    assert WARM_UP in steps
    assert not any("converting" in step or "laying out" in step for step in steps), steps


def test_the_table_shows_the_steps(tiny_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_pair / "target" / "onnx" / "int4-128-rtn"
    assert main(["bench", "load", "--model", str(model), "--runs", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "int4-128-rtn, int4-128-rtn, 2 slots, 256 tokens of KV cache in fp32, 1 threads, "
        "1 warm starts"
    )
    for line in ("load, until the first pass ran", f"  {WARM_UP}", "  of it KV cache", "ready"):
        assert f"\n{line}" in shown
    assert str(tiny_pair) not in shown  # only the last part of a path is shown


def test_an_error_of_loading_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "load", "--target", "/nothing"]) == 1
    assert "/nothing" in capsys.readouterr().err
    assert main(["bench", "load", "--model", "nothing"]) == 2
    assert "SPECOPS_MODEL must be one of demo" in capsys.readouterr().err
    assert main(["bench", "load", "--runs", "0"]) == 2
    assert "--runs" in capsys.readouterr().err


def test_reports_that_differ_in_their_percentage_only_are_one_step() -> None:
    steps = load_bench._Steps()
    for detail in ("reading /m: 0 %", "reading /m: 70 %", "opening /m"):
        steps(ModelState.LOADING, detail)
    assert [name for name, _ in steps.durations()] == ["preparing", "reading /m", "opening /m"]


def test_no_module_is_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("from pathlib import Path\nPath('was run').touch()\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="nowhere contains no model"):
        load_bench.measure({**os.environ, "SPECOPS_TARGET": str(tmp_path / "nowhere")}, 1, print)
    assert not (tmp_path / "was run").exists()
