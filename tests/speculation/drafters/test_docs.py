"""The drafter in the documentation works as it stands there."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from specops.speculation.drafters.registry import make_drafters
from tests.simulated_target import (
    SimulatedTarget,
    Text,
    expected,
    make_request,
    make_scheduler,
    serve,
)
from tests.speculation.drafters.ask import propose

PAGE = Path(__file__).parents[3] / "docs" / "drafters.md"
SAME = 28  # is followed by itself in such a text


@pytest.fixture
def example() -> ModuleType:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    module = ModuleType("repeat")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)  # noqa: S102 - our own page
    return module


def test_what_the_example_proposes(example: ModuleType) -> None:
    drafter = example.RepeatDrafter()
    assert propose(drafter, [5, 7, 7], 3).tokens == (7, 7, 7)
    assert propose(drafter, [7, 7, 5], 3).tokens == ()


@pytest.mark.parametrize("surprise", [0.0, 0.4])
def test_the_example_serves_requests_and_changes_no_output(
    example: ModuleType, surprise: float
) -> None:
    target = SimulatedTarget(text=Text(surprise, vocab_size=63))
    drafters = [example.RepeatDrafter()]
    request = make_request((SAME,) * 4, 40, drafter="repeat", k_draft=3)
    served = serve(make_scheduler(target, drafters), request)
    assert served.tokens(request) == expected(target.text, request)
    stats = served.stats(request)
    assert stats.accepted_tokens > 0
    assert stats.draft_misses + stats.drafts <= stats.sequence_steps


def test_the_page_names_every_drafter() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    made = make_drafters(320)
    assert named == {*made, "draft", "head", "cascade", "none"}
