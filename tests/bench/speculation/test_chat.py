"""The questions of the chat benchmark, and how its figures are judged."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.speculation import chat
from bench.speculation.ways import Sizes
from tests.bench.speculation.runs import ADAPTIVE, MODEL, measured, run

KINDS = 8
TOGETHER = measured({"story": [1.25]}, at_once=4)


def test_two_hundred_questions_of_eight_kinds_a_third_for_choosing() -> None:
    held, chosen = (chat.questions(choosing=choosing) for choosing in (False, True))
    assert (len(held), len(chosen)) == (133, 67)
    assert len(dict(held + chosen)) == KINDS
    assert len({text for _, text in held + chosen}) == 200
    assert set(Counter(kind for kind, _ in held).values()) <= {16, 17}
    assert not set(held) & set(chosen)


@pytest.mark.parametrize(("speedup", "met"), [(2.0, 5), (0.5, 1)])
def test_each_kind_and_the_whole_are_judged(speedup: float, met: int) -> None:
    alone = measured({"story": [speedup], "code": [speedup]})
    outcome = chat.outcome(MODEL, alone, TOGETHER, Sizes(8), "held out")
    assert sum(line.met for line in outcome.wanted) == met
    assert set(outcome.result["kinds"]) == {"story", "code", "all", "all, 4 clients"}
    assert outcome.wanted[-1].measured == pytest.approx(1.25)
    assert outcome.sound


def test_another_answer_than_plain_decodings_is_not_sound() -> None:
    alone = measured({"story": [2.0], "code": [2.0]})
    alone.runs[ADAPTIVE][1] = run("ab", 0.5)
    assert not chat.outcome(MODEL, alone, TOGETHER, Sizes(8), "").sound
