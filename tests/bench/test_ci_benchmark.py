"""The quality gate closes for a loss and for short jumps; a loss is measured twice over first."""

from __future__ import annotations

import pytest

from bench.speculation import Measured
from scripts import ci_benchmark
from scripts.ci_benchmark import ROUNDS, Limits, decide, judge
from tests.bench.runs import measured

LIMITS = Limits(tokens_per_jump=1.0, loss=0.03)


class Machine:
    """Measures what it is told to, one after the other, the last one ever after."""

    def __init__(self, *found: Measured) -> None:
        self.found = list(found)

    def __call__(self) -> Measured:
        return self.found.pop(0) if len(self.found) > 1 else self.found[0]


def complaints(found: Measured, limits: Limits = LIMITS) -> list[str]:
    return [text for verdict in judge(found, limits) for text in verdict.complaints]


def test_a_gain_and_a_loss_within_the_limit_are_fine() -> None:
    assert complaints(measured({"code": [1.5, 1.6], "creative": [0.98, 0.97]})) == []


def test_a_loss_on_one_kind_of_text_is_told_whatever_the_others_gain() -> None:
    (told,) = complaints(measured({"code": [3.0, 3.0], "creative": [0.95, 0.96]}))
    assert told.startswith("creative: adaptive speculation has 0.955")


def test_short_jumps_are_told() -> None:
    found = measured({"code": [1.2]}, steps=8)  # ten tokens in eight steps
    assert complaints(found, Limits(1.2, 0.03)) == []
    (told,) = complaints(found, Limits(1.5, 0.03))
    assert told == "code: 1.25 tokens per jump, wanted are 1.50"


def test_what_is_fine_at_once_is_measured_once() -> None:
    assert decide(Machine(measured({"code": [1.0]})), LIMITS, 100)[1] == ROUNDS


def test_a_loss_is_measured_on_and_every_round_counts() -> None:
    machine = Machine(measured({"code": [0.9]}), measured({"code": [1.02]}))
    (verdict,), rounds = decide(machine, LIMITS, 100)
    assert rounds == 3 * ROUNDS  # 0.9, then 0.96 between the two, then 1.02 of three
    assert verdict.row.speedup.count == 3
    assert verdict.row.speedup.median == pytest.approx(1.02)


def test_a_loss_that_stays_is_believed_in_the_end() -> None:
    (verdict,), rounds = decide(Machine(measured({"code": [0.9]})), LIMITS, 4 * ROUNDS)
    assert rounds == 4 * ROUNDS
    assert verdict.complaints


def test_the_exit_status_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Engine:
        class info:  # noqa: N801
            default_drafter = "ngram"

    runner = type("Runner", (), {"engine": Engine})
    monkeypatch.setattr(ci_benchmark.Runner, "load", lambda model: runner)
    monkeypatch.setattr(ci_benchmark, "by_category", lambda each: [])
    for ratio, status in ((1.5, 0), (0.5, 1)):
        data = measured({"code": [ratio]})
        monkeypatch.setattr(ci_benchmark.speculation, "measure", lambda *_, found=data: found)
        assert ci_benchmark.main([]) == status
        assert ("FAILED" in capsys.readouterr().err) == bool(status)


def test_the_gate_is_part_of_what_every_change_must_pass() -> None:
    check = (ci_benchmark.Path(__file__).resolve().parents[2] / "scripts" / "check").read_text()
    assert "\n.venv/bin/python scripts/ci_benchmark.py\n" in check
