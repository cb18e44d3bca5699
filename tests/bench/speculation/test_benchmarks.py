"""Every experiment runs on a tiny pair, and targets are judged by what was measured."""

import json
from dataclasses import replace
from typing import Any

import pytest

from bench.engine.together import Promises
from bench.models import BenchModel
from bench.prompts import CODE, CREATIVE, Prompt
from bench.speculation import adaptive, chat, compare, concurrency
from bench.speculation.ways import PLAIN, Sizes
from bench.tools.report import Outcome
from specops.request import Draft
from tests.bench.speculation.runs import ADAPTIVE, MODEL, measured, run

PROMPTS = [
    Prompt(CODE, "def add(a, b):\n"),
    Prompt(CODE, "return a + b\n"),
    Prompt(CREATIVE, "Once"),
]
SIZES = Sizes(new_tokens=8)


def kept(outcome: Outcome) -> dict[str, Any]:
    """The result, sure to survive a file."""
    assert all(len(row) == len(table.columns) for table in outcome.shown for row in table.rows)
    result: dict[str, Any] = json.loads(json.dumps(outcome.result, allow_nan=False))
    return result


def test_compare_runs_each_drafter_fixed_and_adaptively(tiny: BenchModel) -> None:
    found = kept(compare.run(tiny, PROMPTS, compare.Plan(2, SIZES)))
    ways = [(row["drafter"], row["adaptive"]) for row in found["categories"][CODE]]
    assert ways[0] == ("none", False)
    names = ("draft", "suffix", "cascade")
    assert sorted(ways[1:]) == sorted((name, way) for name in names for way in (False, True))
    assert found["prompts"] == {CODE: 2, CREATIVE: 1}


def test_concurrency_runs_requests_at_once_and_all_to_their_end(tiny: BenchModel) -> None:
    plan = concurrency.Plan(2, Sizes(24), loads=(2,))
    (rows,) = kept(concurrency.run(tiny, PROMPTS[:2], plan))["loads"].values()
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert all(row["equal"] == row["repeatable"] == 2 * 4 for row in rows)  # each prompt four times
    assert rows[0]["tokens_per_jump"] == pytest.approx(1.0)  # plain: a token a step and request


def test_adaptive_measures_every_length_and_drafter_at_the_acceptance_asked_for(
    tiny: BenchModel,
) -> None:
    plan = adaptive.Plan(24, 2, 2, clients=(1, 2), levels=(1.0, 0.0), lengths=(1, 3), most=3)
    measured = adaptive.measure(tiny, PROMPTS[:2], plan)
    names = ("simulated", "draft", "lookup and draft")
    assert {name for name, *_ in measured} == set(names)
    for (name, _, level), item in measured.items():
        rows = {row.label: row for row in item.rows()}
        drafting = [f"{name}, {way}" for way in ("k=1", "k=3", "adaptive")]
        assert list(rows) == ["plain", "none, k=1", *drafting]
        assert all(row.equal == row.repeatable for row in rows.values())
        if level == 1:
            assert rows[f"{name}, k=3"].tokens_per_jump > 2
        elif name != "lookup and draft":
            assert all(row.tokens_per_jump == 1 for row in rows.values())  # nothing was accepted
    found = adaptive.outcome({"tiny": (plan, measured)})
    assert len(kept(found)["rows"]) == 12
    worst = [min(float(row[place][:4]) for row in found.shown[0].rows) for place in (5, 8)]
    assert [line.measured for line in found.targets] == pytest.approx(worst, abs=0.006)


def test_targets_are_judged_by_medians_of_speed_and_tokens_per_pass() -> None:
    data = measured({CODE: [1.6, 1.4, 1.5], CREATIVE: [0.98, 0.9, 0.96]})
    lines = compare.outcome(MODEL, data, SIZES, ADAPTIVE).targets
    assert [line.measured for line in lines] == pytest.approx([1.5, 0.96, 10 / 4])
    assert [line.met for line in lines] == [True, False, True]
    plan, code = concurrency.Plan(2, SIZES, loads=(4,)), measured({CODE: [1.6, 1.6]}, at_once=4)
    (line,) = concurrency.outcome(MODEL, {CODE: {4: code}}, plan, ADAPTIVE).targets
    assert (line.measured, line.line) == (pytest.approx(1.6), 1.5)
    fresh, every = measured({"story": [2.0]}), measured({"story": [2.0, 0.5]})
    outcome = chat.outcome(MODEL, {chat.GREEDY: {chat.FRESH: fresh, "all": every}}, SIZES, "")
    lines = [line for line in outcome.targets if line.what.startswith(chat.GREEDY)]
    assert [line.measured for line in lines] == pytest.approx([2 / 1.5, 4 / 4.5])  # with prompts
    assert [(line.line, line.met) for line in lines] == [(1.5, False), (1.0, False)]


def test_answers_are_parted_by_language_and_by_whether_they_repeat() -> None:
    said = "one two three four five six seven "
    told = {"a": said, "b": said * 3, "c": said * 3, "d": said + "one two three four five six"}
    data = measured({"story": [2.0] * 4})
    data.batches[:] = [[Prompt("story", text)] for text in told]
    for place, text in enumerate(told.values()):
        (answer,) = data.runs[PLAIN][place].answers
        pieces = (answer.pieces[0]._replace(text=text),)
        data.runs[PLAIN][place] = replace(
            data.runs[PLAIN][place], answers=(replace(answer, pieces=pieces),)
        )
    parts = chat.parted(data, {"a", "b"})
    asked = {name: [batch[0].text for batch in part.batches] for name, part in parts.items()}
    assert list(asked.items()) == [
        (chat.FRESH, ["a"]),
        ("English, repeating", ["b"]),
        ("other languages, repeating", ["c", "d"]),
        (f"{chat.FRESH}: story", ["a"]),
        ("all", [*told]),
    ]


def test_an_answer_that_is_not_plain_decodings_is_not_sound() -> None:
    data = measured({CODE: [1.5]})

    def sound() -> set[bool]:
        alone = compare.outcome(MODEL, data, SIZES, ADAPTIVE)
        return {alone.sound, chat.outcome(MODEL, {chat.SAMPLED: {"all": data}}, SIZES, "").sound}

    assert sound() == {True}
    data.runs[ADAPTIVE] = [run("ab", 1.0)]
    assert sound() == {False}


def test_promises_are_compared_with_what_came_true_where_there_were_many() -> None:
    data, promised = measured({CODE: [1.5, 1.5]}), Promises()
    for accepted in (0, 1, 2, 2):
        draft = Draft((5, 6), drafter="head", accept_probs=(0.45, 0.72)[: accepted + 1])
        draft.accepted = accepted
        promised += Promises.of(draft)
    assert promised.counts == {
        ("head", 4): (4, pytest.approx(1.8), 3),
        ("head", 7): (3, pytest.approx(2.16), 2),
    }
    assert promised.most_off(4) == pytest.approx(0.3)
    assert promised.most_off(5) == 0.0
    first, second = data.runs[ADAPTIVE]
    data.runs[ADAPTIVE] = [replace(one, promises=promised) for one in (first, second)]
    outcome = chat.outcome(MODEL, {chat.GREEDY: {"all": data}}, SIZES, "")
    assert [line["made"] for line in outcome.result["promises"]] == [8, 6]
    assert outcome.targets[-1].met  # too few to tell


def test_questions_are_of_eight_kinds_and_five_languages_none_of_them_twice() -> None:
    parts = {part: chat.questions(part) for part in (chat.HELD_OUT, chat.CHOOSING)}
    assert {part: len(found) for part, found in parts.items()} == {"held out": 203, "choosing": 67}
    for found in parts.values():
        assert {len({item[field] for item in found}) for field in (0, 1)} == {8, 5}
    assert len({item.text for found in parts.values() for item in found}) == 270
