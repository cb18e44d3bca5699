"""The quality gate closes for a loss and for short jumps; a loss is measured on before."""

import pytest

from bench import ci_benchmark
from bench.ci_benchmark import ROUNDS, Part, Verdict, decide
from bench.speculation.ways import Measured
from tests.bench.speculation.runs import measured

CODE = Part("code", "code", 6, 1, tokens_per_jump=1.0, speed=0.97)


class Machine:
    """Measures these ratios one after the other, and the last one from then on."""

    def __init__(self, *ratios: float | list[float], steps: int = 4) -> None:
        self.ratios, self.steps = list(ratios), steps

    def __call__(self) -> Measured:
        ratio = self.ratios.pop(0) if len(self.ratios) > 1 else self.ratios[0]
        ratios = ratio if isinstance(ratio, list) else [ratio]
        return measured({"code": ratios}, steps=self.steps)


def verdict(machine: Machine, rounds: int = 100, part: Part = CODE) -> Verdict:
    return decide(part, machine, rounds)


def test_a_gain_and_a_loss_within_the_limit_are_fine_at_once() -> None:
    for ratio in (1.5, 0.98, 0.97):
        found = verdict(Machine(ratio))
        assert (found.complaints, found.rounds) == ([], ROUNDS)


@pytest.mark.parametrize(("gain", "fine"), [(1.4, True), (0.97, False)])
def test_a_small_loss_of_most_prompts_is_fine_where_others_make_up_for_it(
    gain: float, fine: bool
) -> None:
    found = verdict(Machine([0.95, 0.95, 0.95, gain, gain]), rounds=ROUNDS)
    assert found.row.speedup.median == pytest.approx(0.95)
    assert (not found.complaints) is fine


def test_a_loss_that_stays_is_believed_in_the_end() -> None:
    found = verdict(Machine(0.9), rounds=4 * ROUNDS)
    assert found.rounds == 4 * ROUNDS
    (complaint,) = found.complaints
    assert complaint.startswith("code: adaptive speculation has 0.900")


def test_too_few_tokens_per_pass_are_a_complaint() -> None:
    part = Part("code", "code", 6, 1, tokens_per_jump=1.5, speed=0.97)
    (complaint,) = verdict(
        Machine(1.2, steps=8), ROUNDS, part
    ).complaints  # ten tokens, eight steps
    assert complaint == "code: 1.25 tokens per pass, less than 1.50"


def test_a_loss_is_measured_on_and_every_round_counts() -> None:
    found = verdict(Machine(0.9, 1.02))
    assert found.rounds == 3 * ROUNDS  # 0.9, then 0.96 between the two, then 1.02 of three
    assert found.row.speedup.count == 3
    assert found.row.speedup.median == pytest.approx(1.02)


def test_the_exit_status_is_the_verdict_on_every_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ci_benchmark.Runner, "load", lambda model: None)
    for alone, at_once, status in ((1.5, 1.2, 0), (0.5, 1.2, 1), (1.5, 0.9, 1)):
        ratios = {1: alone, 4: at_once}
        monkeypatch.setattr(
            ci_benchmark,
            "rounds_of",
            lambda part, _, ratios=ratios: measured(
                {part.category: [ratios[part.at_once]]}, at_once=part.at_once
            ),
        )
        assert ci_benchmark.main([]) == status
        printed = capsys.readouterr()
        assert ("FAILED" in printed.err) == bool(status)
        assert "code, 4 at once" in printed.out
