"""The comparison itself, with our own decoder on every side, and with the real peers."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.models import BenchModel
from bench.peers import compare, environment
from bench.peers.compare import OURS, Measured, Plan, SideProcess
from bench.peers.models import LLAMA_CPP, OPENVINO, peer_models
from bench.tools.quiet import Turns
from bench.tools.worker import WorkerError
from specops.config import Settings
from specops.engine.engine import NO_DRAFTER
from specops.models.convert import Quantization, export_checkpoint
from tests.checkpoints import make_llama_checkpoint

VOCAB = 320
PLAN = Plan(loads=1, rounds=4, passes=3)
PREFILL = compare.prefill("prefill 256", 256, VOCAB, target=0.9)
CASES = [*compare.cases(PLAN.passes, VOCAB)[:-1], PREFILL]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> BenchModel:
    """A small model with room for the benchmark's sequences; its checkpoint lies beside it."""
    folder = tmp_path_factory.mktemp("peers")
    write_checkpoint(folder / "checkpoint")
    export_checkpoint(
        folder / "checkpoint", folder / "model", quantization=Quantization.parse("int4-128-rtn")
    )
    settings = Settings(target=str(folder / "model"), draft=NO_DRAFTER, cache_dir=folder / "cache")
    return BenchModel("small", "small model", settings)


def write_checkpoint(path: Path, seed: int = 0) -> Path:
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": VOCAB, "context": 1024}
    return make_llama_checkpoint(path, **sizes, seed=seed, dtype="float16")


def measure(processes: dict[str, SideProcess]) -> Measured:
    """Other tests compute meanwhile: times are not judged here."""
    return compare.measure(processes, CASES, PLAN, VOCAB, Turns(allowed=math.inf))


@pytest.mark.e2e
def test_every_case_is_timed_on_sides_that_live_and_agree(
    model: BenchModel, tmp_path: Path
) -> None:
    processes = dict.fromkeys((OURS, LLAMA_CPP, OPENVINO), SideProcess.ours(model.settings))
    measured = measure(processes)
    assert list(measured.turns.ms) == [case.title for case in CASES]
    for title, of_case in measured.turns.ms.items():
        rounds = 2 if title == PREFILL.title else PLAN.rounds  # it takes part in every third
        assert all(len(values) == rounds and min(values) > 0 for values in of_case.values())
    assert measured.agreement == pytest.approx(dict.fromkeys(measured.agreement, 1.0))
    dead = SideProcess((sys.executable, "-c", "raise SystemExit('out of memory')"), "model")
    with pytest.raises(WorkerError, match=rf"{OPENVINO} ended \(1\)(.|\n)*out of memory"):
        measure(processes | {OPENVINO: dead})
    write_checkpoint(tmp_path / "other", seed=1)
    settings = replace(model.settings, target=str(tmp_path / "other"), quant="int4-128-rtn")
    with pytest.raises(WorkerError, match=f"{LLAMA_CPP} computes something else"):
        measure(processes | {LLAMA_CPP: SideProcess.ours(settings)})


needs_peers = pytest.mark.skipif(
    not environment.installed(), reason="no peers here: `python -m bench peers` installs them"
)


@pytest.mark.e2e
@needs_peers
def test_the_real_peers_compute_what_we_compute(model: BenchModel, tmp_path: Path) -> None:
    python = environment.python()
    files = peer_models(python, write_checkpoint, tmp_path)
    modules = {LLAMA_CPP: "llama_worker", OPENVINO: "openvino_worker"}
    peers = {
        name: SideProcess.peer(python, module, files[name]) for name, module in modules.items()
    }
    measured = measure({OURS: SideProcess.ours(model.settings), **peers})
    assert set(measured.runs_on) == {OURS, LLAMA_CPP, OPENVINO}
    assert min(measured.agreement.values()) > 0.5
