"""Output is compared with plain decoding alone, request by request: no difference is lost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.models import HEAD_KINDS, BenchModel, layer_kind
from bench.prompts import CODE, Prompt
from bench.speculation import equality, equality_worker
from bench.speculation.equality import Count, Plan
from specops.config import Settings
from specops.engine.engine import Engine
from tests.bench.speculation.runs import MODEL

PROMPTS = [Prompt(CODE, f"def f{number}(a):\n") for number in range(4)]
PLAN = Plan(
    prompts=4, kind_prompts=1, new_tokens=12, chunk=2, slow_every=2, slow_prompts=1, loads=(1, 4)
)
ALONE = [[7, -1.0, [[7, -1.0]]], [8, -2.0, [[8, -2.0]]], [9, -3.0, [[9, -3.0]]]]


@pytest.fixture
def engine(tiny_settings: Settings) -> Engine:
    return Engine.load(replace(tiny_settings, slots=4))


def fields(**changed: Any) -> dict[str, Any]:
    asked = {
        "prompt_tokens": [5, 6, 7], "max_new_tokens": 8, "sampling": {}, "drafter": "none",
        "k_draft": 0, "adaptive": False, "client": "", "arrives": 0, "leaves": None,
    }  # fmt: skip
    return asked | changed


def counted(*answers: list[Any]) -> Count:
    count = Count()
    for answer in answers:
        count.take(answer, ALONE)
    return count


def test_an_answer_that_was_cut_off_is_compared_as_far_as_it_goes() -> None:
    assert counted(ALONE, ALONE[:2], []) == Count(requests=3, tokens=5)


def test_another_token_is_told_with_its_place() -> None:
    other = [ALONE[0], [5, -2.0, []], ALONE[2]]
    count = counted(other, [*ALONE, ALONE[0]])
    assert count.first_differences == [1, 3]  # an answer that is too long differs, too
    assert count.differing == 2


def test_the_last_bit_of_a_log_probability_counts() -> None:
    nearly = [ALONE[0], [8, -2.0000000000000004, [[8, -2.0]]]]
    assert (counted(nearly).logprobs_differ, counted(nearly).first_differences) == (1, [])
    beside = [ALONE[0], [8, -2.0, [[8, -2.0000000000000004]]]]
    assert counted(beside).differing == 1


def test_one_differing_answer_anywhere_is_not_sound() -> None:
    fine, bad = Count(10, 110), Count(10, 110, 0, [4])
    good = {"all": {"": fine}, "way": {"a": fine, "b": fine}}
    done = equality.outcome({MODEL: good}, PLAN)
    assert done.sound
    assert done.result["lossless"]
    other = equality.outcome({MODEL: good | {"way": {"a": fine, "b": bad}}}, PLAN)
    assert not other.sound
    assert other.tables[0].rows[2] == ("way: b", "10", "110", "1", "0")
    kind = replace(MODEL, key="short-convolution", title="Convolutions")
    both = equality.outcome({MODEL: good, kind: {"all": {"": bad}}}, PLAN)
    assert not both.sound
    assert both.tables[1].rows == [("Convolutions", "10", "110", "1", "0")]
    alone = equality.outcome({kind: good}, PLAN)
    assert alone.tables[0].rows == [("Convolutions", "10", "110", "0", "0")]
    assert (done.name, both.name, alone.name) == ("", "", "equality-kinds")


def test_requests_arrive_in_turn_and_those_whose_client_leaves_are_cut_off(engine: Engine) -> None:
    asked = [fields(arrives=arrives) for arrives in (9, 0, 4)]
    asked[1]["leaves"] = 3
    late, cut, other = equality_worker.run(engine, asked)
    assert late == other
    assert len(late["tokens"]) == 8
    assert 3 <= len(cut["tokens"]) < 8
    assert cut["tokens"] == late["tokens"][: len(cut["tokens"])]
    assert not engine.scheduler.busy


@pytest.mark.e2e
def test_every_way_is_compared_in_all_circumstances(tiny: BenchModel) -> None:
    done = equality.run([tiny], PROMPTS, PLAN)
    assert done.sound
    counts = done.result["counts"][tiny.key]
    ways = counts["way"]
    lengths = {f"{name}, k={k}" for name in ("draft", "suffix", "cascade") for k in range(1, 9)}
    assert {"plain", "suffix, adaptive"} | lengths <= set(ways)
    assert all(count["requests"] >= len(PROMPTS) for count in ways.values())
    of_all = sum(count["requests"] for count in ways.values())
    for kind, found in counts.items():
        assert sum(count["requests"] for count in found.values()) == of_all, kind


@pytest.mark.e2e
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_heads_are_compared_like_all_drafters(kind: str, tmp_path: Path) -> None:
    model = layer_kind(kind, tmp_path)
    model = replace(model, settings=replace(model.settings, threads=1, max_k_draft=3))
    done = equality.run([model], PROMPTS, PLAN)
    assert done.sound
    ways = {f"{name}, k={k}" for name in ("head", "cascade") for k in (1, 2, 3)}
    assert {*ways, "head, adaptive"} <= set(done.result["counts"][kind]["way"])
