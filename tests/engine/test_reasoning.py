"""Reasoning end when their tokens are spent, by the same tokens whatever is drafted."""

from dataclasses import replace

import pytest

from specops.engine.scheduler import Scheduler
from specops.request import GenerationRequest, ReasoningMarks, SamplingParams
from specops.speculation.drafters.suffix import SuffixDrafter
from tests.simulated_target import SimulatedTarget, make_request, make_scheduler, serve, tokenizer
from tests.speculation.drafters.scripted import Scripted

PROMPT = tuple(range(3, 20)) * 2
OPENING, CLOSING = "(*", "*)"  # of the simulated vocabulary's characters
WAYS = [("none", 0), *((name, count) for name in ("suffix", "half") for count in (1, 4, 8))]


def made() -> Scheduler:
    target = SimulatedTarget()
    return make_scheduler(
        target, [SuffixDrafter(), Scripted(target.text, 0.6, name="half", silent=0.2)]
    )


def thinking(most: int | None, *, begun: bool = True) -> GenerationRequest:
    marks = ReasoningMarks(OPENING, CLOSING, begun, (), tokenizer().encode_further(CLOSING), most)
    return make_request(PROMPT, 60, reasoning=marks)


def text(request: GenerationRequest) -> tuple[list[int], str]:
    tokens = serve(made(), request).tokens(request)
    return tokens, tokenizer().decode(tokens)


@pytest.mark.parametrize("most", [0, 1, 7, 30])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.1, seed=3)])
def test_the_closing_mark_comes_when_a_budget_is_spent(most: int, sampling: SamplingParams) -> None:
    asked = replace(thinking(most), sampling=sampling)
    free, unbound = text(replace(asked, reasoning=thinking(None).reasoning))
    assert CLOSING not in unbound  # this text has none by itself
    answers = []
    for drafter, k_draft in WAYS:
        tokens, written = text(replace(asked, drafter=drafter, k_draft=k_draft))
        assert tokens[:most] == free[:most]
        assert written.index(CLOSING) == len(tokenizer().decode(tokens[:most]))
        answers.append(tokens)
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) == 60


def test_a_budget_is_nothing_to_an_answer_that_does_not_think() -> None:
    assert text(thinking(0, begun=False)) == text(thinking(None, begun=False))
