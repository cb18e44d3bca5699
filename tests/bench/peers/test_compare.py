"""The comparison itself: with our own decoder on every side, and with figures made up."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.models import BenchModel
from bench.peers import compare, environment
from bench.peers.compare import OURS, Case, Measured, Plan, SideProcess
from bench.peers.models import LLAMA_CPP, OPENVINO, peer_models
from bench.tools.quiet import Turns, settle
from bench.tools.worker import WorkerError
from specops.config import Settings
from specops.engine.engine import NO_DRAFTER
from specops.models.convert import Quantization, export_checkpoint
from tests.checkpoints import make_llama_checkpoint

VOCAB = 320
THREADS = 2
PREFILL = Case("prefill 256", tokens=256, prefill=True, wanted=0.9, against=(OPENVINO,))
PLAN = Plan(
    loads=1,
    rounds=4,
    passes=3,
    cases=(*(case for case in compare.CASES if not case.prefill), PREFILL),
)


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


def write_checkpoint(path: Path) -> Path:
    return make_llama_checkpoint(
        path, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=VOCAB, context=1024, dtype="float16"
    )


def three_times_ours(model: BenchModel) -> dict[str, SideProcess]:
    ours = compare.sides(
        model, THREADS, Path(sys.executable), {LLAMA_CPP: Path(), OPENVINO: Path()}
    )[OURS]
    return dict.fromkeys((OURS, LLAMA_CPP, OPENVINO), ours)


def measure(processes: dict[str, SideProcess]) -> Measured:
    """Other tests compute meanwhile: times are not judged here."""
    turns = Turns(strangers=math.inf)
    return compare.measure(processes, PLAN, threads=THREADS, vocab=VOCAB, progress=str, turns=turns)


@pytest.mark.e2e
def test_every_case_is_timed_on_every_side_in_every_round(model: BenchModel) -> None:
    measured = measure(three_times_ours(model))
    assert list(measured.ms) == [case.title for case in PLAN.cases]
    for title, of_case in measured.ms.items():
        rounds = 2 if title == PREFILL.title else PLAN.rounds  # it takes part in every third
        assert {side: len(values) for side, values in of_case.items()} == dict.fromkeys(
            (OURS, LLAMA_CPP, OPENVINO), PLAN.loads * rounds
        )
        assert all(value > 0 for rounds in of_case.values() for value in rounds)
    assert measured.agreement == pytest.approx(dict.fromkeys(measured.agreement, 1.0))
    settle()  # the sides are gone


@pytest.mark.e2e
def test_a_side_that_dies_ends_the_comparison_with_its_name(model: BenchModel) -> None:
    processes = three_times_ours(model)
    dead = SideProcess((sys.executable, "-c", "raise SystemExit('out of memory')"), "model")
    with pytest.raises(WorkerError, match=rf"{OPENVINO} ended \(1\)(.|\n)*out of memory"):
        measure(processes | {OPENVINO: dead})


@pytest.mark.e2e
def test_a_side_with_other_weights_is_found_out(model: BenchModel, tmp_path: Path) -> None:
    make_llama_checkpoint(
        tmp_path / "other", hidden=256, heads=4, kv_heads=2, ffn=512, vocab=VOCAB, seed=1,
        context=1024,
    )  # fmt: skip
    settings = replace(model.settings, target=str(tmp_path / "other"), quant="int4-128-rtn")
    other = BenchModel("other", "other model", settings)
    processes = three_times_ours(model) | {LLAMA_CPP: three_times_ours(other)[OURS]}
    with pytest.raises(WorkerError, match=f"{LLAMA_CPP} computes something else"):
        measure(processes)


@pytest.mark.e2e
@pytest.mark.skipif(
    not environment.installed(), reason="no peers here: `python -m bench peers` installs them"
)
def test_the_real_peers_compute_what_we_compute(model: BenchModel, tmp_path: Path) -> None:
    files = peer_models(
        environment.python(), str, write_checkpoint=write_checkpoint, cache=tmp_path
    )
    processes = compare.sides(model, THREADS, environment.python(), files)
    measured = measure(processes)
    assert set(measured.runs_on) == {OURS, LLAMA_CPP, OPENVINO}
    assert min(measured.agreement.values()) > 0.5


def made_up(ours: float, llama: float, openvino: float, case: Case) -> Measured:
    measured = Measured(Plan(1, 2, 1, (case,)), THREADS)
    measured.runs_on = {OURS: "a", LLAMA_CPP: "b", OPENVINO: "c"}
    measured.agreement = {OURS: 1.0, LLAMA_CPP: 0.97, OPENVINO: 0.98}
    measured.ms = {case.title: {OURS: [ours] * 2, LLAMA_CPP: [llama] * 2, OPENVINO: [openvino] * 2}}
    return measured


def test_we_are_held_against_the_faster_peer_of_those_that_count() -> None:
    one = Case("1 token", wanted=1.2)
    for times, told in (
        ((10, 13, 20, one), (LLAMA_CPP, 1.3, True)),
        ((10, 20, 11, one), (OPENVINO, 1.1, False)),
        ((10, 1, 9, PREFILL), (OPENVINO, 0.9, True)),
    ):
        (line,) = compare.outcome("m", made_up(*times)).wanted
        assert (line.what.rpartition(" ")[2], line.measured, line.met) == told


def test_the_table_shows_every_side_and_how_far_it_agrees() -> None:
    case = Case("1 token", wanted=1.2)
    found = compare.outcome("m", made_up(10, 20, 11, case))
    (row,) = found.tables[0].rows
    assert row[1].startswith("10.0")
    assert row[-1] == OPENVINO
    assert f"{OPENVINO} 0.980" in found.tables[0].text()
    assert found.result["cases"][0]["milliseconds"][OURS] == [10, 10]
