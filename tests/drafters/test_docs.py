"""The drafter in the documentation works as it stands there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from specops.config import Settings
from specops.drafters.registry import MAKERS, Means, make_drafters
from specops.engine import Engine
from specops.request import GenerationRequest, GenerationStats
from tests.drafters.ask import propose

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"


@pytest.fixture
def example() -> ModuleType:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    module = ModuleType("repeat")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)  # noqa: S102 - our own page
    return module


def test_the_examples_guesses(example: ModuleType) -> None:
    drafter = example.make(Means(320), {})
    assert propose(drafter, [5, 7, 7], 3).tokens == (7, 7, 7)
    assert propose(drafter, [7, 7, 5], 3).tokens == ()


def test_the_example_serves_requests_and_changes_no_output(
    example: ModuleType, tiny_settings: Settings
) -> None:
    engine = Engine.load(replace(tiny_settings, draft="none"))
    means = Means(engine.info.vocab_size)
    engine.scheduler.drafters = make_drafters(means, (*MAKERS, example.make))
    request = GenerationRequest(
        request_id="docs",
        prompt_tokens=(9, 9, 9, 9),
        max_new_tokens=40,
        exact=True,
        ignore_eos=True,
        k_draft=3,
    )

    def run(drafter: str) -> tuple[list[int], GenerationStats]:
        outputs = list(engine.generate(replace(request, drafter=drafter)))
        stats = outputs[-1].stats
        assert stats is not None
        return [piece.token for output in outputs for piece in output.pieces], stats

    plain, _ = run("none")
    tokens, stats = run("repeat")
    assert tokens == plain
    assert stats.accepted_tokens > 0
    assert stats.draft_misses + stats.drafts <= stats.sequence_steps


def test_the_page_names_every_drafter() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    made = make_drafters(Means(320, shared_ngrams=1))
    assert named == {*made, "draft", "cascade", "none"}
