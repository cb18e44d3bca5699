"""The comparison itself, with our own decoder on every side, and with the real peers."""

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from bench.models import BenchModel
from bench.peers import compare, environment
from bench.peers.compare import Measured, Plan, SideProcess
from bench.peers.models import LLAMA_CPP, OPENVINO, OURS, TYPES, Lineup, peer_models
from bench.tools.quiet import Turns
from bench.tools.worker import WorkerError
from specops.config import Settings
from specops.engine.engine import NO_DRAFTER
from specops.models.convert import Quantization, export_checkpoint
from tests.checkpoints import make_llama_checkpoint

VOCAB = 304  # all of them have a spelling, as llama.cpp demands
PLAN = Plan(loads=1, rounds=4, passes=3)
PREFILL = compare.prefill("prompt of 256", 256, VOCAB)
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


def measure(
    processes: dict[str, SideProcess], sides: dict[str, dict[str, str]] | None = None
) -> Measured:
    """Other tests compute meanwhile: times are not judged here."""
    sides = sides or {"small": {name: name for name in processes}}
    return compare.measure(processes, sides, CASES, PLAN, VOCAB, turns=Turns(allowed=math.inf))


def test_a_peer_is_compared_round_by_round_on_its_own_file() -> None:
    sides = {
        kind: {OURS: kind, LLAMA_CPP: f"theirs {kind}"} for kind in ("Q4_0", *compare._PER_BYTE)
    }
    ms = {name: [2.0, 4.0] for compared in sides.values() for name in compared.values()}
    ms |= {"theirs Q4_K_M": [2.0, 10.0], "IQ4_XS": [4.0, 8.0]}
    turns = Turns(ms={"1 token": ms})
    found = compare.outcome(dict.fromkeys(sides, 10), Measured(PLAN, sides, turns))
    rows = {row[0]: row[2:] for row in found.tables[0].rows}
    ours, theirs, _, over, over_openvino = rows["Q4_K_M"]
    assert (ours[:3], theirs[:3], over[:4], over_openvino) == ("3.0", "6.0", "1.75", "")
    judged = {target.what: (target.measured, target.met) for target in found.targets}
    assert judged["Q4_K_M, 1 token: times as fast as llama.cpp"] == (1.75, True)
    assert judged["IQ4_XS, 1 token: time per byte of the file, over Q4_0's"] == (2.0, False)


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


def lineups(model: BenchModel, folder: Path) -> tuple[Path, list[Lineup]]:
    """The small model in all kinds of weights that are compared."""
    python = environment.python()
    files = peer_models(python, write_checkpoint, cache=folder)
    openvino = {OPENVINO: files[OPENVINO]}
    found = [Lineup("int4", model, {LLAMA_CPP: files["Q4_0"], **openvino})]
    for kind in TYPES:
        settings = replace(model.settings, target=str(files[kind]))
        own = BenchModel(kind, kind, settings)
        found.append(Lineup(kind, own, {LLAMA_CPP: files[kind], **openvino}))
    return python, found


def use_small_models(bench: ModuleType, model: BenchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a comparison with peers take these models, whatever else computes beside it."""
    monkeypatch.setattr(bench, "lineups", lambda cache: lineups(model, cache))
    monkeypatch.setattr(bench, "TINYLLAMA_VOCAB", VOCAB)
    monkeypatch.setattr(bench, "Turns", partial(Turns, allowed=math.inf))


@pytest.mark.e2e
@needs_peers
def test_the_real_peers_compute_what_we_compute(
    model: BenchModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_models(compare, model, monkeypatch)
    found = compare.run(Plan(loads=1, rounds=1, passes=1), tmp_path)
    assert len(found.tables[0].rows) == (1 + len(TYPES)) * len(CASES)
    assert found.result["agreement"]["Q4_K_M and llama.cpp Q4_K_M"] > 0.99
    assert min(found.result["agreement"].values()) > 0.5
    assert all(set(case["over"]) == {LLAMA_CPP, OPENVINO} for case in found.result["cases"])
