"""The comparison itself, with our own decoder on every side, and with the real peers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.models import BenchModel
from bench.peers import compare, environment
from bench.peers.compare import OURS, Measured, Plan, SideProcess
from bench.peers.models import LLAMA_CPP, OPENVINO, peer_models
from bench.peers.protocol import Side
from bench.tools.quiet import Turns, settle
from bench.tools.worker import WorkerError
from specops.config import Settings
from specops.engine.engine import NO_DRAFTER
from specops.models.convert import Quantization, export_checkpoint
from tests.checkpoints import make_llama_checkpoint

VOCAB = 320
PLAN = Plan(loads=1, rounds=4, passes=3)
PREFILL = compare.prefill("prefill 256", 256, VOCAB, target=0.9)
CASES = [*compare.cases(PLAN.passes, VOCAB)[:-1], PREFILL]


class Recorder(Side):
    """A side that records its passes: rows, tokens, and what each row held before."""

    def __init__(self) -> None:
        self.length = 0
        self.ran: list[tuple[int, int, int]] = []

    def _hold(self, rows: int, length: int) -> None:
        self.length = length

    def _step(self, rows: int, tokens: int) -> Callable[[], object]:
        asked = (rows, tokens, self.length)
        self.length += tokens
        return lambda: self.ran.append(asked)

    def _prefill(self, prompt: Sequence[int]) -> Callable[[], object]:
        return self._step(1, len(prompt))


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_the_timed_passes_have_the_wanted_past_on_average(tokens: int) -> None:
    side = Recorder()
    seconds = side.measure(4, tokens, past=200, passes=5)
    timed = side.ran[1:]  # the first pass allocates
    assert len(seconds) == len(timed) == 5
    assert sum(past for _, _, past in timed) / 5 == 200
    assert {(rows, width) for rows, width, _ in timed} == {(4, tokens)}


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


def three_times_ours(model: BenchModel) -> dict[str, SideProcess]:
    return dict.fromkeys((OURS, LLAMA_CPP, OPENVINO), SideProcess.ours(model.settings))


def measure(processes: dict[str, SideProcess]) -> Measured:
    """Other tests compute meanwhile: times are not judged here."""
    return compare.measure(processes, CASES, PLAN, VOCAB, Turns(allowed=math.inf))


@pytest.mark.e2e
def test_every_case_is_timed_on_every_side_in_every_round(model: BenchModel) -> None:
    measured = measure(three_times_ours(model))
    assert list(measured.turns.ms) == [case.title for case in CASES]
    for title, of_case in measured.turns.ms.items():
        rounds = 2 if title == PREFILL.title else PLAN.rounds  # it takes part in every third
        assert all(len(values) == rounds and min(values) > 0 for values in of_case.values())
    assert measured.agreement == pytest.approx(dict.fromkeys(measured.agreement, 1.0))
    settle()  # the sides are gone


@pytest.mark.e2e
def test_a_side_that_dies_or_has_other_weights_ends_the_comparison_with_its_name(
    model: BenchModel, tmp_path: Path
) -> None:
    processes = three_times_ours(model)
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
