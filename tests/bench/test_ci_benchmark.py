"""The quality gate closes for a loss and for short jumps; a loss is measured twice over first."""

from __future__ import annotations

import pytest

from bench.speculation.ways import Measured
from bench.tools.stats import Summary
from scripts import ci_benchmark
from scripts.ci_benchmark import ROUNDS, Limits, decide, decide_at_once, judge, judge_at_once
from tests.bench.speculation.runs import measured

LIMITS = Limits(tokens_per_jump=1.0, loss=0.03, gain_at_once=1.1)


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


def test_too_small_a_gain_with_requests_at_once_is_told() -> None:
    assert judge_at_once(Summary.of([1.1, 1.3, 1.0]), LIMITS) == []
    (told,) = judge_at_once(Summary.of([1.05, 1.3, 1.0]), LIMITS)
    assert told.startswith("4 requests for code at once: adaptive speculation has 1.050")


def test_the_gain_at_once_is_measured_on_while_it_is_too_small() -> None:
    found = [[1.0], [1.3, 1.2]]
    gain, rounds = decide_at_once(lambda: found.pop(0), LIMITS, 100)
    assert (gain.median, gain.count, rounds) == (1.2, 3, 2 * ROUNDS)
    gain, rounds = decide_at_once(lambda: [1.0], LIMITS, 2 * ROUNDS)
    assert (gain.median, gain.count, rounds) == (1.0, 2, 2 * ROUNDS)


def test_the_exit_status_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Engine:
        class info:  # noqa: N801
            default_drafter = "suffix"

    runner = type("Runner", (), {"engine": Engine})
    monkeypatch.setattr(ci_benchmark.Runner, "load", lambda model: runner)
    monkeypatch.setattr(ci_benchmark, "by_category", lambda *_: [])
    for ratio, at_once, status in ((1.5, 1.2, 0), (0.5, 1.2, 1), (1.5, 0.9, 1)):
        data = measured({"code": [ratio]})
        monkeypatch.setattr(ci_benchmark.ways, "measure", lambda *_, found=data: found)
        monkeypatch.setattr(ci_benchmark, "gains_at_once", lambda *_, found=at_once: [found])
        assert ci_benchmark.main([]) == status
        assert ("FAILED" in capsys.readouterr().err) == bool(status)
