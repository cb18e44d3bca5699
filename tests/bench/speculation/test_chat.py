"""The questions of the chat benchmark, and how its figures are judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bench.models import BenchModel
from bench.prompts import Prompt
from bench.speculation import chat
from bench.speculation.batches import Batch
from bench.speculation.ways import PLAIN, Measured, Run, Sizes
from specops.config import Settings
from specops.request import GenerationStats
from tests.bench.speculation.runs import ADAPTIVE

KINDS = 8
MODEL = BenchModel("chat", "a chat model", Settings())
TOGETHER = {PLAIN: [Batch(2.0, 1.0, 100, 100)], ADAPTIVE: [Batch(2.0, 0.8, 100, 50)]}


def answer(seconds: float, *tokens: int) -> Run:
    stats = GenerationStats(
        generated_tokens=len(tokens), sequence_steps=2, decode_seconds=seconds, drafts=1
    )
    return Run(tokens, stats)


def measured(speedup: float = 2.0) -> Measured:
    runs = {PLAIN: [answer(1.0, 1, 2, 3)] * 2, ADAPTIVE: [answer(1.0 / speedup, 1, 2, 3)] * 2}
    return Measured([Prompt("story", "a"), Prompt("code", "b")], runs)


def test_two_hundred_questions_of_eight_kinds_a_third_for_choosing() -> None:
    held, chosen = (chat.questions(choosing=choosing) for choosing in (False, True))
    assert (len(held), len(chosen)) == (133, 67)
    assert len(dict(held + chosen)) == KINDS
    assert len({text for _, text in held + chosen}) == 200
    assert set(Counter(kind for kind, _ in held).values()) <= {16, 17}
    assert not set(held) & set(chosen)


@pytest.mark.parametrize(("speedup", "met"), [(2.0, 5), (0.5, 1)])
def test_each_kind_and_the_whole_are_judged(speedup: float, met: int) -> None:
    outcome = chat.outcome(MODEL, measured(speedup), TOGETHER, Sizes(8), "held out")
    wanted = outcome.result["wanted"]
    assert sum(line["measured"] >= line["least"] for line in wanted) == met
    assert set(outcome.result["kinds"]) == {"story", "code", "all"}
    assert outcome.result["at_once"]["total_speedup"] == pytest.approx(1.25)
    assert outcome.sound


def test_another_answer_than_plain_decodings_is_not_sound() -> None:
    found = measured()
    runs = found.runs | {ADAPTIVE: [answer(1.0, 1, 2, 4)] * 2}
    assert not chat.outcome(MODEL, replace(found, runs=runs), TOGETHER, Sizes(8), "").sound
